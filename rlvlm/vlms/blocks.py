"""Activation checkpointing: recomputes a network's transformer blocks in the backward pass to save memory.

Source: Chen et al. 2016, arXiv:1604.06174 (gradient checkpointing). Used by policies and by their sharding.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

LARGE = 500_000_000
"""Number of parameters above which activations are checkpointed by default: memory, not time, is the limit."""


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """Returns the blocks of `network`, of its language model and image encoders: its outermost module lists."""
    blocks: list[nn.Module] = []
    for child in network.children():
        # by structure, not by name: every family names its list of blocks differently
        blocks += list(child) if isinstance(child, nn.ModuleList) else blocks_of(child)
    return blocks


def recompute_blocks(network: nn.Module, wanted: bool | None) -> bool:
    """Makes every block of `network` keep only its inputs for the backward pass; returns whether it does so now.

    Loss and gradients stay the same, a backward pass takes longer by one forward pass, and forward passes without
    gradients (sampling, evaluations, the reference) are unchanged.

    Args:
        network: changed in place.
        wanted: None means yes if it has 500 million parameters or more.
    """
    if wanted is None:
        wanted = sum(parameter.numel() for parameter in network.parameters()) >= LARGE
    if wanted:
        for block in blocks_of(network):
            # On the block itself, so that weights keep their names; transformers' own switch needs training mode, in
            # which a policy would drop out activations and lose its cache of keys and values.
            block.forward = partial(_recomputed, block)
    return wanted


def _recomputed(block: nn.Module, *inputs: Any, **settings: Any) -> Any:
    forward = partial(type(block).forward, block)  # pyright: ignore[reportArgumentType] - every block has its own
    if not torch.is_grad_enabled():
        return forward(*inputs, **settings)
    return checkpoint(forward, *inputs, use_reentrant=False, **settings)
