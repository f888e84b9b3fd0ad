import contextlib
import errno
import functools
import json
import os
import resource

import numpy as np
import pytest
import torch

from rlvlm.algorithms.checkpoint import CorruptCheckpoint, PolicyFile, load_policy_file, load_tree, save_tree
from rlvlm.core.errors import MachineError
from rlvlm.policies.squashed_gaussian import SquashedGaussian


@pytest.fixture
def policy():
    network = SquashedGaussian(3, 2, (8, 5), torch.Generator().manual_seed(0))
    return PolicyFile(kind="squashed_gaussian", weights=network.state_dict(), meta={"note": [1, "a"]})


TREE = {
    "steps": 7,
    "rate": 0.1,
    "name": "a/b",
    "flag": True,
    "nothing": None,
    "empty": {},
    "list": [1, [2.5, "x"], []],
    "rng": np.random.default_rng(0).bit_generator.state,  # integers of 128 bits
    "arrays": {
        "float": np.float32([[1.5, np.nan]]),
        "int": np.arange(3),
        "bool": np.array([True, False]),
        "scalar": np.array(2.5),
        "none": np.zeros((0, 4), np.float32),
        "bytes": np.uint8([1, 255]),
    },
    "tensors": [torch.tensor([1.0, 2.0]), np.float64(0.25)],
}


def test_a_tree_comes_back_as_it_was(tmp_path, policy):
    save_tree(tmp_path / "one", TREE, policy)
    got = load_tree(tmp_path / "one")
    for name in ("steps", "rate", "name", "flag", "nothing", "empty", "list", "rng"):
        assert got[name] == TREE[name], name
    for name, array in TREE["arrays"].items():
        np.testing.assert_array_equal(got["arrays"][name], array)
        assert got["arrays"][name].dtype == array.dtype and got["arrays"][name].shape == array.shape
    assert got["tensors"][0].tolist() == [1, 2] and got["tensors"][1] == 0.25


def test_the_policy_can_be_read_alone(tmp_path, policy):
    save_tree(tmp_path / "one", TREE, policy)
    (tmp_path / "one" / "arrays.npz").unlink()
    (tmp_path / "one" / "state.json").unlink()
    got = load_policy_file(tmp_path / "one")
    assert (got.kind, got.meta) == (policy.kind, policy.meta)
    torch.testing.assert_close(got.weights, dict(policy.weights), rtol=0, atol=0)


def test_nothing_is_pickled(tmp_path, policy):
    save_tree(tmp_path / "one", TREE, policy)
    assert {path.name for path in (tmp_path / "one").iterdir()} == {
        "arrays.npz",
        "state.json",
        "policy.safetensors",
        "policy.json",
        "manifest.json",
    }
    with pytest.raises(AssertionError, match="cannot save"):
        save_tree(tmp_path / "two", {"deep": [{"odd": object()}]}, policy)
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("name", ["arrays.npz", "state.json", "policy.safetensors", "policy.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_harmed_file_is_named(tmp_path, policy, name, harm):
    save_tree(tmp_path / "one", TREE, policy)
    path = tmp_path / "one" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if harm == "remove":
        path.unlink()
    else:
        path.write_bytes(content if harm == "flip" else content[:-1])
    with pytest.raises(CorruptCheckpoint, match=name):
        load_tree(tmp_path / "one")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", json.dumps({"state.json": 3}).encode()])
def test_a_harmed_manifest_is_named(tmp_path, policy, content):
    save_tree(tmp_path / "one", TREE, policy)
    (tmp_path / "one" / "manifest.json").write_bytes(content)
    for load in (load_tree, load_policy_file):
        with pytest.raises(CorruptCheckpoint, match="manifest.json"):
            load(tmp_path / "one")


def fill_up(monkeypatch, after):
    calls = []

    def full(descriptor, real=os.fsync):
        calls.append(descriptor)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)


def refuse_the_name(monkeypatch):
    def refuse(source, target, real=os.rename):
        if str(source).endswith(".partial"):
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "rename", refuse)


def limit_files(monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_192, before[1]))  # the kernel itself refuses what lies beyond
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("fail", "says"),
    [
        *((functools.partial(fill_up, after=after), "the disk is full") for after in (0, 1, 3)),
        (refuse_the_name, "Input/output error"),
        (limit_files, "File too large"),
    ],
)
@pytest.mark.parametrize(
    ("tree", "num_weights"), [({"replay": np.zeros(10_000)}, 1), ({"steps": 2}, 10_000)], ids=["arrays", "weights"]
)
def test_a_save_that_fails_leaves_the_old_checkpoint_and_nothing_else(
    tmp_path, policy, monkeypatch, fail, says, tree, num_weights
):
    save_tree(tmp_path / "one", {"steps": 1}, policy)
    with contextlib.ExitStack() as stack:
        stack.callback(fail(monkeypatch) or monkeypatch.undo)
        with pytest.raises(MachineError, match=says):
            save_tree(tmp_path / "one", tree, PolicyFile(kind="none", weights={"w": torch.zeros(num_weights)}))
    assert load_tree(tmp_path / "one") == {"steps": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_new_checkpoint_of_the_same_name_replaces_the_old(tmp_path, policy):
    for steps in (1, 2):
        save_tree(tmp_path / "one", {"steps": steps}, policy)
    assert load_tree(tmp_path / "one") == {"steps": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
