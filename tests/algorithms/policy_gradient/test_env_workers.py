"""Envs in processes of their own: the same episodes, several at once, and a lost worker costs whole groups."""

import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import ray
from meeting_env import WORKERS, MeetingPoint
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError

from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradient
from rlvlm.algorithms.policy_gradient.env_workers import EnvWorker, WorkerEnvs, start_workers
from rlvlm.algorithms.sft_config import ChunkSFTConfig
from rlvlm.core import metrics
from rlvlm.core.errors import MachineError
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.registry import make_env
from tests.algorithms.policy_gradient.tiny_runs import chunk_config

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SETTINGS = ChunkEnvConfig(episode_steps=32)
PX = 16


@pytest.fixture(scope="module")
def workers(local_ray):
    """Two, of push_block."""
    started = start_workers(2, "push_block", 0, PX)
    yield started
    for worker in started:
        ray.kill(worker)


def pid_of(worker: Any) -> int:
    return ray.get(worker.__ray_call__.remote(lambda self: os.getpid()))


def test_workers_step_and_draw_as_envs_in_process(workers):
    local = make_env("push_block", SETTINGS, 0)
    seen: dict[bytes, Any] = {}
    envs = WorkerEnvs(workers, SETTINGS, local, 2, lambda keys, images: seen.update(zip(keys, images, strict=True)))
    here, ids = local.many(), np.array([5, 5, 2, 2, 9, 9])
    rng = np.random.default_rng(0)
    one, other = envs.begin(ids), here.begin(ids)
    assert np.array_equal(one.snapshots, other.snapshots) and one.texts == other.texts
    rows = np.arange(6)
    while len(rows):
        chunks = rng.uniform(-1, 1, (len(rows), local.chunk_steps, len(local.action_low))).astype(np.float32)
        came, wanted = envs.step(rows, chunks), here.step(rows, chunks)
        for name in ("snapshots", "steps", "env_rewards", "success", "progress", "terminated", "truncated"):
            assert np.array_equal(getattr(came, name), getattr(wanted, name)), name
        assert np.array_equal(came.obs.proprio, wanted.obs.proprio)
        for snapshot in came.obs.snapshots[~came.ended]:
            assert np.array_equal(seen[snapshot.tobytes()], local.draw_cameras(snapshot[None], PX)[0])
        rows = rows[~came.ended]
    assert not envs.lost


@pytest.mark.parametrize("error", [ObjectLostError, NodeDiedError])
def test_an_answer_that_lay_on_a_lost_node_is_an_answer_that_did_not_come(error, monkeypatch):
    """Workers in this process, called as actors are; what one of them said is gone with the node's object store."""

    def fetch(call: Any) -> Any:
        if call.answer is error:
            raise error.__new__(error)
        return call.answer

    def remote(method: Any) -> Any:
        call = MagicMock  # hashable, as the references that Ray gives are
        return SimpleNamespace(remote=lambda *arguments: call(answer=method(*arguments)))

    monkeypatch.setattr("ray.get", fetch)
    monkeypatch.setattr("ray.put", lambda settings: settings)
    monkeypatch.setattr("ray.wait", lambda calls, **_: (calls, []))
    monkeypatch.setattr("rlvlm.algorithms.heartbeat._heartbeats", lambda actor_ids: {})
    first, other = EnvWorker("push_block", 0, PX), EnvWorker("push_block", 0, PX)
    near = SimpleNamespace(begin=remote(first.begin), step=remote(first.step))
    lost = SimpleNamespace(begin=remote(other.begin), step=remote(lambda *arguments: error))
    local = make_env("push_block", SETTINGS, 0)
    envs = WorkerEnvs([near, lost], SETTINGS, local, 2, lambda keys, images: None)
    envs.begin(np.array([5, 5, 2, 2]))
    came = envs.step(np.arange(4), np.zeros((4, local.chunk_steps, len(local.action_low)), np.float32))
    assert envs.lost == {2, 3} and came.ended.tolist() == [False, False, True, True]


def test_a_lost_worker_ends_its_own_episodes_and_is_back_for_the_next(workers):
    local = make_env("push_block", SETTINGS, 0)
    envs = WorkerEnvs(workers, SETTINGS, local, 2, lambda keys, images: None)
    ids, rows = np.array([5, 5, 2, 2]), np.arange(4)
    envs.begin(ids)
    os.kill(pid_of(workers[1]), signal.SIGKILL)
    chunks = np.zeros((4, local.chunk_steps, len(local.action_low)), np.float32)
    came = envs.step(rows, chunks)
    assert envs.lost == {2, 3} and came.ended.tolist() == [False, False, True, True]
    deadline = time.monotonic() + 180
    while envs.begin(ids) is None or envs.lost:
        assert time.monotonic() < deadline, "Ray starts it again"
    assert not envs.step(rows, chunks).ended.any()
    pid = pid_of(workers[0])  # and one that is back before it is asked again knows nothing of its envs
    os.kill(pid, signal.SIGKILL)
    while True:
        assert time.monotonic() < deadline, "Ray starts it again"
        with suppress(RayActorError):
            if pid_of(workers[0]) != pid:
                break
    envs.step(rows, chunks)
    assert envs.lost == {0, 1}


def test_a_stopped_worker_is_replaced_once_and_ends_the_run_the_second_time(workers, caplog, monkeypatch):
    monkeypatch.setattr("rlvlm.algorithms.heartbeat.MAX_SILENCE_S", 10.0)  # Ray takes six to end a stopped process
    local = make_env("push_block", SETTINGS, 0)
    envs = WorkerEnvs(workers, SETTINGS, local, 2, lambda keys, images: None)
    ids, rows = np.array([5, 5, 2, 2]), np.arange(4)
    chunks = np.zeros((4, local.chunk_steps, len(local.action_low)), np.float32)
    deadline = time.monotonic() + 180
    while envs.begin(ids) is None or envs.lost:
        assert time.monotonic() < deadline, "both are there"
    pid, began = pid_of(workers[1]), time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    came = envs.step(rows, chunks)
    assert envs.lost == {2, 3} and came.ended.tolist() == [False, False, True, True]
    assert time.monotonic() - began < 20
    assert f"env worker 1 (process {pid} on node" in caplog.text and "--algo.env-workers" in caplog.text
    while envs.begin(ids) is None or envs.lost:
        assert time.monotonic() < deadline, "Ray starts it again"
    os.kill(pid_of(workers[1]), signal.SIGSTOP)
    with pytest.raises(MachineError, match=r"env worker 1 \(process .* no sign of life for 10 s.* replaced before"):
        envs.step(rows, chunks)


def test_workers_that_cannot_live_end_the_run_with_a_reason(local_ray):
    gone = start_workers(1, "push_block", 0, PX)
    local = make_env("push_block", SETTINGS, 0)
    envs = WorkerEnvs(gone, SETTINGS, local, 1, lambda keys, images: None)
    ray.kill(gone[0])
    with pytest.raises(MachineError, match="all 1 env workers were lost, 5 times in a row"):
        for _ in range(5):
            envs.begin(np.array([1]))


def algorithm_of(env_workers: int, **algo: Any) -> PolicyGradient:
    small = {"groups": 6, "group_size": 4, "rounds": 1, "env_workers": env_workers} | algo
    algorithm = chunk_config(pocket={"hidden": 64}, **small).build_algo()
    assert isinstance(algorithm, PolicyGradient)
    return algorithm


def test_a_run_with_workers_is_the_run_without_and_a_kill_costs_no_episode(local_ray):
    found = []
    for env_workers in (0, 2):
        algorithm = algorithm_of(env_workers, sft=ChunkSFTConfig(episodes=20, updates=60))
        algorithm.prepare(lambda line: None)
        for _ in range(2):
            algorithm.train()
        success = algorithm.evaluate_policy(4).metrics[metrics.EVAL_SAMPLED_SUCCESS]
        report = algorithm.report()
        names = (metrics.GROUP_SCORE, metrics.GROUP_KEPT, metrics.ENV_STEPS, metrics.TRAIN_EPISODE_RETURN)
        found.append([success, *(report[name] for name in names)])
        if env_workers:
            runner: Any = algorithm.env_runner_group.local_env_runner  # pyright: ignore
            os.kill(pid_of(runner._workers[0]), signal.SIGKILL)
            algorithm.train()
            assert algorithm.report()[metrics.EPISODES] == 3 * 24, "groups that were lost are played anew"
            assert min(one.num_steps for one in algorithm.source.newest) > 1, "and what was made up is left out"
        algorithm.stop()
    assert found[0] == found[1]


def test_one_half_is_sampled_for_while_the_other_steps_and_runs_repeat(local_ray, monkeypatch):
    spans: list[tuple[str, float, float]] = []

    def timed(owner: Any, method: str, least_s: float) -> None:
        inner = getattr(owner, method)

        def noted(*arguments: Any) -> Any:
            began = time.monotonic()
            time.sleep(least_s)
            outcome = inner(*arguments)
            spans.append((method, began, time.monotonic()))
            return outcome

        monkeypatch.setattr(owner, method, noted)

    timed(WorkerEnvs, "step", 0.0)
    found = []
    for rollout in ("asynchronous", "asynchronous", "synchronous"):
        algorithm = algorithm_of(2, rollout=rollout)
        algorithm.prepare(lambda line: None)
        timed(algorithm.policy, "sample", 0.05)
        spans.clear()
        algorithm.source.begin()
        played = algorithm.source.ended()
        sampled, stepped = ([span[1:] for span in spans if span[0] == name] for name in ("sample", "step"))
        overlaps = sum(begin < end_ and begin_ < end for begin, end in sampled for begin_, end_ in stepped)
        assert bool(overlaps) == (rollout == "asynchronous")
        assert sorted(episode.slot for episode in played) == list(range(24))
        # whatever they taught, the learner sees what was sampled
        algorithm.learners.call("learn", [replace(episode, rewards=episode.gains) for episode in played], 0.0)
        report = algorithm.report()
        assert report[metrics.UPDATE_FIRST_RATIO] <= 1e-5
        found.append([report[name] for name in (metrics.ENV_STEPS, metrics.UPDATE_POLICY_LOSS, metrics.UPDATE_KL)])
        algorithm.stop()
    assert found[0] == found[1]


def test_workers_step_side_by_side(local_ray):
    meeting_point = ray.remote(MeetingPoint).options(name="meeting point", num_cpus=0).remote()
    task = "meeting_env:MEETING"
    workers = start_workers(WORKERS, task, 0, PX)
    local = make_env(task, SETTINGS, 0)
    envs, ids = WorkerEnvs(workers, SETTINGS, local, 1, lambda keys, images: None), np.arange(2 * WORKERS)
    envs.begin(ids)
    chunks = np.zeros((len(ids), local.chunk_steps, len(local.action_low)), np.float32)
    for _ in range(2):  # one after the other, the first would wait for a second that has not begun
        assert len(envs.step(ids, chunks).success) == len(ids)
    for actor in [*workers, meeting_point]:
        ray.kill(actor)
