"""Weights that learn, cut into buckets on its way from its trainer to its players: neither side needs room for
more than two of them beside its own weights.

Learners write them (`algorithms.sharding.put_buckets`), and replicas (`serving.weights`) and the run's own process read
them. Where the bytes lie in between is the writer's `put` and the reader's `fetch`: Ray's object store.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlvlm.policies.weights import check_same, copy_into

Content = NDArray[np.uint8]
"""[N] the bytes of a bucket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlace:
    """Location of a tensor in a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Torch's name for it, such as `bfloat16`."""
    begin: int
    """First byte."""
    end: int
    """Behind the last byte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Some tensors, small enough to go with every request: their bytes stay where they were put."""

    tensors: tuple[TensorPlace, ...]
    sha256: str
    """Digest of the bytes."""
    where: Any
    """The bytes, as `put` gave them."""


def write_buckets(
    state: Mapping[str, Any],
    put: Callable[[Content], Any],
    *,
    size: int,
    whole: Callable[[Any], Tensor] = lambda value: value.detach().cpu(),
) -> list[Bucket]:
    """`state` in buckets, in its order. One bucket is held at a time, and one tensor.

    Args:
        state: name and value.
        put: keeps bytes, which are overwritten once it has returned, and returns where they are.
        size: bytes that a bucket holds at most; a larger tensor has one of its own.
        whole: makes a tensor on the CPU of a value of `state`.
    """
    # one buffer, used again for every bucket
    buffer = np.empty(min(size, sum(value.numel() * value.element_size() for value in state.values())), np.uint8)
    buckets: list[Bucket] = []
    tensors: list[TensorPlace] = []
    used = 0

    def close(content: Content) -> None:
        sha256 = hashlib.sha256(content.data).hexdigest()
        buckets.append(Bucket(tensors=tuple(tensors), sha256=sha256, where=put(content)))
        tensors.clear()

    for name, value in state.items():
        tensor = whole(value)
        if used and used + tensor.nbytes > size:
            close(buffer[:used])
            used = 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensors.append(
            TensorPlace(name=name, shape=tuple(tensor.shape), dtype=dtype, begin=used, end=used + tensor.nbytes)
        )
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        if tensor.nbytes > size:
            close(content)  # as it is: a copy would be a third one of its size
        else:
            buffer[used : used + tensor.nbytes] = content
            used += tensor.nbytes
        del tensor, content  # before the next one is made
    if tensors:
        close(buffer[:used])
    return buckets


def read_bucket(bucket: Bucket, content: Content) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each tensor of `bucket`, copied one by one.

    Args:
        bucket: to read.
        content: the bytes that were fetched for it.

    Raises:
        ValueError: they are not those that were put, or a value is not finite.
    """
    # before the first tensor is given out: the caller writes them into the live model
    if hashlib.sha256(content.data).hexdigest() != bucket.sha256:
        raise ValueError("their digest is not the one that was sent along: they are torn")
    for tensor in bucket.tensors:
        # a copy, for what lies in shared memory is read-only and need not be aligned
        values = torch.from_numpy(np.array(content[tensor.begin : tensor.end]))
        value = values.view(getattr(torch, tensor.dtype)).reshape(tensor.shape)
        # by the extremes, which are NaN where anything is: `isfinite` of all would take as much room again
        if value.numel() and not bool(torch.stack(torch.aminmax(value)).isfinite().all()):
            raise ValueError(f"{tensor.name} is not finite")
        yield tensor.name, value
        del values, value


def fill_from_buckets(own: Mapping[str, Any], buckets: Iterable[Bucket], fetch: Callable[[Bucket], Content]) -> None:
    """Writes what lies in `buckets` into the tensors of `own`, one bucket after the other.

    Faults in the names are found before anything is written; faults in the bytes may be found when
    half of `own` is new, and the caller must then not use it.

    Args:
        own: as `trained_state` of a policy gives it, whole or slices.
        buckets: of an equal policy.
        fetch: the bytes of one of them.

    Raises:
        ValueError: they are of another policy, torn, or not finite.
    """
    buckets = tuple(buckets)
    # all names before any byte
    check_same(own, {tensor.name: tensor.shape for bucket in buckets for tensor in bucket.tensors})
    for bucket in buckets:
        for name, value in read_bucket(bucket, fetch(bucket)):
            copy_into(own[name], value)


def digest_of(buckets: Sequence[Bucket]) -> str:
    """SHA-256 of names, types and bytes of everything in `buckets`, by which two versions are told apart."""
    return hashlib.sha256(repr([(bucket.tensors, bucket.sha256) for bucket in buckets]).encode()).hexdigest()
