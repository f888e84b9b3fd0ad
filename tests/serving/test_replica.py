"""What all replicas share, without Ray around it: signs of life, a share of a GPU, and why something does not start."""

import gc
import sys
import threading
import time

import numpy as np
import pytest
from ray.serve.schema import ApplicationStatus

from rlvlm.core.errors import JudgeUnavailable, MachineError, ModelUnavailable
from rlvlm.serving import replica as module
from rlvlm.serving.config import PlacementConfig
from rlvlm.serving.replica import GIB, Heartbeat, Replica, assigned_device, cause_of, check_share, limit_share, marked

LOOK_S = 0.05


def reason_after(work, heartbeat: Heartbeat | None = None, looks: int = 12, deadline_s: float = 60.0) -> str | None:
    """What health checks say within some looks at a thread that does `work`; 8 silent ones are a stall."""
    heartbeat = heartbeat or Heartbeat()
    begun, stop = threading.Event(), threading.Event()

    def run():
        with heartbeat.working():
            begun.set()
            work(stop)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    begun.wait(60)
    try:
        for _ in range(looks):
            time.sleep(LOOK_S)
            if reason := heartbeat.stuck(stall_s=10.0, deadline_s=deadline_s):
                return reason
        return None
    finally:
        stop.set()
        thread.join(60)


def compute(stop: threading.Event) -> None:
    big = np.random.default_rng(0).random((400, 400))
    while not stop.is_set():
        big @ big


def test_a_thread_that_waits_is_stuck_and_one_that_computes_is_not():
    assert "no sign of life for 8 s" in (reason_after(lambda stop: stop.wait(30)) or "")
    assert reason_after(compute, looks=20) is None
    assert "one batch has taken" in (reason_after(compute, deadline_s=0.1) or ""), "however lively"


def test_a_stall_is_over_when_serve_has_counted_three_failures():
    # by hand: after 5 s of silence, one look a second, the third failure in a row is to come: from the third look on
    heartbeat, begun, stop = Heartbeat(), threading.Event(), threading.Event()

    def wait() -> None:
        with heartbeat.working():
            begun.set()
            stop.wait(30)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert begun.wait(30)
    time.sleep(0.1)  # until it waits: what it computes on the way there is a sign of life
    heartbeat.stuck(stall_s=5.0, deadline_s=60.0)  # the first look has nothing to compare with
    assert [heartbeat.stuck(stall_s=5.0, deadline_s=60.0) is not None for _ in range(5)] == [False, False, *[True] * 3]
    stop.set()
    thread.join(60)
    assert heartbeat.stuck(stall_s=5.0, deadline_s=60.0) is None, "idle is not stuck"


def test_of_a_model_that_runs_elsewhere_only_the_deadline_counts_and_the_oldest_question():
    assert reason_after(lambda stop: stop.wait(30), Heartbeat(is_elsewhere=True), looks=20) is None
    heartbeat = Heartbeat(is_elsewhere=True)
    with heartbeat.waiting():
        oldest = heartbeat.busy_since
        with heartbeat.waiting():
            assert heartbeat.busy_since == oldest
        time.sleep(0.1)
        said = heartbeat.stuck(stall_s=5.0, deadline_s=0.05, section="engine")
        assert "has taken" in (said or "") and "--engine.timeout-s" in (said or "")
    assert heartbeat.busy_since is None


def test_on_a_gpu_finished_layers_are_life_and_a_spinning_wait_is_none():
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


def test_no_garbage_is_collected_while_the_stacks_of_threads_are_read(monkeypatch):
    # Python 3.11 before .9 holds a lock meanwhile that a collection may wait for
    collects = []
    frames = sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: collects.append(gc.isenabled()) or frames())
    assert len(list(module._stack(threading.get_ident()))) > 1
    assert collects == [False] and gc.isenabled()


def test_loading_that_takes_too_long_is_a_named_cause(monkeypatch):
    monkeypatch.setattr(module, "START_TIMEOUT_S", 0.1)
    ended = threading.Event()
    with pytest.raises(RuntimeError, match="rlvlm-cause.*the judge cannot be loaded: it took longer than 0 s"):
        replica = Replica("judge", "cpu", PlacementConfig(), section="serve", unavailable=JudgeUnavailable)
        replica._load(lambda: ended.wait(10))
    ended.set()


def test_a_model_beyond_its_share_is_refused_with_the_share_it_needs(monkeypatch):
    monkeypatch.setattr(module, "measured", lambda device: (24 * GIB, 40 * GIB))
    for what, section in (("judge", "serve"), ("policy", "engine")):
        with pytest.raises(ModelUnavailable, match=f"{what} holds 24.00 of 40.00 GiB, its share is 0.5") as caught:
            check_share("cuda", 0.5, what, section)
        assert caught.value.fix == f"raise --{section}.num-gpus to 0.7, or --{what}.quantization nf4"
    for share in (0.6, 0.0, 1.0):  # by hand: 24 of 40 are 0.6; no share and a whole card set no limit
        check_share("cuda", share, "judge", "serve")
    monkeypatch.undo()
    limit_share("cpu", 0.5)
    check_share("cpu", 0.5, "judge", "serve")
    assert assigned_device("cpu") == "cpu" and assigned_device("cuda:1") == "cuda:1"


@pytest.mark.gpu
def test_the_allocator_stops_at_the_share():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    limit_share("cuda", 0.25)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(int(0.5 * torch.cuda.get_device_properties(0).total_memory), dtype=torch.uint8, device="cuda")
    check_share("cuda", 0.25, "judge", "serve")


class Status:
    """What Serve says about an app."""

    def __init__(self, status: ApplicationStatus, *messages: str) -> None:
        self.status, self.message = status, ""
        self.deployments = {str(number): type("D", (), {"message": text}) for number, text in enumerate(messages)}


@pytest.mark.parametrize("error", [JudgeUnavailable("no weights [here]", "fetch them"), MachineError("not yours", "")])
def test_a_marked_cause_is_read_back_out_of_serves_text_while_serve_still_tries(error):
    text = f"The deployment failed to start 1 times.\nRuntimeError: {marked(error)}\nRetrying 2 more times"
    found = cause_of(Status(ApplicationStatus.DEPLOYING, "", text))  # pyright: ignore[reportArgumentType] the stand-in
    assert (type(found), str(found), found.fix) == (type(error), str(error), error.fix)  # pyright: ignore


def test_without_a_mark_serves_last_line_counts_once_it_gave_up():
    given_up = Status(ApplicationStatus.DEPLOY_FAILED, "first\nthe last line\n")
    assert "it could not start: the last line" in str(cause_of(given_up))  # pyright: ignore[reportArgumentType]
    assert cause_of(Status(ApplicationStatus.DEPLOYING, "still trying")) is None  # pyright: ignore[reportArgumentType]
