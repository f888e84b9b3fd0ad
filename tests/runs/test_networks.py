"""Bytes of weights that are sent, and the object store that has room for them."""

from contextlib import nullcontext
from typing import Any

import pytest
import ray

from benchmarks.memory_plan import write_config
from rlvlm.core.errors import MachineError
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.settings.tree import override
from rlvlm.runs.start.networks import envs_advice, sent_bytes
from rlvlm.runs.start.ray_session import OBJECT_STORE_BYTES, small_stores, store_room
from rlvlm.vlms import devices
from tests.tiny_vlm import save_tiny_vlm

GIB = 2**30


@pytest.mark.slow
def test_the_store_has_room_for_two_versions_of_the_weights(tmp_path):
    folder = str(write_config("qwen2.5-vl-3b", tmp_path / "3b"))

    def sent(**settings: Any) -> float:
        named = {name.replace("__", "."): value for name, value in settings.items()}
        return sent_bytes(override(recipe("number_line"), {"policy.model": folder} | named)) / GIB

    assert sent(policy__learns="all") == 0, "it plays where it learns"
    assert sent(policy__learns="all", algo__num_learners=2) == pytest.approx(2 * 4 * 3.09e9 / GIB, rel=0.2)
    assert 0 < sent(policy__learns="lora", engine__num_replicas=1) < 1
    assert sent_bytes(recipe("number_line")) == sent_bytes(recipe("drawer_open")) == 0


def test_a_store_is_never_larger_than_shared_memory_has_room(tmp_path, monkeypatch):
    for free, wanted, expected in (
        (100 * GIB, 0, GIB),
        (100 * GIB, 8 * GIB, 9 * GIB),
        (5 * GIB, 8 * GIB, 4 * GIB),
        (2**26, 8 * GIB, OBJECT_STORE_BYTES),  # as docker gives it; Ray says that it goes through the disk
    ):
        usage = type("Usage", (), {"free": free})
        monkeypatch.setattr("rlvlm.runs.start.ray_session.shutil.disk_usage", lambda _, usage=usage: usage)
        assert store_room(wanted) == expected
    for platform in ("darwin", "linux"):  # Ray of a Mac keeps it elsewhere, that of Linux does not start
        monkeypatch.setattr("rlvlm.runs.start.ray_session._SHM", tmp_path / "none")
        monkeypatch.setattr("rlvlm.runs.start.ray_session.sys.platform", platform)
        with nullcontext() if platform == "darwin" else pytest.raises(MachineError, match="there is no .*none, where"):
            assert store_room(8 * GIB) == OBJECT_STORE_BYTES


@pytest.mark.ray
def test_weights_that_no_object_store_holds_are_named_with_its_node(local_ray):
    (node,) = ray.nodes()
    room = int(node["Resources"]["object_store_memory"])
    assert small_stores(0) == small_stores(room) == []
    (line,) = small_stores(room + GIB)
    assert f"on {node['NodeManagerAddress']} (" in line and f"--object-store-memory {room + 2 * GIB}" in line


@pytest.mark.slow
def test_the_plan_advises_as_many_envs_as_the_card_has_room_for(tmp_path, monkeypatch):
    save_tiny_vlm(tmp_path, "qwen2_5_vl")

    def advice(card: int, **settings: Any) -> str:
        monkeypatch.setattr(devices, "gpu_memory", lambda: card)
        named = {name.replace("__", "."): value for name, value in settings.items()}
        return envs_advice(override(recipe("number_line"), {"policy.model": str(tmp_path), "eval.episodes": 8} | named))

    many = "the GPU has room for 256 envs at once, whose replies are sampled together: --algo.num-envs 256"
    assert advice(80 * GIB) == many
    more = "; in evaluations alone, whose episodes stay the same: --eval.num-envs 100"
    assert advice(80 * GIB, eval__episodes=100) == many + more
    assert advice(80 * GIB, eval__episodes=100, eval__num_envs=100) == many
    assert advice(2 * GIB) == "", "nothing is left beside an update"
    served = {"engine__num_replicas": 2, "engine__num_gpus": 0.5}
    assert advice(80 * GIB, **served).endswith("--algo.num-envs 512")
    assert advice(80 * GIB, engine__num_replicas=1) == "", "replicas on CPUs"
