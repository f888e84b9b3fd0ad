"""What a policy can do before its first rollout: demonstrations are learned from, or another run's policy is taken.

A run begins with it, and the job `rlvlm sft` (`sft_job`) is nothing else.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
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
from rlvlm.demonstrations.weighting import Weights
from rlvlm.envs.env import ChunkEnv
from rlvlm.policies.advantage_prompt import told
from rlvlm.policies.vla.policy import VLAPolicy
from rlvlm.policies.vlm.policy import VLMPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class Lessons:
    """Demonstrations that were gathered for a policy."""

    shown: Any
    """What it imitates: episodes in turns, or chunks."""
    weights: Weights | None = None
    """What each answer counts; None: all alike."""
    held_out: Sequence[TokenEpisode] = ()
    """Episodes in turns that are kept for validation."""
    measured: Mapping[str, float]
    """Figures about them by names in `rlvlm.core.metrics`."""


Learn = Callable[[Lessons], float]
"""Has the learners imitate what was shown, after which the policy of this process has their weights; returns the last
loss."""


def gather_turns(config: TokenConfig, policy: VLMPolicy, log: Callable[[str], None]) -> Lessons:
    """Turns of the env's scripted expert, or of the folder that `config.sft` names.

    Raises:
        UsageError: they are of no use in this env.
    """
    sft = config.sft
    slot = make_slot(config.task, config.env_settings.for_demonstrations())
    if sft.demonstrations:
        log(f"reading the demonstrations in {sft.demonstrations}")
        folder = Path(sft.demonstrations).expanduser()
        episodes = load_demonstrations(folder, slot.env, config.env_settings, sft, log)
    else:
        log(f"collecting {sft.turns:,} turns of the scripted expert")
        episodes = demonstrate(slot, sft, config.seed)
    learned, held_out = split(episodes, sft.held_out)
    log(f"{len(learned):,} episodes with {sum(map(len, learned)):,} turns to learn from, {len(held_out):,} held out")
    warn_of_length(policy, learned, config.algo.max_reply_tokens, log)
    if not sft.labels:
        return Lessons(shown=learned, held_out=held_out, measured={})
    weights = Weights.of_rows(np.stack([cell for episode in learned for cell in episode.extras[WEIGHT]]))
    if sft.weighting == "condition":
        learned = _with_words(learned, weights, config.seed)
    return Lessons(shown=learned, weights=weights, held_out=held_out, measured=weights.metrics())


def _with_words(episodes: Sequence[TokenEpisode], weights: Weights, seed: int) -> list[TokenEpisode]:
    """`episodes` whose prompts say how their turns did."""
    prompts = [text for episode in episodes for text in episode.obs.texts[:-1]]
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(7,)))
    texts = iter(told(prompts, weights.judged, rng))
    # of prompts there is one more than turns: the last is of the state after the episode
    return [
        replace(episode, obs=replace(episode.obs, texts=(*islice(texts, len(episode)), episode.obs.texts[-1])))
        for episode in episodes
    ]


def gather_chunks(config: TokenConfig, policy: VLAPolicy, env: ChunkEnv, log: Callable[[str], None]) -> Lessons:
    """Chunks of the script of `env`, or of the folder that `config.sft` names; `policy` learns their statistics.

    Raises:
        UsageError: they are of no use in this env.
    """
    sft = config.sft
    if sft.demonstrations:
        shown = read_demonstrations(sft, config.task, config.env_settings, env, policy.image_px, log)
    else:
        log(f"{sft.episodes} demonstrations by the task's expert")
        shown = demonstrate_chunks(env, sft, config.seed, log)
    policy.learn_statistics(shown, env)
    weights: Weights | None = shown.weights
    if weights is not None and sft.weighting == "condition":
        rng = np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(7,)))
        shown = replace(shown, obs=replace(shown.obs, texts=told(shown.obs.texts, weights.judged, rng)))
    measured = {} if weights is None else weights.metrics()
    return Lessons(
        shown=shown, weights=weights, measured=measured | {metrics.SFT_DEMONSTRATIONS: float(shown.num_episodes)}
    )


def start_replies(
    config: TokenConfig, policy: VLMPolicy, learn: Learn, log: Callable[[str], None]
) -> tuple[dict[str, float], Sequence[TokenEpisode]]:
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
    if config.sft.start_from:
        start = Path(config.sft.start_from)
        log(f"starting from {start}")
        slot = make_slot(config.task, config.env_settings.for_demonstrations())
        wanted = sft_manifest_of(config.task, config.env_settings, policy.config, slot.env.action_names)
        check_sft_manifest(start, wanted, log)
        load_trained(policy, start)
        return {}, []
    lessons, began = gather_turns(config, policy, log), time.monotonic()
    loss = learn(lessons)
    measured = {metrics.SFT_LOSS: loss, metrics.SFT_WALL_S: time.monotonic() - began}
    return {**lessons.measured, **measured}, lessons.held_out


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
    if config.sft.start_from:
        start = Path(config.sft.start_from).expanduser()
        log(f"starting from the policy of {start}")
        take_vla(start / "algorithm", policy)
        return {}
    if policy.comes_trained:
        return {}
    lessons = gather_chunks(config, policy, env, log)
    return {**lessons.measured, metrics.SFT_LOSS: learn(lessons)}
