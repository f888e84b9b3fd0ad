"""How torch's allocator is set up, and who keeps out of it."""

import os

import pytest
import torch

from rlvlm.vlms.devices import (
    follow_ray,
    gpu_id,
    gradient_settings,
    own_gpu,
    torch_device,
    use_expandable_segments,
    use_own_segments,
)

ALLOCATOR, LEGACY = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({ALLOCATOR: "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({LEGACY: "max_split_size_mb:64"}, None),
    ],
)
def test_segments_grow_unless_the_user_says_otherwise(monkeypatch, own, expected):
    for name in (ALLOCATOR, LEGACY):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    use_expandable_segments()
    assert os.environ.get(ALLOCATOR) == expected
    use_own_segments()  # as vLLM does
    assert os.environ.get(ALLOCATOR) == own.get(ALLOCATOR)


def test_a_worker_with_a_gpu_sets_its_allocator_up(monkeypatch):
    monkeypatch.delenv(ALLOCATOR, raising=False)
    monkeypatch.delenv(LEGACY, raising=False)
    with own_gpu(None):  # restores what this process has decided
        follow_ray([])
        assert ALLOCATOR not in os.environ
        follow_ray(["0"])
        assert os.environ[ALLOCATOR] == "expandable_segments:True"
    monkeypatch.delenv(ALLOCATOR)


def test_cards_have_the_names_that_this_process_sees_them_by(monkeypatch):
    # by hand: of the gpus 4, 2 and 7 torch calls 2 the second
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,2,7")
    assert gpu_id(torch.device("cuda", 1)) == "2" and torch_device("2") == "cuda:1"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpu_id(torch.device("cuda")) == "0" and torch_device("3") == "cuda:3"
    assert gpu_id(torch.device("cpu")) == "" and torch_device("") == "cpu"


def test_tiny_numbers_count_as_zero_while_gradients_are_computed_and_only_then():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    torch.set_flush_denormal(False)
    weight, seen = torch.full((3,), 1e-20, requires_grad=True), []
    with pytest.raises(ZeroDivisionError), gradient_settings(torch.device("cpu"), is_deterministic=False):
        (weight * 1e-20).sum().backward()
        seen.append(weight.grad.clone())
        seen.append(weight.detach() * 1e-20)
        1 / 0  # noqa: B018
    tiny = weight.detach() * 1e-20
    assert (tiny.view(torch.int32) != 0).all(), "again as ever, also after an error"
    assert torch.equal(seen[0].view(torch.int32), torch.full((3,), 1e-20).view(torch.int32))
    assert (seen[1].view(torch.int32) == 0).all()
