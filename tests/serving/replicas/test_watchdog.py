import asyncio
import threading
import time

import numpy as np
import pytest

from rlvlm.serving.replicas import watchdog
from rlvlm.serving.replicas.watchdog import SAMPLE_S, Heartbeat, Watchdog, loading_within


@pytest.fixture
def quick(monkeypatch):
    """Looks forty times as often; a stall of 1 s in the settings is then 25 ms."""
    monkeypatch.setattr(watchdog, "SAMPLE_S", 0.025)
    return 1.0


class Loop:
    """An event loop that turns, or not."""

    def __init__(self, turns: bool = True) -> None:
        self.turns = turns

    def call_soon_threadsafe(self, callback) -> None:
        if self.turns:
            callback()


def reason_after(work, heartbeat: Heartbeat | None = None, looks: int = 12, deadline_s: float = 60.0) -> str | None:
    """What the watchdog says within some looks at a thread that does `work`."""
    heartbeat = heartbeat or Heartbeat()
    begun, stop = threading.Event(), threading.Event()

    def run():
        with heartbeat.working():
            begun.set()
            work(stop)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    begun.wait(5)
    dog = Watchdog(heartbeat, stall_s=8 * watchdog.SAMPLE_S, deadline_s=deadline_s)
    try:
        for _ in range(looks):
            time.sleep(0.025)
            if reason := dog.look(Loop()):  # type: ignore[arg-type]
                return reason
        return None
    finally:
        stop.set()
        thread.join(5)


def compute(stop: threading.Event) -> None:
    big = np.random.default_rng(0).random((400, 400))
    while not stop.is_set():
        big @ big


def test_a_silent_thread_is_stuck_after_as_many_looks_as_the_stall_is_long():
    # by hand: 5 s at one look per 0.25 s are 20 looks
    dog = Watchdog(Heartbeat(), stall_s=5.0, deadline_s=60.0)
    assert dog._max_silent == 20 and SAMPLE_S == 0.25


def test_a_thread_that_waits_is_stuck(quick):
    assert "no sign of life" in (reason_after(lambda stop: stop.wait(30)) or "")


def test_a_long_batch_that_computes_is_not(quick):
    assert reason_after(compute, looks=20) is None


def test_a_batch_beyond_the_deadline_is_stuck_however_lively(quick):
    assert "one batch has taken" in (reason_after(compute, deadline_s=0.1) or "")


def test_a_model_that_runs_elsewhere_shows_nothing_and_only_the_deadline_counts(quick):
    elsewhere = Heartbeat(is_elsewhere=True)
    assert reason_after(lambda stop: stop.wait(30), elsewhere, looks=20) is None
    assert "one batch" in (reason_after(lambda stop: stop.wait(30), Heartbeat(is_elsewhere=True), deadline_s=0.1) or "")


def test_on_a_gpu_finished_layers_are_life_and_a_spinning_wait_is_none(quick):
    import torch

    layer = torch.nn.Linear(4, 4)

    def layers(stop):
        while not stop.wait(0.005):
            layer(torch.zeros(1, 4))

    def spin(stop):  # one C call that burns CPU, as a wait for a hung kernel does
        np.linalg.svd(np.random.default_rng(0).random((900, 900)))
        stop.wait(30)

    assert reason_after(layers, Heartbeat(waits_for_gpu=True), looks=20) is None
    assert "no sign of life" in (reason_after(spin, Heartbeat(waits_for_gpu=True), looks=40) or "")


def test_an_idle_thread_is_not_stuck():
    dog = Watchdog(Heartbeat(), stall_s=1.0, deadline_s=1.0)
    assert all(dog.look(Loop()) is None for _ in range(50))  # type: ignore[arg-type]


def test_a_loop_that_does_not_turn_is_stuck():
    dog = Watchdog(Heartbeat(), stall_s=1.0, deadline_s=1.0)
    reasons = [dog.look(Loop(turns=False)) for _ in range(6)]  # type: ignore[arg-type]
    assert reasons[0] is None and "event loop has been blocked" in (reasons[4] or "")


def test_the_watchdog_ends_what_is_stuck(quick):
    said: list[str] = []
    blocked = threading.Event()

    async def run():
        dog = Watchdog(
            Heartbeat(), stall_s=1.0, deadline_s=60.0, end=lambda reason: (said.append(reason), blocked.set())
        )
        dog.start(asyncio.get_running_loop())
        await asyncio.sleep(0.2)
        assert not said
        blocked.wait(10)  # blocks the loop

    asyncio.run(run())
    assert "event loop" in said[0]


def test_loading_that_takes_too_long_is_ended_and_what_was_quick_is_left_alone():
    said: list[str] = []
    ended = threading.Event()
    with loading_within(0.05, end=said.append):
        pass
    with loading_within(0.1, end=lambda reason: (said.append(reason), ended.set())):
        assert ended.wait(10)
    assert said == ["its judge has not loaded within 0 s"]


def test_of_questions_side_by_side_the_oldest_counts(quick):
    heartbeat = Heartbeat(is_elsewhere=True)
    assert heartbeat.busy_since is None
    with heartbeat.waiting():
        oldest = heartbeat.busy_since
        with heartbeat.waiting():
            assert heartbeat.busy_since == oldest
        dog = Watchdog(heartbeat, stall_s=quick, deadline_s=0.05)
        assert dog.look(Loop()) is None  # type: ignore[arg-type]
        time.sleep(0.1)
        assert "has taken" in (dog.look(Loop()) or "")  # type: ignore[arg-type]
    assert heartbeat.busy_since is None
