"""Supervised start of a policy before its first rollout: learns from demonstrations, or takes another run's policy."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlvlm.algorithms.policy_gradient.algorithm_config import TokenConfig
from rlvlm.algorithms.policy_gradient.player import take_vla
from rlvlm.algorithms.policy_gradient.slots import make_slot
from rlvlm.algorithms.sft_chunks import demonstrate as demonstrate_chunks
from rlvlm.algorithms.sft_chunks import read_demonstrations
from rlvlm.algorithms.sft_folders import (
    WEIGHT,
    check_sft_manifest,
    load_demonstrations,
    load_trained,
    sft_manifest_of,
)
from rlvlm.algorithms.sft_replies import demonstrate, split, warn_of_length
from rlvlm.core import metrics
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.steps import FloatArray
from rlvlm.demonstrations.weighting import Weights
from rlvlm.envs.env import ChunkEnv
from rlvlm.policies.vla.policy import VLAPolicy
from rlvlm.policies.vlm.policy import VLMPolicy

Learn = Callable[[Any, FloatArray | None], float]
"""Has the learners imitate what was shown, with what each answer counts, after which the policy of this process has
their weights; returns the last loss."""


def start_replies(
    config: TokenConfig, policy: VLMPolicy, learn: Learn, log: Callable[[str], None]
) -> tuple[dict[str, float], list[TokenEpisode]]:
    """Has the policy learn from turns of the env's scripted expert or of a folder, or gives it another run's weights.

    Args:
        config: with `sft`, which says what it begins with.
        policy: of this process; takes another run's weights.
        learn: see `Learn`.
        log: takes a line on what is being done now.

    Returns:
        The last loss and the seconds, by names in `rlvlm.core.metrics`, and the episodes that were held out; nothing of
        another run's weights.

    Raises:
        UsageError: the demonstrations, or the weights, are of no use in this env.
    """
    sft = config.sft
    slot = make_slot(config.task, config.env_settings.for_demonstrations())
    if sft.start_from:
        start = Path(sft.start_from)
        log(f"starting from {start}")
        wanted = sft_manifest_of(config.task, config.env_settings, policy.config, slot.env.action_names)
        check_sft_manifest(start, wanted, log)
        load_trained(policy, start)
        return {}, []
    if sft.demonstrations:
        log(f"reading the demonstrations in {sft.demonstrations}")
        episodes = load_demonstrations(Path(sft.demonstrations), slot.env, config.env_settings, sft, log)
    else:
        log(f"collecting {sft.turns:,} turns of the scripted expert")
        episodes = demonstrate(slot, sft, config.seed)
    began = time.monotonic()
    learned, held_out = split(episodes, sft.held_out)
    warn_of_length(policy, learned, config.algo.max_reply_tokens, log)
    weights = None
    if sft.labels:
        weights = np.concatenate([cell for episode in learned for cell in episode.extras[WEIGHT]])
    loss = learn(learned, weights)
    measured = {} if weights is None else Weights(values=weights).metrics()
    return measured | {metrics.SFT_LOSS: loss, metrics.SFT_WALL_S: time.monotonic() - began}, held_out


def held_out_words(measured: Mapping[str, float], updates: int) -> str:
    """Summary of a supervised start of replies, in a line."""
    held_out = "no held-out turns"
    if metrics.SFT_VALID in measured:
        exact, valid = measured[metrics.SFT_EXACT_ACTION], measured[metrics.SFT_VALID]
        held_out = (
            f"held-out turns, greedy: {exact:.0%} with the demonstrated action, {valid:.0%} readable; sampled, as "
            f"rollouts are: {measured[metrics.SFT_SAMPLED_EXACT_ACTION]:.0%}, "
            f"{measured[metrics.SFT_SAMPLED_VALID]:.0%}"
        )
    return f"supervised start: {updates} updates in {measured[metrics.SFT_WALL_S]:.0f} s, {held_out}"


def start_chunks(
    config: TokenConfig, policy: VLAPolicy, env: ChunkEnv, learn: Learn, log: Callable[[str], None]
) -> dict[str, float]:
    """Has `policy` imitate the env's script or a folder; not one that comes trained, or is another run's.

    Args:
        config: with `sft`, which says what it begins with.
        policy: of this process; takes the statistics, and another run's weights.
        env: of held-out states; its script demonstrates.
        learn: see `Learn`.
        log: takes a line on what is being done now.

    Returns:
        The loss and the number of demonstrations by names in `rlvlm.core.metrics`; nothing where none was imitated.

    Raises:
        UsageError: the demonstrations, or the weights, are of no use in this env.
    """
    sft = config.sft
    if sft.start_from:
        start = Path(sft.start_from).expanduser()
        log(f"starting from the policy of {start}")
        take_vla(start / "algorithm", policy)
        return {}
    if policy.comes_trained:
        return {}
    if sft.demonstrations:
        shown = read_demonstrations(sft, config.task, config.env_settings, env, policy.image_px, log)
    else:
        log(f"{sft.episodes} demonstrations by the task's expert")
        shown = demonstrate_chunks(env, sft, config.seed, log)
    policy.learn_statistics(shown, env)
    loss = learn(shown, shown.weights)
    weights = {} if shown.weights is None else Weights(values=shown.weights).metrics()
    return weights | {metrics.SFT_LOSS: loss, metrics.SFT_DEMONSTRATIONS: float(shown.num_episodes)}
