"""A policy that samples on vLLM, for real: replicas in vLLM's own environment, the trainer in ours."""

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from chaos import replica_pids

from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradient, PolicyGradientAlgorithmConfig
from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig
from rlvlm.algorithms.sft_config import ReplySFTConfig
from rlvlm.core import metrics
from rlvlm.core.episodes import Observations
from rlvlm.core.errors import ModelUnavailable, UsageError
from rlvlm.envs.registry import task_env
from rlvlm.policies.protocol import Reading
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.policies.vlm.loading import load_policy
from rlvlm.policies.vlm.policy import VLMPolicy
from rlvlm.policies.vlm.vllm import check_policy, collapsed
from rlvlm.serving.apps import running_policy
from rlvlm.serving.config import PolicyVllmConfig, ServedEngineConfig
from rlvlm.serving.engine import ServedEngine
from rlvlm.serving.weights import fetch

PYTHON = Path(__file__).parents[2] / ".envs/vllm/bin/python"
needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no vLLM environment here; make vllm builds it"),
]
ENGINE = ServedEngineConfig(
    backend="vllm",
    num_replicas=1,
    num_cpus=0.5,
    retries=1,
    vllm=PolicyVllmConfig(python=str(PYTHON), eager=True, max_tokens=512),
)
LORA = PolicyConfig(learns="lora", lora_rank=8, device="cpu")
WORDS = ("Go.", "You see a number line; add or subtract one.", "Which way is the goal? Think, then act.")
SIZES = ((96, 96), (100, 130))
"""Of images; the second is resized by the processor."""


@pytest.fixture(scope="module")
def app(local_ray):
    """The pocket policy with an adapter, on vLLM."""
    with running_policy(LORA, 0, ENGINE.placement, "vllm", batch_size=8, vllm=ENGINE.vllm) as app:
        yield app


def trainer() -> VLMPolicy:
    policy = load_policy(LORA)
    rng = np.random.default_rng(0)
    for number, size in enumerate(SIZES):
        policy.show([b"image %d" % number], rng.integers(0, 256, (1, *size, 3), np.uint8))
    return policy


def engine_of(app: str, policy: VLMPolicy) -> ServedEngine:
    rng = np.random.default_rng(0)
    frames = [rng.integers(0, 256, (1, *size, 3), np.uint8) for size in SIZES]
    obs = Observations(texts=(WORDS[1],), images=(b"image 0",))
    engine = ServedEngine(app, policy, obs, policy.write('{"action": "+"}'), frames[0], config=ENGINE)
    for number, frame in enumerate(frames):
        engine.show([b"image %d" % number], frame)
    return engine


def requests(count: int, seed: int = 0) -> tuple[Observations, range]:
    obs = Observations(
        texts=tuple(WORDS[i % 3] for i in range(count)), images=tuple(b"image %d" % (i % 2) for i in range(count))
    )
    return obs, range(seed, seed + count)


def move(policy: VLMPolicy, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, value in policy.trained_state().items():
        if "lora_" in name:
            value += 0.05 * torch.randn(value.shape, generator=generator)


def ids_of(replies: Any) -> list[list[int]]:
    return [reply.ids.tolist() for reply in replies]


class TestServed:
    pytestmark = needs_vllm

    def test_replies_are_those_of_the_trainers_policy(self, app: str) -> None:
        """The trainer gives each token the log-prob that it was sampled with; each reply follows from its seed."""
        policy = trainer()
        engine, here = engine_of(app, policy), PolicyEngine(policy)
        asked, seen = requests(12), []
        for version in (1, 2):
            move(policy, version)
            engine.use(engine.pack(version))
            replies = engine.reply(*asked, ReplySampling(max_new_tokens=12, temperature=0.7))
            assert {reply.version for reply in replies} == {version}
            again = policy.read(asked[0], [reply.ids for reply in replies], Reading(temperature=0.7))
            for row, reply in enumerate(replies):
                ids = reply.ids
                np.testing.assert_allclose(reply.log_probs, again.log_probs[row, : len(ids)].detach(), atol=1e-3)
                assert np.isnan(reply.value), "a critic's word is the learner's, from its own weights"
                assert reply.text == policy.text_of(ids) and not np.isin(ids, policy.banned_ids).any()
                assert reply.is_complete == (ids[-1] == policy.stop_id)
            alone = [
                engine.reply(asked[0].at([row]), [seed], ReplySampling(max_new_tokens=12, temperature=0.7))[0]
                for row, seed in enumerate(asked[1][:3])
            ]
            assert ids_of(alone) == ids_of(replies[:3])
            for one, other in zip(alone, replies, strict=False):
                np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
            assert 0 <= engine.report()[metrics.ENGINE_SYNC_ERROR] <= 1e-3
            seen.append(ids_of(replies))
        assert seen[0] != seen[1], "other weights, other replies to the same prompts: nothing stale is used again"
        greedy = engine.reply(*asked, ReplySampling(max_new_tokens=12, greedy=True))
        assert ids_of(greedy) == ids_of(here.reply(*asked, ReplySampling(max_new_tokens=12, greedy=True)))
        engine.close()

    def test_an_adapter_that_is_torn_is_refused_and_the_old_one_stays(self, app: str) -> None:
        policy = trainer()
        engine = engine_of(app, policy)
        move(policy, 5)
        engine.use(engine.pack(5))
        asked = requests(4)
        before, good = ids_of(engine.reply(*asked, ReplySampling(max_new_tokens=8))), engine._weights
        assert good is not None
        (bucket,) = good.buckets
        torn = replace(bucket, where=(ray.put(fetch(good, bucket)[:-8]),))
        strange = replace(good.probe, log_probs=good.probe.log_probs - 1.0)
        near = replace(good.probe, log_probs=good.probe.log_probs - 5e-4)
        engine._weights, engine.version = replace(good, version=10, probe=near), 10
        assert ids_of(engine.reply(*asked, ReplySampling(max_new_tokens=8))) == before
        assert engine.report()[metrics.ENGINE_SYNC_ERROR] == pytest.approx(5e-4, abs=1e-4)
        broken = {
            "torn": replace(good, version=6, buckets=(torn,)),
            "a fixed reply differs": replace(good, version=7, probe=strange),
            "vLLM cannot load": replace(good, version=8, adapter="{}"),
        }
        for reason, weights in broken.items():
            engine._weights = weights
            with pytest.raises(ModelUnavailable, match=reason):
                engine.reply(*asked, ReplySampling(max_new_tokens=8))
            engine._weights = good
            assert ids_of(engine.reply(*asked, ReplySampling(max_new_tokens=8))) == before, reason
        engine.close()

    def test_a_prompt_beyond_the_engines_window_is_refused_with_the_setting(self, app: str) -> None:
        engine = engine_of(app, trainer())
        engine.use(engine.pack(20))
        with pytest.raises(UsageError, match="the engine's window holds 512") as caught:
            engine.reply(*requests(2), ReplySampling(max_new_tokens=600))
        assert "--engine.vllm.max-tokens" in caught.value.fix and "--algo.max-reply-tokens" in caught.value.fix
        engine.close()

    def test_a_killed_replica_loses_no_turn_and_comes_back_with_the_weights(self, app: str) -> None:
        policy = trainer()
        engine = engine_of(app, policy)
        engine._client._retries = 12
        move(policy, 9)
        engine.use(engine.pack(9))
        asked = requests(6)
        before = ids_of(engine.reply(*asked, ReplySampling(max_new_tokens=8)))
        (replica,) = replica_pids(app)
        os.kill(replica, signal.SIGKILL)
        replies = engine.reply(*asked, ReplySampling(max_new_tokens=8))
        assert ids_of(replies) == before and {reply.version for reply in replies} == {9}
        engine.close()

    def test_ppo_learns_all_weights_from_replies_on_vllm(self, local_ray: None) -> None:
        config = PolicyConfig(device="cpu")
        assert not config.has_adapter
        with running_policy(config, 0, ENGINE.placement, "ppo", batch_size=8, vllm=ENGINE.vllm) as app:
            settings = (
                PolicyGradientAlgorithmConfig()
                .settings(task="number_line", env_settings=task_env("number_line"))
                .settings(policy=config, make_engine=partial(ServedEngine, app, config=ENGINE))
                .settings(
                    algo=PolicyGradientConfig(num_envs=8, rollout_turns=32, minibatch_turns=16, lr=3e-4),
                    sft=ReplySFTConfig(turns=0),
                    total_steps=128,
                )
                .debugging(seed=0)
            )
            algorithm = settings.build_algo()
            assert isinstance(algorithm, PolicyGradient)
            for number in (1, 2, 3):
                algorithm.train()
                report = algorithm.report()
                assert report[metrics.UPDATE_FIRST_RATIO] <= 1e-3, "trained on what was sampled"
                assert report[metrics.ENGINE_SYNC_ERROR] <= 1e-3 and report[metrics.UPDATES] == number
                assert algorithm.rollouts.engine._measured == number  # type: ignore[attr-defined]
            algorithm.stop()


def test_each_run_of_visual_tokens_becomes_one():
    # by hand: 7 keeps places; the engine puts in as many as it needs
    assert collapsed([1, 7, 7, 7, 2, 2, 7, 3], 7) == [1, 7, 2, 2, 7, 3]


def test_settings_that_vllm_lacks_are_refused():
    check_policy(LORA)
    check_policy(PolicyConfig())
    with pytest.raises(UsageError, match="action head"):
        check_policy(PolicyConfig(head="actions"))
    with pytest.raises(UsageError, match="vision encoder") as caught:
        check_policy(PolicyConfig(train_vision=True))
    assert "--policy.train-vision" in caught.value.fix
    with pytest.raises(UsageError, match="4-bit"):
        check_policy(PolicyConfig(quantization="nf4"))
    with pytest.raises(ValueError, match="--policy.lora-rank"):
        PolicyVllmConfig(structured=False)
