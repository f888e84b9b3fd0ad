"""A NaN or an infinity, wherever it comes in, ends the round in which it came, and is never saved."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlvlm.algorithms.sac_pebble.algorithm import SACPebbleConfig
from rlvlm.algorithms.sac_pebble.config import SACConfig
from rlvlm.core.errors import NumericsError
from rlvlm.envs.metaworld.config import MetaWorldConfig
from rlvlm.judges.config import JudgeConfig
from rlvlm.preferences.config import FeedbackConfig, RewardModelConfig
from rlvlm.rewards.config import ChunkRewardConfig, MonitorConfig, StepRewardConfig, TurnRewardConfig
from rlvlm.testing import FakeJudge
from tests.algorithms.policy_gradient.tiny_runs import build as build_ppo
from tests.algorithms.policy_gradient.tiny_runs import chunk_config

pytestmark = [pytest.mark.ray, pytest.mark.slow]


class OddJudge(FakeJudge):
    """A FakeJudge whose numbers are `odd` while that is set."""

    odd: float | None = None

    def compare(self, queries: Any) -> Any:
        verdicts = super().compare(queries)
        odd = None if self.odd is None else (self.odd, 0.0, 0.0)
        return [dataclasses.replace(verdict, probabilities=odd) for verdict in verdicts]

    def score(self, clips: Any) -> Any:
        scores = super().score(clips)
        return scores if self.odd is None else [dataclasses.replace(one, value=self.odd) for one in scores]


JUDGE = OddJudge()


def the_judge() -> OddJudge:
    return JUDGE


def build_sac(folder: Path) -> Any:
    return (
        SACPebbleConfig()
        .settings(
            task="rlvlm.testing:TINY", env_settings=MetaWorldConfig(episode_steps=20, start="random", robot="visible")
        )
        .settings(sac=SACConfig(hidden=(16, 16), batch_size=16, seed_steps=10, turn_steps=5, critic_reset_updates=2))
        .settings(
            reward=StepRewardConfig(source="preference", teacher="judge", model="state"),
            feedback=FeedbackConfig(first_step=20, every_steps=20, queries=4),
            reward_model=RewardModelConfig(max_epochs=2, min_updates=0, hold_out_every=0),
            judge=JudgeConfig(image_px=16),
            make_judge=the_judge,
        )
        .debugging(seed=0)
        .build_algo()
    )


def build_grpo(folder: Path) -> Any:
    reward = ChunkRewardConfig(source="judged", monitor=MonitorConfig(preflight=0))
    return chunk_config(reward=reward, make_judge=the_judge, groups=2, group_size=4).build_algo()


def build_vlm(folder: Path) -> Any:
    reward = TurnRewardConfig(source="judged", monitor=MonitorConfig(preflight=0))
    acts = {"policy": {"head": "actions"}}  # every turn is one that a judge can be asked about
    return build_ppo(folder / "model", reward=reward, make_judge=the_judge, **acts)


@pytest.fixture(scope="module", params=["sac_pebble", "grpo", "ppo"])
def trained(request, local_ray, tmp_path_factory):
    """An algorithm after its first round, and the checkpoint of then."""
    folder = tmp_path_factory.mktemp(request.param)
    algorithm = {"sac_pebble": build_sac, "grpo": build_grpo, "ppo": build_vlm}[request.param](folder)
    algorithm.train()
    algorithm.save_checkpoint(str(folder / "good"))
    yield request.param, algorithm, folder
    algorithm.stop()


def odd_step(step: Callable[..., Any], place: str, odd: float) -> Callable[..., Any]:
    """`step` of an env in steps, in turns or of many in chunks, with one number of its answer made odd."""

    def stepped(*arguments: Any) -> Any:
        came = step(*arguments)
        if not isinstance(came, tuple):  # many envs in chunks
            if place == "reward":
                came.env_rewards[0, 0] = odd
                return came
            proprio = came.obs.proprio.copy()
            proprio[:, 0] = odd
            return dataclasses.replace(came, obs=dataclasses.replace(came.obs, proprio=proprio))
        obs, reward, *rest = came
        if place == "reward":
            return obs, odd, *rest
        if isinstance(obs, np.ndarray):
            obs = np.full_like(obs, odd)
            return obs, reward, *rest
        return dataclasses.replace(obs, snapshot=np.full_like(obs.snapshot, odd)), reward, *rest

    return stepped


def break_env(name: str, algorithm: Any, place: str, odd: float, patch: pytest.MonkeyPatch) -> None:
    runner = algorithm.env_runner_group.local_env_runner
    if name == "grpo":
        envs = [runner._envs]
    else:
        envs = runner._envs if name == "sac_pebble" else [slot.env for slot in runner.slots]
    for env in envs:
        patch.setattr(env, "step", odd_step(env.step, place, odd))


def a_parameter(name: str, algorithm: Any) -> torch.nn.Parameter:
    if name == "sac_pebble":
        return next(algorithm.learner.networks.critic.parameters())
    return next(param for param in algorithm.learner.policy.parameters() if param.requires_grad)


def break_learner(name: str, algorithm: Any, place: str, odd: float, patch: pytest.MonkeyPatch) -> None:
    parameter = a_parameter(name, algorithm)
    if place == "weight":
        parameter.data[(0,) * parameter.ndim] = odd
    elif name == "sac_pebble":
        update = algorithm.learner._sac_update
        critic_gradients = update.critic_gradients

        def odd_gradients(batch: Any, noise: Any) -> Any:
            reading = critic_gradients(batch, noise)
            assert parameter.grad is not None
            parameter.grad[(0,) * parameter.ndim] = odd
            return reading

        patch.setattr(update, "critic_gradients", odd_gradients)
    else:
        handle = parameter.register_hook(lambda gradient: gradient * odd)
        patch.setattr(algorithm, "unhook", handle.remove, raising=False)


@pytest.mark.parametrize(
    ("place", "odd"),
    [("observation", math.nan), ("label", math.nan), ("gradient", math.inf), ("weight", math.nan)]
    + [("reward", odd) for odd in (math.nan, math.inf)],  # a reward that is no number may be one that is not known
)
def test_a_number_that_is_not_finite_is_met_within_the_round(trained, place, odd, monkeypatch):
    name, algorithm, folder = trained
    algorithm.load_checkpoint(str(folder / "good"))
    if place in ("observation", "reward"):
        break_env(name, algorithm, place, odd, monkeypatch)
    elif place == "label":
        monkeypatch.setattr(JUDGE, "odd", odd)
        if name != "sac_pebble":  # a score that is no number is an answer that cannot be read
            algorithm.train()
            return
    else:
        break_learner(name, algorithm, place, odd, monkeypatch)
    try:
        with pytest.raises(NumericsError) as met:
            algorithm.train()
    finally:
        getattr(algorithm, "unhook", lambda: None)()
    assert "finite" in str(met.value) and met.value.fix
    algorithm.load_checkpoint(str(folder / "good"))
    monkeypatch.undo()
    algorithm.train()  # the fault is gone, and nothing of it stayed


def test_a_policy_that_is_not_finite_is_not_saved(trained):
    name, algorithm, folder = trained
    algorithm.load_checkpoint(str(folder / "good"))
    policy = algorithm.learner.networks.policy if name == "sac_pebble" else algorithm.learner.policy
    parameter = next(param for param in policy.parameters() if param.requires_grad)
    parameter.data[(0,) * parameter.ndim] = math.nan
    with pytest.raises(NumericsError, match="the policy is not saved"):
        algorithm.save_checkpoint(str(folder / "bad"))
    assert not (folder / "bad").exists()
