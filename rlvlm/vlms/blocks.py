"""The transformer blocks of a network, whatever its family: computed a second time in the backward pass to save memory.

Source: Chen et al. 2016, arXiv:1604.06174 (gradient checkpointing). Policies use it, and what shards them.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

LARGE = 500_000_000
"""Parameters from which on activations, and not time, are what there is too little of."""


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The blocks of `network`, of its language model and its image encoders: members of its outermost module lists."""
    blocks: list[nn.Module] = []
    for child in network.children():
        # by structure and not by name: every family calls its list of blocks something else
        blocks += list(child) if isinstance(child, nn.ModuleList) else blocks_of(child)
    return blocks


def recompute_blocks(network: nn.Module, wanted: bool | None) -> bool:
    """Has every block of `network` keep its inputs alone for the backward pass; returns whether it does from now on.

    Loss and gradients stay the same, a backward pass takes the time of a forward pass longer, and what learns nothing
    (sampling, evaluations, the reference) is left as it was.

    Args:
        network: changed in place.
        wanted: None means yes where it has 500 million parameters or more.
    """
    if wanted is None:
        wanted = sum(parameter.numel() for parameter in network.parameters()) >= LARGE
    if wanted:
        for block in blocks_of(network):
            # On the block itself, so that names of weights stay; transformers' own switch needs training mode, in
            # which a policy would drop out activations and lose its cache of keys and values.
            block.forward = partial(_recomputed, block)
    return wanted


def _recomputed(block: nn.Module, *inputs: Any, **settings: Any) -> Any:
    forward = partial(type(block).forward, block)  # pyright: ignore[reportArgumentType] - every block has its own
    if not torch.is_grad_enabled():
        return forward(*inputs, **settings)
    return checkpoint(forward, *inputs, use_reentrant=False, **settings)
