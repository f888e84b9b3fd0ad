"""Calls to learners that wait for each other: what happens to one of them ends the wait, at once and by name."""

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.rllib.utils.actor_manager import FaultTolerantActorManager

from rlvlm.algorithms import heartbeat
from rlvlm.algorithms.heartbeat import start_heartbeat
from rlvlm.algorithms.learners import Learners
from rlvlm.core.errors import MachineError


def test_a_thousand_calls_are_waited_for_in_a_few_looks(monkeypatch):
    waits, asked = list[int](), list[int]()

    def wait(calls, num_returns=1, timeout=0.0):
        waits.append(num_returns)
        time.sleep(0.1 if len(waits) == 1 else 0.0)  # then half of them have ended, and the others are looked after
        ready = [call for call in calls if call % 2 or len(waits) > 2][:num_returns]
        return ready, [call for call in calls if call not in ready]

    def multi_get(keys, namespace):
        asked.append(len(keys))
        return {key: b'["process 1", 0, 0]' for key in keys}

    head = SimpleNamespace(internal_kv_multi_get=multi_get)
    for name, value in (("wait", wait), ("get", lambda call: call)):
        monkeypatch.setattr(ray, name, value)
    for name, value in (("_PERIOD_S", 0.1), ("_actor_of", str), ("internal_kv_get_gcs_client", lambda: head)):
        monkeypatch.setattr(heartbeat, name, value)
    calls: Any = range(1_000)
    assert sorted(answer for _, answer in heartbeat.ended(calls)) == list(range(1_000))
    assert waits == [1, 1_000, 1, 500] and asked == [500]


class Waiting:
    """The part of a learner that is called; the first waits for the second as under NCCL, which does not notice for
    half an hour that a peer is gone.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def apply(self, func: Any) -> Any:
        return func(self)

    def configure_torch(self, threads: int) -> int:
        start_heartbeat()
        return os.getpid()

    def learn(self, how: str) -> None:
        if self._number == 0:
            time.sleep(1800)
        if how == "gpu":
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        os.kill(os.getpid(), {"dies": signal.SIGKILL, "stops": signal.SIGSTOP}[how])


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words", "fix"),
    [
        ("gpu", r"learner 1 {where} failed: CUDA error: an illegal", "look at that GPU"),
        ("dies", r"learner 1 {where} is gone: ActorDiedError; the others were ended", "memory"),
        ("stops", r"learner 1 {where} has given no sign of life for 3 s", "SIGSTOP"),
    ],
)
def test_the_failure_of_one_learner_ends_them_all(local_ray, monkeypatch, how, words, fix):
    monkeypatch.setattr("rlvlm.algorithms.heartbeat.MAX_SILENCE_S", 3.0)
    actors: list[Any] = [ray.remote(Waiting).remote(number) for number in range(2)]
    group = SimpleNamespace(is_local=False, _worker_manager=FaultTolerantActorManager(actors))
    learners = Learners(group, threads=torch.get_num_threads())
    pids = learners.call_all("configure_torch", 1)
    began = time.monotonic()
    with pytest.raises(MachineError, match=words.format(where=rf"\(process {pids[1]} on node [\d.]+\)")) as caught:
        learners.call_all("learn", how)
    assert time.monotonic() - began < 20
    assert fix in caught.value.fix and "rlvlm resume" in caught.value.fix
    with pytest.raises(MachineError) as again:
        learners.call_all("configure_torch", 1)
    assert again.value is caught.value, "what cleans up hides no cause"
    for pid in pids:  # nothing is left that holds a GPU
        deadline = time.monotonic() + 20
        while os.path.exists(f"/proc/{pid}"):
            assert time.monotonic() < deadline
            time.sleep(0.2)
