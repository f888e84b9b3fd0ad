from dataclasses import replace
from typing import Any

import pytest
import torch

from rlvlm.algorithms.policy_gradient.algorithm import TokenConfig
from rlvlm.algorithms.policy_gradient.config import AdvantageConfig, PPOConfig, TokenRewardConfig
from rlvlm.envs.registry import make_env, task_env
from rlvlm.judges.config import JudgeConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.runs import build
from rlvlm.runs.config import config_text, read_config_text
from rlvlm.runs.recipes import recipe


def test_a_run_of_another_estimator_comes_back_whole() -> None:
    config = replace(recipe("number_line"), algo=PPOConfig(advantage=AdvantageConfig(estimator="gigpo"), group_size=4))
    assert read_config_text(config_text(config)) == config


@pytest.mark.parametrize(
    "task", ["number_line", "ez_points", "points24", "doorkey_6x6", "lava_gap", "minigrid/MiniGrid-Empty-5x5-v0"]
)
def test_every_recipe_is_cut_to_minutes(task: str) -> None:
    whole = recipe(task)
    assert whole.env == recipe(task).env
    small = whole.smoke()
    assert small.steps <= 256 and small.sft.updates <= 10 and small.algo.loss == whole.algo.loss
    assert replace(small, steps=whole.steps).task == task


def test_what_was_held_out_of_training_is_what_evaluations_play() -> None:
    doorkey, number_line = recipe("doorkey_6x6").env, recipe("number_line").env
    assert (doorkey.split, doorkey.for_evaluation().split) == ("training", "held_out")
    assert number_line.for_evaluation() == number_line


def test_a_turn_is_asked_about_by_its_utility_and_an_episode_is_not() -> None:
    turns = replace(recipe("number_line"), reward=TokenRewardConfig(source="judged"))
    assert turns.asks_judge and turns.max_queries == turns.steps
    assert turns.reward_name == "gae, judge per turn"
    assert read_config_text(config_text(turns)) == turns
    with pytest.raises(ValueError, match="judge.score progress, success, rating or video, got utility"):
        replace(turns, reward=TokenRewardConfig(source="judged", per="episode"))
    with pytest.raises(ValueError, match="judge.score utility, got progress"):
        replace(turns, judge=JudgeConfig())
    assert not replace(turns, reward=TokenRewardConfig(source="judged", teacher="random")).asks_judge


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lora_rank": 0}, "lora_rank >= 1"),
        ({"lora_alpha": -1.0}, "lora_alpha > 0"),
        ({"lora_targets": "["}, "lora_targets must be a regular expression"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyConfig(**wrong)


def test_the_seed_of_a_run_reaches_what_is_drawn_of_its_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    class EnoughSeen(Exception):
        pass

    drawn: list[torch.Tensor] = []

    def look(settings: TokenConfig) -> Any:
        assert settings.make_policy is not None
        drawn.append(
            settings.make_policy(make_env("number_line", task_env("number_line"), 0)).value_head.state_dict()[
                "0.weight"
            ]
        )
        raise EnoughSeen

    monkeypatch.setattr(build, "built", look)
    for seed in (0, 1, 1):
        config = replace(recipe("number_line"), seed=seed)
        with pytest.raises(EnoughSeen), build.open_algorithm(config, None):
            pass
    assert torch.equal(drawn[1], drawn[2]) and not torch.equal(drawn[0], drawn[1])
