"""A policy's weights in buckets: what lies where by hand, the same values on the other side, and what is refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlvlm.policies.buckets import digest_of, fill_from_buckets, write_buckets


def small_state() -> dict[str, torch.Tensor]:
    return {
        "a": torch.tensor([1.0, 2.0]),
        "b": torch.tensor(3.0),
        "c": torch.arange(4, dtype=torch.bfloat16).reshape(2, 2).T,
        "d": torch.arange(8.0),
        "e": torch.tensor([5.0]),
    }


def kept(content: Any) -> Any:
    return content.copy()


def test_tensors_fill_buckets_in_their_order_by_hand():
    # bytes: 8, 4, 8, 32, 4; a bucket of 16 takes the first two, c; d is larger and has one of its own; e is left
    buckets = write_buckets(small_state(), kept, size=16)
    found = [[(tensor.name, tensor.begin, tensor.end) for tensor in bucket.tensors] for bucket in buckets]
    assert found == [[("a", 0, 8), ("b", 8, 12)], [("c", 0, 8)], [("d", 0, 32)], [("e", 0, 4)]]
    assert buckets[0].where.view(np.float32).tolist() == [1.0, 2.0, 3.0]
    assert [tensor.dtype for tensor in buckets[1].tensors] == ["bfloat16"]
    assert len(write_buckets(small_state(), kept, size=1 << 20)) == 1


@pytest.mark.parametrize("size", [1, 12, 16, 1000])
def test_buckets_round_trip(size):
    state = small_state()
    own = {name: torch.full_like(value, -1.0) for name, value in state.items()}
    fill_from_buckets(own, write_buckets(state, kept, size=size), lambda bucket: bucket.where)
    assert all(torch.equal(value, state[name]) for name, value in own.items())


def test_foreign_buckets_are_refused_before_anything_is_written():
    buckets = write_buckets(small_state(), kept, size=16)
    own = {name: torch.zeros_like(value) for name, value in small_state().items()}
    for state in ({**own, "f": torch.zeros(1)}, {**own, "e": torch.zeros(2)}):
        with pytest.raises(ValueError, match="of another policy"):
            fill_from_buckets(state, buckets, lambda bucket: bucket.where)
        assert not any(value.any() for value in state.values())
    flipped = buckets[2].where.copy()
    flipped[0] ^= 1
    with pytest.raises(ValueError, match="torn"):
        fill_from_buckets(own, [*buckets[:2], replace(buckets[2], where=flipped), buckets[3]], lambda one: one.where)
    for odd in (torch.inf, -torch.inf, torch.nan):
        poisoned = small_state() | {"d": torch.tensor([*range(7), odd], dtype=torch.float32)}
        with pytest.raises(ValueError, match="d is not finite"):
            fill_from_buckets(own, write_buckets(poisoned, kept, size=16), lambda bucket: bucket.where)


def test_a_digest_is_of_names_types_and_bytes():
    state = small_state()
    digest = digest_of(write_buckets(state, kept, size=16))
    assert digest == digest_of(write_buckets(state, lambda _: None, size=16))
    changed = (state | {"e": torch.tensor([6.0])}, {("x" if name == "e" else name): v for name, v in state.items()})
    assert all(digest != digest_of(write_buckets(other, kept, size=16)) for other in changed)
