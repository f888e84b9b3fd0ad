"""Bytes of weights that are sent, and the object store that has room for them."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory_plan import write_config
from rlvlm.runs.networks import sent_bytes
from rlvlm.runs.ray_session import OBJECT_STORE_BYTES, store_room
from rlvlm.runs.recipes import recipe
from rlvlm.runs.settings import override

GIB = 2**30


def test_the_store_has_room_for_two_versions_of_what_learners_send(tmp_path: Path) -> None:
    folder = str(write_config("qwen2.5-vl-3b", tmp_path / "3b"))

    def sent(**settings: Any) -> float:
        named = {name.replace("__", "."): value for name, value in settings.items()}
        return sent_bytes(override(recipe("number_line"), {"policy.model": folder} | named)) / GIB

    assert sent(policy__learns="all") == 0, "it plays where it learns"
    assert sent(policy__learns="all", algo__num_learners=2) == pytest.approx(2 * 4 * 3.09e9 / GIB, rel=0.2)
    assert 0 < sent(policy__learns="lora", engine__num_replicas=1) < 1
    assert sent_bytes(recipe("number_line")) == sent_bytes(recipe("drawer_open")) == 0


def test_a_store_is_never_larger_than_shared_memory_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, wanted, expected in (
        (100 * GIB, 0, OBJECT_STORE_BYTES),
        (100 * GIB, 8 * GIB, OBJECT_STORE_BYTES + 8 * GIB),
        (5 * GIB, 8 * GIB, 4 * GIB),
        (2**26, 8 * GIB, OBJECT_STORE_BYTES),  # as docker gives it; Ray says that it goes through the disk
    ):
        usage = type("Usage", (), {"free": free})
        monkeypatch.setattr("rlvlm.runs.ray_session.shutil.disk_usage", lambda _, usage=usage: usage)
        assert store_room(wanted) == expected
