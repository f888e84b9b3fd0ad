"""Whole algorithms, small enough for seconds: on a random chat VLM and number_line, and on a VLA and push_block."""

from pathlib import Path
from typing import Any

import torch

from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradient, PolicyGradientAlgorithmConfig
from rlvlm.algorithms.policy_gradient.chunks import ChunkRunner
from rlvlm.algorithms.policy_gradient.config import AdvantageConfig, LossConfig, PolicyGradientConfig, chunk_defaults
from rlvlm.algorithms.policy_gradient.learner import TokenLearner
from rlvlm.algorithms.sft_config import ChunkSFTConfig, ReplySFTConfig
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.registry import task_env
from rlvlm.policies.vla.config import PocketVLAConfig, VLAConfig
from rlvlm.policies.vla.flow.config import FlowConfig
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.rewards.config import TurnRewardConfig

KL: dict[str, Any] = {"loss": LossConfig(kl_weight=0.05)}
KL_AND_ENTROPY: dict[str, Any] = {"loss": LossConfig(kl_weight=0.05, entropy_weight=0.01)}
BI_LEVEL: dict[str, Any] = {"advantage": AdvantageConfig(estimator="bi_level")}


def grouped(estimator: str) -> dict[str, Any]:
    return {"advantage": AdvantageConfig(estimator=estimator), "group_size": 2}


def chunk_config(
    *,
    task: str = "push_block",
    episode_steps: int = 32,
    head: str = "tokens",
    pocket: dict[str, Any] | None = None,
    sft: ChunkSFTConfig | None = None,
    reward: TurnRewardConfig | None = None,
    make_judge: Any = None,
    seed: int = 0,
    **algo: Any,
) -> PolicyGradientAlgorithmConfig:
    """GRPO on push_block with a pocket VLA of a few thousand weights; `algo` are settings of `chunk_defaults`."""
    flow = FlowConfig(steps=3, start_std=1.0) if head == "flow" else FlowConfig()
    widths: dict[str, Any] = {"image_px": 16, "hidden": 32} | (pocket or {})
    return (
        PolicyGradientAlgorithmConfig()
        .settings(task=task, env_settings=ChunkEnvConfig(episode_steps=episode_steps))
        .settings(policy=VLAConfig(head=head, pocket=PocketVLAConfig(**widths), flow=flow))
        .settings(sft=sft or ChunkSFTConfig(episodes=4, updates=4), algo=chunk_defaults(**algo))
        .settings(reward=reward or TurnRewardConfig(), make_judge=make_judge)
        .debugging(seed=seed)
    )


def learner_of(config: PolicyGradientAlgorithmConfig) -> tuple[TokenLearner, ChunkRunner]:
    """A learner in chunks that has begun, and a runner without a policy, both of this process."""
    runner = ChunkRunner(config=config)
    torch.manual_seed(config.seed or 0)
    learner = TokenLearner(config=config, module_spec=config.get_multi_rl_module_spec(spaces=runner.get_spaces()))
    learner.build()
    learner.watch(runner.chunk_env)
    learner.begin()
    return learner, runner


def policy_config(folder: Path | str, **settings: Any) -> PolicyConfig:
    return PolicyConfig(**({"model": str(folder), "device": "cpu", "learns": "all", "seed": 1} | settings))


def build(
    folder: Path,
    algo: dict[str, Any] | None = None,
    policy: dict[str, Any] | None = None,
    sft: ReplySFTConfig | None = None,
    make_engine: Any = None,
    family: str = "qwen3_vl",
    reward: TurnRewardConfig | None = None,
    make_judge: Any = None,
    **more: Any,
) -> PolicyGradient:
    """The algorithm; `folder` is where the model's files are put."""
    # imported here: transformers takes seconds, and the actors of the other runs of this file do without
    from tests.tiny_vlm import save_tiny_llava_next, save_tiny_vlm

    save_tiny_llava_next(folder) if family == "llava_next" else save_tiny_vlm(folder, family)
    settings: dict[str, Any] = (
        {"num_envs": 4, "rollout_turns": 12, "minibatch_turns": 8, "max_reply_tokens": 24} | (algo or {}) | more
    )
    config = (
        PolicyGradientAlgorithmConfig()
        .settings(task="number_line", env_settings=task_env("number_line"))
        .settings(policy=policy_config(folder, **(policy or {})), make_engine=make_engine)
        .settings(algo=PolicyGradientConfig(**settings), sft=sft or ReplySFTConfig(turns=0), total_steps=100)
        .settings(reward=reward or TurnRewardConfig(), make_judge=make_judge)
        .debugging(seed=0)
    )
    algorithm = config.build_algo()
    assert isinstance(algorithm, PolicyGradient)
    return algorithm
