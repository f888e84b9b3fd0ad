"""Trained weights of a policy by name: reading, loading, and swapping them temporarily. Used by all policies.

A weight may be a slice of one that is sharded over processes (`algorithms.sharding`); it then has the shape of the
whole, and takes its own part of a given value.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Shardable:
    """Description of a policy's weights by which they are sharded over several learners."""

    root: nn.Module
    """Module that contains the blocks, and is called as one."""
    methods: tuple[str, ...] = ()
    """Further methods of the root that are called, like `forward`; none calls another."""
    heads: tuple[nn.Module, ...] = ()
    """Small networks in float32, called on their own."""


def trainable_state(policy: nn.Module) -> dict[str, Tensor]:
    """Returns name and value of every trained tensor, detached but sharing its memory."""
    return {name: value.detach() for name, value in policy.named_parameters() if value.requires_grad}


def load_weights(own: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Writes each value of `state` into the tensor of the same name in `own`.

    Args:
        own: tensors as returned by `trainable_state`.
        state: tensors or arrays, whole or sliced like `own`.

    Raises:
        ValueError: a name or a shape differs.
    """
    check_same(own, {name: tuple(np.shape(value)) for name, value in state.items()})
    for name, value in own.items():
        given = state[name]
        copy_into(value, given if isinstance(given, Tensor) else torch.from_numpy(np.array(given)))  # may be read-only


def check_same(own: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises unless `own` has exactly the names and shapes in `shapes`.

    Raises:
        ValueError: a name or a shape differs.
    """
    odd = sorted(own.keys() ^ shapes.keys()) or sorted(name for name in own if tuple(own[name].shape) != shapes[name])
    if odd:
        raise ValueError(f"the weights are of another policy: {len(odd)} tensors differ, such as {odd[0]}")


@torch.no_grad()
def copy_into(own: Any, given: Tensor) -> None:
    """Writes `given` into `own`; a slice takes its part of a whole tensor."""
    if hasattr(own, "to_local"):
        given, own = slice_like(given, own).to_local(), own.to_local()
    own.copy_(given)


def slice_like(value: Tensor, like: Any) -> Any:
    """Returns the part of `value` that belongs into `like`, a slice or not, without communication."""
    if hasattr(value, "to_local") or not hasattr(like, "to_local"):
        return value
    from torch.distributed.tensor import distribute_tensor  # slow to import, and only sharded learners need it

    there = value.to(like.device, like.dtype)
    return distribute_tensor(there, like.device_mesh, like.placements, src_data_rank=None)


@contextmanager
def swap_weights(own: Mapping[str, Tensor], state: Mapping[str, Any]) -> Iterator[None]:
    """Gives `own` the values of `state` while the context is open, then restores its own.

    Raises:
        ValueError: a name or a shape differs.
    """
    # clones, because `own` shares its memory with the parameters that are about to change
    now = {name: value.clone() for name, value in own.items()}
    load_weights(own, state)
    try:
        yield
    finally:
        load_weights(own, now)
