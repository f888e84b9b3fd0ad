"""A whole algorithm on a random chat VLM and number_line, small enough for seconds."""

import functools
from pathlib import Path
from typing import Any

from rlvlm.algorithms.ppo_vlm.algorithm import PPOVLM, PPOVLMConfig
from rlvlm.algorithms.ppo_vlm.config import ObjectiveConfig, PPOConfig, TokenPPOConfig
from rlvlm.algorithms.sft.config import SFTConfig
from rlvlm.envs.registry import task_env
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.loading import load_policy
from rlvlm.policies.vlm.policy import VLMPolicy
from rlvlm.rewards.config import TurnRewardConfig
from tests.tiny_vlm import save_tiny_llava_next, save_tiny_vlm


def make_policy(num_actions: int, *, folder: str, **settings: Any) -> VLMPolicy:
    config = PolicyConfig(**({"model": folder, "device": "cpu", "learns": "all", "seed": 1} | settings))
    return load_policy(config, num_actions)


def build(
    folder: Path,
    objective: ObjectiveConfig | None = None,
    policy: dict[str, Any] | None = None,
    sft: SFTConfig | None = None,
    make_engine: Any = None,
    family: str = "qwen3_vl",
    reward: TurnRewardConfig | None = None,
    make_judge: Any = None,
    **ppo: Any,
) -> PPOVLM:
    """The algorithm; `folder` is where the model's files are put."""
    save_tiny_llava_next(folder) if family == "llava_next" else save_tiny_vlm(folder, family)
    settings: dict[str, Any] = {
        "num_envs": 4,
        "rollout_turns": 12,
        "minibatch_turns": 8,
        "max_reply_tokens": 24,
    } | ppo
    config = (
        PPOVLMConfig()
        .envs(task="number_line", env_settings=task_env("number_line"))
        .acting(
            make_policy=functools.partial(make_policy, folder=str(folder), **(policy or {})), make_engine=make_engine
        )
        .learning(
            ppo=PPOConfig(objective=objective or TokenPPOConfig(), **settings),
            sft=sft or SFTConfig(turns=0),
            total_steps=100,
        )
        .rewards(reward=reward or TurnRewardConfig(), make_judge=make_judge)
        .debugging(seed=0)
    )
    algorithm = config.build_algo()
    assert isinstance(algorithm, PPOVLM)
    return algorithm
