"""Env runners as real actors of a real Ray: nothing is lost, doubled or left to chance."""

import copy
import os
import re
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from chaos import wait_until
from ray.rllib.algorithms.algorithm import Algorithm
from state_trees import assert_same

from rlvlm.algorithms import base
from rlvlm.algorithms.sac_pebble.algorithm import SACPebbleConfig
from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.algorithms.sac_pebble.runner import StepEnvRunner
from rlvlm.core import metrics
from rlvlm.core.errors import MachineError
from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.pixels import PIXELS
from rlvlm.envs.registry import Task
from rlvlm.rewards.config import StepRewardConfig
from rlvlm.testing import TinyEnv

pytestmark = [pytest.mark.ray, pytest.mark.slow]

EPISODE_STEPS, NUM_ENVS = 20, 2


class JammedEnv(TinyEnv):
    """A TinyEnv that breaks at its second episode."""

    def reset(self, *, seed=None, options=None):
        if self._steps:
            raise OSError("the gripper is jammed")
        return super().reset(seed=seed, options=options)


JAMMED = Task(name="jammed", goal="push", maker="tests.algorithms.test_runner_group:JammedEnv")


def lost_runner(marks, wanted):
    """A class of runners whose process ends when it is asked for the spaces, until `wanted` files lie in `marks`."""

    class LostRunner(StepEnvRunner):
        def get_spaces(self):
            if len(list(marks.iterdir())) < wanted:
                (marks / str(os.getpid())).touch()
                os._exit(1)
            return super().get_spaces()

    return LostRunner


@pytest.fixture(scope="module")
def build(local_ray):
    """Builds small algorithms on a Ray with a place for each of their runners."""
    built = []

    def make(env_runners, task="rlvlm.testing:TINY", turn_steps=7):
        sac = SACConfig(
            hidden=(32, 32),
            batch_size=32,
            seed_steps=100,
            turn_steps=turn_steps,
            replay_capacity=1000,
            env_runners=env_runners,
        )
        env = StepEnvConfig(episode_steps=EPISODE_STEPS, num_envs=NUM_ENVS, start="random")
        config = (
            SACPebbleConfig()
            .settings(task=task, env_settings=env, sac=sac, reward=StepRewardConfig(source="environment"))
            .debugging(seed=3)
        )
        built.append(config.build_algo())
        return built[-1]

    yield make
    for algorithm in built:
        algorithm.stop()


@pytest.fixture(scope="module")
def pair(build):
    """An algorithm with two runners, for several tests to go on with."""
    return build(2)


def train(algorithm, rounds):
    for _ in range(rounds):
        algorithm.train()


def tree(algorithm):
    return copy.deepcopy(
        {"crew": algorithm.runners.get_state(), "learner": algorithm.learner.save_tree(), "steps": algorithm.env_steps}
    )


def kill(algorithm, index, how=signal.SIGKILL):
    """Ends a runner's process the hard way, or stops it; returns its id."""
    (pid,) = algorithm.env_runner_group.foreach_env_runner(
        lambda runner: os.getpid(), remote_worker_ids=[index], local_env_runner=False
    )
    os.kill(pid, how)
    return pid


def wait_for_both(algorithm):
    """Trains until a lost runner is back, and both have played a whole turn."""
    wait_until(lambda: algorithm.train() and algorithm.env_runner_group.num_healthy_remote_workers() == 2, "it is back")
    steps = algorithm.env_steps
    algorithm.train()
    assert algorithm.env_steps == steps + 2 * NUM_ENVS * EPISODE_STEPS


def test_one_runner_that_is_never_ahead_is_the_local_one_bit_for_bit(build):
    here, there = build(0, turn_steps=EPISODE_STEPS), build(1, turn_steps=EPISODE_STEPS)
    for algorithm in (here, there):
        train(algorithm, 5)
    assert here.report() == there.report() and here.report()[metrics.UPDATES] == 100
    left, right = tree(here), tree(there)
    assert_same(left["learner"], right["learner"])
    assert_same(left["crew"], right["crew"]["runners"]["1"])
    here.stop()
    kill(there, 1)  # the only one: the turn waits for it to come back
    there.train()
    assert there.env_steps == here.env_steps + NUM_ENVS * EPISODE_STEPS
    there.stop()


def test_two_runners_resume_bit_for_bit_in_any_order(pair, tmp_path):
    train(pair, 2)
    assert pair.env_steps == 2 * 2 * NUM_ENVS * EPISODE_STEPS
    assert pair.report()[metrics.UPDATES] == pair.env_steps - 100 and pair.report()[metrics.EPISODES] == 8
    pair.save_checkpoint(str(tmp_path / "checkpoint"))
    halfway, ends = tree(pair), []
    for _ in range(2):  # the second time back from where the first one led
        train(pair, 2)
        ends.append(tree(pair))
        pair.load_checkpoint(str(tmp_path / "checkpoint"))
        assert_same(halfway, tree(pair))
    assert_same(*ends)


def test_runners_see_different_episodes_of_the_same_policy(pair):
    runner_group = pair.runners
    runner_group.start({"num_steps": 5, "random_actions": False})
    transitions = runner_group.collect().transitions
    first, second = np.split(transitions.actions, 2)
    assert first.shape == (5 * NUM_ENVS, 2) and not np.isin(first, second).any()
    noise_free = pair.learner.networks.policy.act(torch.from_numpy(transitions.obs)).numpy()
    assert np.corrcoef(noise_free.ravel(), transitions.actions.ravel())[0, 1] > 0


def test_a_killed_runner_is_missed_until_it_is_back_though_it_died_again_as_it_began(pair, caplog, monkeypatch):
    runner_group, begin_runner, deaths = pair.runners, pair.runners._begin, []

    def die_first(index, method, **arguments):
        if not deaths:
            deaths.append(index)
            kill(pair, index)
        return begin_runner(index, method, **arguments)

    monkeypatch.setattr(runner_group, "_begin", die_first)
    kill(pair, 1)
    before = pair.env_steps
    pair.train()
    assert pair.env_steps == before + NUM_ENVS * EPISODE_STEPS, "the other one's turns count"
    wait_for_both(pair)
    assert deaths and "env runner 1 was lost again as soon as it had started" in caplog.text
    assert "env runner 1 was lost, with its episodes under way" in caplog.text
    rewards = pair.learner.replay.rewards
    assert len(rewards) == min(pair.env_steps, 1000) and rewards.isfinite().all()


def test_a_runner_that_ray_restarts_before_anybody_misses_it_does_not_repeat_its_first_episodes(pair, caplog):
    wait_for_both(pair)
    actor = pair.runners._group._worker_manager.actors()[1]

    def process():
        try:
            return ray.get(actor.apply.remote(lambda runner: os.getpid()))
        except ray.exceptions.RayActorError:
            return None

    old = process()
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: process() not in (None, old), "Ray restarts it")
    before = pair.env_steps
    pair.train()
    assert pair.env_steps == before + NUM_ENVS * EPISODE_STEPS, "the other one's turns count"
    wait_for_both(pair)
    assert "env runner 1 was lost, with its episodes under way, and is back with new ones" in caplog.text


def test_more_runners_than_the_cluster_can_hold_are_refused(build):
    with pytest.raises(MachineError, match="9 env runners ask for 9 CPU, the Ray cluster has 8"):
        build(9)


def test_a_runner_that_hangs_is_replaced_and_named(pair, caplog, monkeypatch):
    monkeypatch.setattr(pair.runners, "_max_still_s", 3.0)
    pair.env_runner_group.foreach_env_runner(
        lambda runner: setattr(runner, "act", lambda **_: time.sleep(3600)),
        remote_worker_ids=[1],
        local_env_runner=False,
    )
    before = pair.env_steps
    pair.train()
    assert pair.env_steps == before + NUM_ENVS * EPISODE_STEPS, "the other one's turns count"
    assert re.search(r"env runner 1 \(process \d+ on node [\d.]+\) lives, but has done no step", caplog.text)
    assert "(`sample_timeout_s`)" in caplog.text and "--algo.env-runners" in caplog.text
    wait_for_both(pair)


def test_a_turn_may_last_as_long_as_it_makes_progress(pair, monkeypatch):
    monkeypatch.setattr(pair.runners, "_max_still_s", 3.0)

    def slow_down(runner):
        step = runner._step
        runner._step = lambda actions: (time.sleep(0.5), step(actions))[1]

    pair.env_runner_group.foreach_env_runner(slow_down, local_env_runner=False)
    before, began = pair.env_steps, time.monotonic()
    pair.train()
    assert time.monotonic() - began > 0.5 * EPISODE_STEPS, "several times the limit"
    assert pair.env_steps == before + 2 * NUM_ENVS * EPISODE_STEPS
    pair.env_runner_group.foreach_env_runner(lambda runner: delattr(runner, "_step"), local_env_runner=False)


def test_a_stopped_runner_is_replaced_once_and_ends_the_run_the_second_time(pair, caplog, monkeypatch):
    monkeypatch.setattr("rlvlm.algorithms.heartbeat.MAX_SILENCE_S", 3.0)
    runner_group, wanted = pair.runners, rf"env runner 2 \(process {kill(pair, 2, signal.SIGSTOP)} on node"
    began = time.monotonic()
    pair.train()
    assert re.search(wanted, caplog.text) and "no sign of life for 3 s" in caplog.text
    assert time.monotonic() - began < 20
    wait_until(lambda: runner_group.revive() or 2 in runner_group.alive(), "it is back")
    with pytest.raises(
        MachineError, match=rf"env runner 2 \(process {kill(pair, 2, signal.SIGSTOP)} on .*before"
    ) as caught:
        pair.train()
    assert "--algo.env-runners" in caught.value.fix
    wait_for_both(pair)


def test_a_run_goes_on_with_another_number_of_runners(build, pair, tmp_path):
    here = build(0)
    train(here, 1)
    for one, other, name in ((here, pair, "alone"), (pair, here, "pair")):
        one.save_checkpoint(str(tmp_path / name))
        other.load_checkpoint(str(tmp_path / name))
        assert_same(tree(one)["learner"], tree(other)["learner"])
        left, right = (crew.get("runners", {"1": crew})["1"] for crew in (tree(one)["crew"], tree(other)["crew"]))
        assert_same(left, right)
        train(other, 1)
        assert other.env_steps > one.env_steps


def test_an_envs_error_reaches_the_caller_and_a_lost_runner_is_waited_for(build, monkeypatch):
    algorithm = build(1, task="tests.algorithms.test_runner_group:JAMMED")
    with pytest.raises(OSError, match="the gripper is jammed") as caught:
        train(algorithm, 2)
    assert "in env runner 1:" in caught.value.__notes__[0] and "JammedEnv" not in str(caught.value)
    (actor,) = algorithm.env_runner_group._worker_manager.actors().values()
    monkeypatch.setattr(algorithm.runners, "_revival_s", 0.5)
    ray.kill(actor, no_restart=True)
    with pytest.raises(MachineError, match=r"none is back after 0.5 s \(`env_runner_restore_timeout_s`\)"):
        algorithm.train()


def test_a_runner_lost_in_rllib_s_set_up_is_replaced_a_few_times(local_ray, tmp_path, caplog, monkeypatch):
    config = (
        SACPebbleConfig()
        .settings(task="rlvlm.testing:TINY", env_settings=StepEnvConfig(episode_steps=EPISODE_STEPS))
        .settings(sac=SACConfig(hidden=(16, 16), batch_size=16, seed_steps=20, env_runners=1))
        .settings(reward=StepRewardConfig(source="environment"))
        .debugging(seed=0)
    )
    config.env_runner_cls = lost_runner(tmp_path, 1)
    algorithm = config.build_algo()
    assert "set-up, try 1 of 5: the first env runner was lost" in caplog.text
    train(algorithm, 1)
    assert algorithm.env_steps == EPISODE_STEPS
    algorithm.stop()

    def lose(algorithm, config):
        algorithm.env_runner_group, algorithm.spaces = SimpleNamespace(stop=lambda: None), None
        raise IndexError

    monkeypatch.setattr(Algorithm, "setup", lose)
    with pytest.raises(MachineError, match="lost in each of 5 tries"):
        base.BaseAlgorithm.setup(algorithm, config)
    PIXELS.release(algorithm)
