"""Trackers that fail, and a run that does not care."""

import re
import sys
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest

from rlvlm.core import metrics
from rlvlm.runs.files.folder import create_folder, find_folder
from rlvlm.runs.files.trackers import Trackers
from rlvlm.runs.settings.recipes import recipe


def broken(*_: Any, **__: Any) -> None:
    raise ConnectionResetError("its process is gone")


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_a_tracker_that_fails_costs_its_curves_and_no_more(fails, tmp_path, monkeypatch, caplog):
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


def test_every_run_has_an_id_of_its_own_which_moves_with_it(tmp_path, monkeypatch):
    started: list[dict[str, Any]] = []
    stub: Any = SimpleNamespace(init=lambda **about: started.append(about), Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", stub)
    sweep = tmp_path / "rewards"
    sweep.mkdir()
    (sweep / "sweep.yaml").touch()
    config = recipe("metaworld/door-open-v3")  # a name that is no id there
    for place in (sweep / "a" / "seed_0", sweep / "b" / "seed_0"):
        of_run = replace(config, out=place, track=replace(config.track, wandb="offline"))
        Trackers(create_folder(of_run, ["run"], datetime.now()), of_run).close()
    moved = (sweep / "a" / "seed_0").rename(tmp_path / "moved")
    Trackers(find_folder(moved), of_run).close()
    ids = [about["id"] for about in started]
    assert ids[0] == ids[2] != ids[1] and all(re.fullmatch(r"[0-9a-f]{16}", one) for one in ids)
    assert [about["group"] for about in started] == ["rewards", "rewards", None]
    assert started[0]["name"] == config.title
