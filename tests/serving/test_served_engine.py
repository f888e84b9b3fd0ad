"""A policy behind Ray Serve: replies as in process, weights by version, and what happens when something breaks."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from chaos import Killer, replica_pids, wait_until
from ray import serve

from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradient, check_versions
from rlvlm.core import metrics
from rlvlm.core.episodes import IntArray, Observations
from rlvlm.core.errors import ModelUnavailable, RunError, UsageError
from rlvlm.core.steps import Frames
from rlvlm.policies.buckets import write_buckets
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.policies.vlm.policy import VLMPolicy
from rlvlm.serving.apps import running_policy
from rlvlm.serving.config import PlacementConfig, ServedEngineConfig
from rlvlm.serving.engine import ServedEngine
from rlvlm.serving.policy_replica import PolicyReplica, ReplyCall
from rlvlm.serving.weights import Weights, fetch, load_weights, pack_weights
from tests.algorithms.policy_gradient.tiny_runs import build
from tests.tiny_policy import requests, tiny_policy

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SERVED = ServedEngineConfig(num_replicas=2, num_cpus=0.1, timeout_s=60.0, retries=8, bucket_mib=1)
COLOCATED = replace(SERVED, colocated=True)
BUCKET = 64 << 10
"""Bytes, of which the tiny policy makes several buckets."""
IMAGE = b"image 0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("policy")


@pytest.fixture(scope="module")
def served(local_ray):
    """Serve, until the end of this file."""
    yield
    serve.shutdown()


@contextmanager
def two_replicas(folder: Path, config: ServedEngineConfig) -> Iterator[str]:
    """Of a random chat VLM. Each piece of a request is a batch of its own, so that their shapes are always the same."""
    from tests.tiny_vlm import save_tiny_vlm  # seconds, which actors that import this file need not wait for

    save_tiny_vlm(folder, "qwen3_vl")
    policy = PolicyConfig(model=str(folder), device="cpu", learns="all", seed=1)
    with running_policy(policy, 0, config.placement, "tiny", batch_size=2, shares_gpus=config.colocated) as app:
        yield app


@pytest.fixture(scope="module")
def app(served, folder):
    """Two replicas that are always there."""
    with two_replicas(folder, SERVED) as app:
        yield app


@pytest.fixture(scope="module")
def sleepers(served, folder):
    """Two that share the learners' gpus."""
    with two_replicas(folder, COLOCATED) as app:
        yield app


def frames_of_tiny_policy() -> dict[bytes, Frames]:
    rng = np.random.default_rng(0)
    shown = [(first, rng.integers(0, 256, (2, *size, 3), np.uint8)) for first, size in ((0, (56, 56)), (2, (56, 96)))]
    return {b"image %d" % (first + i): frame for first, frames in shown for i, frame in enumerate(frames)}


def trainer(folder: Path) -> tuple[VLMPolicy, Observations, IntArray, Frames]:
    policy = tiny_policy(folder)
    frame = frames_of_tiny_policy()[IMAGE][None]
    obs = Observations(texts=("Which way?",), images=(IMAGE,))
    return policy, obs, policy.write('{"action": "+"}'), frame


def engine_of(app: str, folder: Path, config: ServedEngineConfig = SERVED) -> tuple[ServedEngine, VLMPolicy]:
    policy, obs, ids, frame = trainer(folder)
    engine = ServedEngine(app, policy, obs, ids, frame, config=config)
    for key, image in frames_of_tiny_policy().items():
        engine.show([key], image[None])
    return engine, policy


def ids_of(replies: Any) -> list[list[int]]:
    return [reply.ids.tolist() for reply in replies]


def move(policy: VLMPolicy, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for value in policy.trained_state().values():
        value += 0.05 * torch.randn(value.shape, generator=generator)


def test_served_replies_are_those_in_process_and_follow_the_weights(app, folder):
    engine, policy = engine_of(app, folder)
    here = PolicyEngine(policy)
    asked = requests(12)
    seen = []
    for version in (1, 2):
        engine.use(engine.pack(version))
        here.use(here.pack(version))
        served, own = (one.reply(*asked, ReplySampling(max_new_tokens=6)) for one in (engine, here))
        assert ids_of(served) == ids_of(own) and {reply.version for reply in served} == {version}
        for left, right in zip(served, own, strict=True):
            np.testing.assert_allclose(left.log_probs, right.log_probs, atol=1e-4)
        assert engine.report()[metrics.ENGINE_SYNC_ERROR] <= 1e-4
        seen.append(ids_of(served))
        move(policy, version)
    assert seen[0] != seen[1], "other weights, other replies"
    engine.close()


def strange_weights(good: Weights, policy: VLMPolicy) -> dict[str, Weights]:
    """Weights that must be refused, by what is said of them."""

    def repacked(state: dict[str, torch.Tensor]) -> Weights:
        buckets = write_buckets(state, lambda content: (ray.put(content),), size=BUCKET)
        return replace(good, version=good.version + 1, buckets=tuple(buckets))

    poisoned = {name: value.clone() for name, value in policy.trained_state().items()}
    list(poisoned.values())[-1].fill_(torch.nan)
    last = good.buckets[-1]
    torn = replace(last, where=(ray.put(fetch(good, last)[:-8]),))
    off = replace(good.probe, log_probs=good.probe.log_probs - 1.0)
    return {
        "torn": replace(good, version=good.version + 1, buckets=(*good.buckets[:-1], torn)),
        "not finite": repacked(poisoned),
        "of another policy": repacked({"a": torch.zeros(2)}),
        "a fixed reply differs": replace(good, version=good.version + 1, probe=off),
    }


def test_weights_that_are_torn_are_refused(local_ray, tmp_path):
    policy, obs, ids, frame = trainer(tmp_path / "there")
    other = tiny_policy(tmp_path / "here")
    move(policy, 7)
    good = pack_weights(policy, 3, obs, ids, frame, bucket_bytes=BUCKET)
    assert len(good.buckets) > 3
    for reason, weights in strange_weights(good, policy).items():
        with pytest.raises(ModelUnavailable, match=reason):
            load_weights(other, weights)
    assert load_weights(other, good) <= 1e-6
    assert all(torch.equal(value, policy.trained_state()[name]) for name, value in other.trained_state().items())

    def no_bytes() -> None:
        raise RuntimeError("the node is gone")

    lost = replace(good.buckets[1], where=(ray.remote(num_cpus=0)(no_bytes).remote(),))
    with pytest.raises(ModelUnavailable, match="they are gone"):
        load_weights(other, replace(good, buckets=(good.buckets[0], lost, *good.buckets[2:])))


def asked(replica: PolicyReplica, weights: Weights | None, frame: Frames, key: str = "") -> Any:
    sampling = ReplySampling(max_new_tokens=4, temperature=1.0, greedy=True)
    obs = Observations(texts=("Go.",), images=(IMAGE,))
    return replica.ask(ReplyCall(key=key, obs=obs, seeds=(0,), frames=(frame[0],), sampling=sampling, weights=weights))


def test_a_replica_that_refused_weights_answers_with_the_old_ones_and_never_with_a_mixture(local_ray, tmp_path):
    policy, obs, ids, frame = trainer(tmp_path / "there")
    old = pack_weights(policy, 1, obs, ids, frame, bucket_bytes=BUCKET)
    move(policy, 7)
    new = pack_weights(policy, 2, obs, ids, frame, bucket_bytes=BUCKET)
    replica = PolicyReplica(PolicyConfig(), 0, PlacementConfig(), 4, lambda *_: tiny_policy(tmp_path / "here"))

    async def all_asked() -> None:
        before = await asked(replica, old, frame)
        for reason, weights in strange_weights(new, policy).items():
            assert reason in str(await asked(replica, weights, frame))
            assert "refused" in str(await asked(replica, None, frame)), "it has no weights now"
            after = await asked(replica, old, frame)
            assert ids_of(after.answers) == ids_of(before.answers) and after.answers[0].version == 1, reason
            np.testing.assert_array_equal(after.answers[0].log_probs, before.answers[0].log_probs)

    asyncio.run(all_asked())


def with_late_bucket(weights: Weights, number: int, gate: Path) -> Weights:
    """`weights` whose bucket of that number comes once there is a file `gate`."""

    def behind_the_gate(content: Any) -> Any:  # in here it travels by itself, and its worker imports no test
        while not gate.exists():
            time.sleep(0.02)
        return content

    buckets = list(weights.buckets)
    content = fetch(weights, buckets[number])
    buckets[number] = replace(buckets[number], where=(ray.remote(num_cpus=0)(behind_the_gate).remote(content),))
    return replace(weights, buckets=tuple(buckets))


@pytest.mark.parametrize("late_one", [0, 2], ids=["first", "later"])
def test_a_replica_that_waits_for_weights_is_not_taken_for_stuck(local_ray, tmp_path, late_one):
    """They may be gigabytes on another machine; a health check fails where the model shows no sign of life."""
    policy, obs, ids, frame = trainer(tmp_path / "there")
    move(policy, 3)
    weights, gate = pack_weights(policy, 1, obs, ids, frame, bucket_bytes=BUCKET), tmp_path / "gate"

    weights = with_late_bucket(weights, late_one, gate)
    replica = PolicyReplica(PolicyConfig(), 0, PlacementConfig(), 4, lambda *_: tiny_policy(tmp_path / "here"))

    async def waited() -> Any:
        answer = asyncio.create_task(asked(replica, weights, frame))
        for _ in range(6):  # a stuck one is found out at the third look
            await asyncio.sleep(0.1)
            assert replica._heartbeat.stuck(stall_s=5, deadline_s=60) is None
        assert (replica._heartbeat.busy_since is None) == (late_one == 0)
        gate.touch()
        return await answer

    receipt = asyncio.run(waited())
    assert [answer.version for answer in receipt.answers] == [1] and receipt.sync_error <= 1e-6


def test_a_replica_killed_during_a_sync_delays_no_request_and_returns_with_the_new_weights(app, folder, tmp_path):
    engine, policy = engine_of(app, folder)
    here, gate = PolicyEngine(policy), tmp_path / "gate"
    move(policy, 11)
    packed = pack_weights(policy, 50, *engine._probe, engine._frame, bucket_bytes=BUCKET)
    engine.use(with_late_bucket(packed, len(packed.buckets) - 1, gate))
    own = ids_of(here.reply(*requests(12), ReplySampling(max_new_tokens=6)))
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(engine.reply, *requests(12), ReplySampling(max_new_tokens=6))
        time.sleep(1.0)
        assert not waits.done(), "both have all but the last bucket"
        gone = replica_pids(app)[0]
        os.kill(gone, signal.SIGKILL)
        wait_until(lambda: gone not in replica_pids(app), "it is gone")
        gate.touch()
        replies = waits.result(120)
    assert ids_of(replies) == own and {reply.version for reply in replies} == {50}
    wait_until(lambda: len(replica_pids(app)) == 2, "it is back")
    for _ in range(4):  # whichever of them is asked
        again = engine.reply(*requests(12), ReplySampling(max_new_tokens=6))
        assert ids_of(again) == own and {reply.version for reply in again} == {50}
    engine.close()


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.full)])
def test_killed_replicas_lose_and_double_no_turn(app, folder, kills):
    """Kills at random moments: every turn has one reply, the right one, of the version that was asked for."""
    engine, policy = engine_of(app, folder)
    here = PolicyEngine(policy)
    version = 0
    with Killer(2026, lambda: replica_pids(app), 3.0, at_most=kills) as killer:
        while len(killer.killed) < kills:
            version += 1
            move(policy, version)
            for one in (engine, here):
                one.use(one.pack(version))
            asked = requests(12, seed=100 * version)
            served, own = (one.reply(*asked, ReplySampling(max_new_tokens=6)) for one in (engine, here))
            # In batches of another size a draw may, once in a long while, fall on the other side of a last bit.
            assert sum(left != right for left, right in zip(ids_of(served), ids_of(own), strict=True)) <= 1
            assert {reply.version for reply in served} == {version}
    wait_until(lambda: len(replica_pids(app)) == 2, "both replicas back")
    assert kills == 1 or engine.report()[metrics.ENGINE_RETRIES] > 0, "some request was under way when its replica died"
    engine.close()


def test_a_prompt_beyond_the_window_is_refused_with_the_setting(app, folder):
    engine, policy = engine_of(app, folder)
    with pytest.raises(UsageError, match=r"the model's window holds 4,096") as caught:
        engine.reply(*requests(2), ReplySampling(max_new_tokens=5_000))
    assert "--algo.max-reply-tokens" in caught.value.fix
    with pytest.raises(UsageError, match="a prompt has"):
        PolicyEngine(policy).reply(replace(requests(1)[0], texts=("go " * 5_000,)), [0], ReplySampling())
    engine.close()


def noted(engine: Any, learners: Any) -> list[str]:
    """What is done from now on, in its order; a list that grows."""
    events: list[str] = []

    def note(owner: Any, name: str) -> None:
        work = getattr(owner, name)

        def noting(*arguments: Any, **words: Any) -> Any:
            outcome = work(*arguments, **words)
            events.append(arguments[0] if name == "call_all" else name)
            return outcome

        setattr(owner, name, noting)

    for name in ("sleep", "wake", "pack", "reply"):
        note(engine, name)
    note(learners, "call_all")
    return events


def test_ppo_learns_the_same_whether_engines_sleep_while_learners_learn_or_have_cards_of_their_own(
    app, sleepers, folder
):
    found = []
    for own, config in ((app, SERVED), (sleepers, COLOCATED)):
        turns = config.colocated
        algorithm: PolicyGradient = build(
            folder, make_engine=partial(ServedEngine, own, config=config), max_reply_tokens=6
        )
        algorithm.train()
        events = noted(algorithm.rollouts.engine, algorithm.learners)
        algorithm.train()
        done = [event for event in events if event in ("sleep", "learn", "wake", "pack", "reply")]
        first_reply, last_reply = done.index("reply"), len(done) - done[::-1].index("reply")
        assert done[:first_reply] == ["pack"] and set(done[first_reply:last_reply]) == {"reply"}
        assert done[last_reply:] == (["sleep", "learn", "wake"] if turns else ["learn"])
        report = algorithm.report()
        assert report[metrics.UPDATE_FIRST_RATIO] <= 1e-4, "trained on what was sampled"
        assert report[metrics.ENGINE_SYNC_ERROR] <= 1e-4 and report[metrics.UPDATES] == 2
        weights = {name: value.clone() for name, value in algorithm.policy.trained_state().items()}
        found.append((report[metrics.UPDATE_POLICY_LOSS], weights))
        if not turns:
            assert algorithm.evaluate_policy(2).episodes
            rollout, _ = algorithm.source._play(algorithm._pack())
            version = algorithm.rollouts.engine.version
            check_versions(rollout, version, 0)
            check_versions(rollout, version + 1, 1)
            for wanted, staleness in ((version + 1, 0), (version - 1, 1)):
                with pytest.raises(RunError, match="was given replies of version"):
                    check_versions(rollout, wanted, staleness)
        algorithm.stop()
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


def test_replies_are_sampled_while_the_learner_learns_and_are_the_same(app, folder):
    found = []
    for waits in (False, True):
        algorithm = build(
            folder, make_engine=partial(ServedEngine, app, config=SERVED), staleness=1, max_reply_tokens=6
        )
        if waits:
            algorithm.source._pool = None  # each rollout ends before anything else begins
        for _ in range(3):
            algorithm.train()
        report = algorithm.report()
        assert report[metrics.STALENESS] == 1 and report[metrics.UPDATES] == 3
        algorithm.flush_pending()
        assert algorithm.rollouts.engine.version == algorithm._version == 5, "who is evaluated is the newest"
        names = (metrics.UPDATE_POLICY_LOSS, metrics.UPDATE_VALUE_LOSS, metrics.UPDATE_GRADIENT, metrics.UPDATE_KL)
        found.append([algorithm.report()[name] for name in names])
        algorithm.stop()
    assert found[0] == found[1]


def test_a_sleeping_replica_answers_once_it_is_woken_even_if_it_was_killed(sleepers, folder):
    engine, policy = engine_of(sleepers, folder, COLOCATED)
    own = ids_of(PolicyEngine(policy).reply(*requests(8), ReplySampling(max_new_tokens=6)))
    engine.use(engine.pack(1))
    engine.wake([])  # whatever was done with them before
    engine.sleep()
    with ThreadPoolExecutor(1) as pool:
        for lost in (False, True):
            waits = pool.submit(engine.reply, *requests(8), ReplySampling(max_new_tokens=6))
            time.sleep(1.0)
            assert not waits.done(), "it sleeps"
            if lost:
                gone = replica_pids(sleepers)[0]
                os.kill(gone, signal.SIGKILL)
                wait_until(lambda gone=gone: gone not in replica_pids(sleepers), "it is gone")
            engine.wake([])
            assert ids_of(waits.result(60)) == own
            engine.sleep()
    engine.close()


def fails_to_load(config: PolicyConfig, num_actions: int) -> VLMPolicy:
    raise ValueError("the card is full")


def test_a_replica_that_cannot_wake_says_why(served, folder):
    placement = replace(COLOCATED, num_replicas=1).placement
    with running_policy(PolicyConfig(), 0, placement, "turns", 8, fails_to_load, shares_gpus=True) as app:
        engine, _ = engine_of(app, folder, COLOCATED)
        with pytest.raises(ModelUnavailable, match="cannot wake: .*the card is full"):
            engine.wake([])
        engine.close()
