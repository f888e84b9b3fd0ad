"""Trained weights split into buckets on their way from the learner to the samplers: neither side needs memory for more
than two buckets beside its own weights.

Learners write them (`algorithms.sharding.put_buckets`); replicas (`serving.weights`) and the run's own process read
them. The writer's `put` and the reader's `fetch` decide where the bytes are in between: Ray's object store.
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
"""[N] bytes of a bucket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlace:
    """Location of a tensor in a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Torch's name of the dtype, such as `bfloat16`."""
    begin: int
    """Index of the first byte."""
    end: int
    """Index after the last byte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Description of some tensors, small enough to travel with every request: their bytes stay in storage."""

    tensors: tuple[TensorPlace, ...]
    sha256: str
    """Digest of the bytes."""
    where: Any
    """Reference to the bytes, as returned by `put`."""


def write_buckets(
    state: Mapping[str, Tensor],
    put: Callable[[Content], object],
    *,
    size: int,
    whole: Callable[[Tensor], Tensor] = lambda value: value.detach().cpu(),
) -> list[Bucket]:
    """Writes `state` in buckets, in its order. Holds one bucket and one tensor at a time.

    Args:
        state: values by name.
        put: stores bytes, which are overwritten after it returns, and returns a reference to them.
        size: maximum bytes in a bucket; a larger tensor has one of its own.
        whole: turns a value of `state` into a tensor on the CPU.
    """
    # a single buffer, reused for every bucket
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
            close(content)  # without a copy, which would be a third one of its size
        else:
            buffer[used : used + tensor.nbytes] = content
            used += tensor.nbytes
        del tensor, content  # before the next one is allocated
    if tensors:
        close(buffer[:used])
    return buckets


def read_bucket(bucket: Bucket, content: Content) -> Iterator[tuple[str, Tensor]]:
    """Yields name and value of each tensor of `bucket`, copied one by one.

    Args:
        bucket: bucket to read.
        content: its fetched bytes.

    Raises:
        ValueError: the bytes differ from those stored, or a value is not finite.
    """
    # before the first tensor is yielded: the caller writes them into the live model
    if hashlib.sha256(content.data).hexdigest() != bucket.sha256:
        raise ValueError("their digest is not the one that was sent along: they are torn")
    for tensor in bucket.tensors:
        # a copy, because shared memory is read-only and need not be aligned
        values = torch.from_numpy(np.array(content[tensor.begin : tensor.end]))
        value = values.view(getattr(torch, tensor.dtype)).reshape(tensor.shape)
        # checked by the extremes, which are NaN if any value is: `isfinite` of all would take as much memory again
        if value.numel() and not bool(torch.stack(torch.aminmax(value)).isfinite().all()):
            raise ValueError(f"{tensor.name} is not finite")
        yield tensor.name, value
        del values, value


def fill_from_buckets(own: Mapping[str, Tensor], buckets: Iterable[Bucket], fetch: Callable[[Bucket], Content]) -> None:
    """Writes the content of `buckets` into the tensors of `own`, one bucket after the other.

    Wrong names are detected before anything is written; corrupt bytes may be detected when half of `own` is
    overwritten, and the caller must then not use it.

    Args:
        own: tensors as in a policy's `trained_state`, whole or slices.
        buckets: buckets of a policy of the same form.
        fetch: returns the bytes of a bucket.

    Raises:
        ValueError: they belong to another policy, are truncated, or not finite.
    """
    buckets = tuple(buckets)
    # all names before any byte
    check_same(own, {tensor.name: tensor.shape for bucket in buckets for tensor in bucket.tensors})
    for bucket in buckets:
        for name, value in read_bucket(bucket, fetch(bucket)):
            copy_into(own[name], value)


def digest_of(buckets: Sequence[Bucket]) -> str:
    """Returns the SHA-256 of names, dtypes and bytes of all `buckets`, which distinguishes versions."""
    return hashlib.sha256(repr([(bucket.tensors, bucket.sha256) for bucket in buckets]).encode()).hexdigest()
