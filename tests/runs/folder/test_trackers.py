"""Trackers that fail, and a run that does not care."""

import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlvlm.core import metrics
from rlvlm.runs.folder.run_folder import create_folder
from rlvlm.runs.folder.trackers import Trackers
from rlvlm.runs.recipes import recipe


def broken(*_: Any, **__: Any) -> None:
    raise ConnectionResetError("its process is gone")


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_a_tracker_that_fails_costs_its_curves_and_no_more(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logged: list[int] = []
    run = SimpleNamespace(log=lambda row, step: logged.append(step), finish=lambda: None)
    stub: Any = SimpleNamespace(init=lambda **_: run, Settings=lambda **_: None)
    setattr(stub if fails == "init" else run, fails, broken)
    monkeypatch.setitem(sys.modules, "wandb", stub)
    config = recipe("cartpole")
    config = replace(config, out=tmp_path / "run", track=replace(config.track, wandb="online"))
    folder = create_folder(config, ["run", "cartpole"], datetime.now())
    trackers = Trackers(folder, config)
    for step in (10, 20):
        trackers.log({metrics.ENV_STEPS: float(step), metrics.WALL_S: 1.0})
    trackers.close()
    assert [row[metrics.ENV_STEPS] for row in folder.metrics.read()] == [10, 20]
    assert "Weights & Biases" in caplog.text and "its process is gone" in caplog.text
    assert bool(trackers.trouble) is (fails == "init") and logged == ([10, 20] if fails == "finish" else [])
