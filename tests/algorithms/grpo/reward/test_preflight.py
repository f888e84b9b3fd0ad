"""What a judge is tried on before anything is learned from it."""

from typing import Any

import numpy as np
import pytest

from rlvlm.algorithms.grpo.config import AdvantageConfig, ScoreConfig
from rlvlm.algorithms.grpo.reward.preflight import known_episodes, preflight_scorer
from rlvlm.algorithms.grpo.reward.scoring import VideoScorer
from rlvlm.core import metrics
from rlvlm.core.chunks import ChunkObs
from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray
from rlvlm.envs.push_block.env import PushBlock
from rlvlm.envs.registry import make_env, task_env
from rlvlm.rewards.scorers import RandomScorer


def test_known_episodes_of_push_block_are_of_both_kinds() -> None:
    world = make_env("push_block", task_env("push_block"), 0)
    known = known_episodes(world, 6, 3, np.random.default_rng(0))
    assert [item.is_success for item in known] == [True] * 6 + [False] * 6
    assert all(item.snapshots.shape == (3, 10) for item in known)
    cut = [item for item in known if not item.is_success]
    assert all(item.progress < 1 for item in cut), "what has been cut off has not been reached"


class NoScriptForRed(PushBlock):
    """Has nobody who could push red blocks."""

    def reset(self, **told: Any) -> tuple[ChunkObs, dict[str, Any]]:
        obs, info = super().reset(**told)
        self.is_red = "red" in obs.instructions[0]
        return obs, info

    def scripted_chunk(self, noise: float, rng: np.random.Generator) -> FloatArray | None:
        return None if self.is_red else super().scripted_chunk(noise, rng)


def test_states_without_a_script_are_no_failures() -> None:
    known = known_episodes(NoScriptForRed(task_env("push_block"), 0), 6, 3, np.random.default_rng(0))
    assert len(known) == 12 and not any("red" in item.goal for item in known)


class NoScript(PushBlock):
    """Has nobody who could push anything."""

    def scripted_chunk(self, noise: float, rng: np.random.Generator) -> FloatArray | None:
        return None


def found(world: PushBlock, scores: ScoreConfig, told: list[str]) -> dict[str, float]:
    noise = AdvantageConfig(scorer_noise="measured" if scores.teacher == "random" else 0.0)
    scorer = VideoScorer(RandomScorer(0), scores)
    return preflight_scorer(scorer, world, scores, noise, 0, lambda: RandomScorer(0), told.append)


def test_a_die_is_measured_and_not_asked_what_it_knows() -> None:
    told: list[str] = []
    measured = found(PushBlock(task_env("push_block"), 0), ScoreConfig(source="judged", teacher="random"), told)
    assert set(measured) == {metrics.JUDGE_PREFLIGHT_NOISE} and measured[metrics.JUDGE_PREFLIGHT_NOISE] > 0.1
    assert "teach nothing" in told[-1]


def test_without_known_episodes_nothing_is_calibrated_and_no_noise_measured() -> None:
    told: list[str] = []
    blind = NoScript(task_env("push_block"), 0)
    assert found(blind, ScoreConfig(source="judged"), told) == {} and "not tried" in told[0]
    with pytest.raises(UsageError, match="calibrates"):
        found(blind, ScoreConfig(source="judged", threshold="calibrated"), told)
    with pytest.raises(UsageError, match="noise"):
        found(blind, ScoreConfig(source="judged", teacher="random"), told)
