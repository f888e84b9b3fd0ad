"""A run of a sweep whose process is stopped is ended, so that Tune tries it again."""

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from rlvlm.algorithms.heartbeat import StoppedActors, start_heartbeat
from rlvlm.sweeps.callback import SweepCallback

pytestmark = [pytest.mark.ray, pytest.mark.slow]


class Trainee:
    """The process of a trial, as far as it is watched."""

    def __init__(self) -> None:
        start_heartbeat()

    def pid(self) -> int:
        return os.getpid()


def test_a_stopped_run_is_ended_and_the_others_go_on(local_ray, monkeypatch):
    monkeypatch.setattr("rlvlm.algorithms.heartbeat.MAX_SILENCE_S", 3.0)
    lines: list[str] = []
    callback: Any = SweepCallback.__new__(SweepCallback)  # of what Tune calls, only this needs no folder
    callback._stopped, callback._table, callback.stop = StoppedActors(), SimpleNamespace(line=lines.append), False
    actors = [ray.remote(Trainee).options(num_cpus=0.1).remote() for _ in range(2)]
    trials = [
        SimpleNamespace(config={"trial": name}, temporary_state=SimpleNamespace(ray_actor=actor))
        for name, actor in zip(("stopped", "well"), actors, strict=True)
    ]
    waiting = SimpleNamespace(config={"trial": "waits"}, temporary_state=SimpleNamespace(ray_actor=None))
    os.kill(ray.get(actors[0].pid.remote()), signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while not lines:
        assert time.monotonic() < deadline
        callback.on_step_end(0, [*trials, waiting])
        time.sleep(0.2)
    assert len(lines) == 1 and lines[0].startswith("stopped (process ") and "no sign of life for 3 s" in lines[0]
    with pytest.raises(RayActorError):
        ray.get(actors[0].pid.remote(), timeout=30)
    assert ray.get(actors[1].pid.remote()) > 0
