"""Supervised start of a policy before its first rollout: learns from demonstrations, or loads another run's policy.

A run begins with it, and the job `rlvlm sft` (`sft_job`) is nothing else.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlvlm.algorithms.checkpoint import MANIFEST, load_policy_file, load_tree, save_tree
from rlvlm.algorithms.learners import Learners
from rlvlm.algorithms.policy_gradient.algorithm_config import TokenConfig
from rlvlm.algorithms.policy_gradient.learner import TokenLearner
from rlvlm.algorithms.policy_gradient.player import load_vlm, policy_file, take_vla
from rlvlm.algorithms.sft_chunks import demonstrate as demonstrate_chunks
from rlvlm.algorithms.sft_chunks import read_demonstrations
from rlvlm.algorithms.sft_config import ChunkSFTConfig, ReplySFTConfig
from rlvlm.algorithms.sft_folders import WEIGHT, check_sft_manifest, load_demonstrations, sft_manifest_of
from rlvlm.algorithms.sft_replies import demonstrate, split, warn_of_length
from rlvlm.core import metrics
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.errors import UsageError
from rlvlm.demonstrations.weighting import Weights
from rlvlm.envs.env import ChunkEnv, Env, TurnEnv
from rlvlm.envs.slots import make_slot
from rlvlm.policies.advantage_prompt import positive, told
from rlvlm.policies.protocol import Policy
from rlvlm.policies.reply_policy import ReplyPolicy
from rlvlm.policies.vla.policy import Demonstrations, VLAPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class Lessons:
    """Demonstrations collected for a policy."""

    shown: Sequence[TokenEpisode] | Demonstrations
    """Demonstrations to imitate: episodes in turns, or chunks."""
    weights: Weights | None = None
    """Weights of the answers; None: all equal."""
    held_out: Sequence[TokenEpisode] = ()
    """Episodes in turns that are held out for validation."""
    measured: Mapping[str, float]
    """Metrics of the demonstrations, by names in `rlvlm.core.metrics`."""


_PART_S = 5.0
"""Seconds of updates between two messages at most, if an update takes less: a signal is only heeded then."""
Learn = Callable[[Lessons], dict[str, float]]
"""Function that has the learners imitate the demonstrations, after which this process's policy has their weights;
returns the last loss, the seconds and the metrics of the demonstrations, by names in `rlvlm.core.metrics`."""


class Imitation:
    """Imitation of demonstrations by all learners, which continues exactly where an earlier one stopped.

    Args:
        learners: learners that imitate.
        policy: policy of this process; receives an earlier one's weights, and the learners' when it is saved.
        lessons: demonstrations; the same as an earlier one's.
        sft: settings of the supervised start.
        bucket_bytes: size of the parts in which weights are sent.
        folder: folder of its checkpoint, of which there is one if an earlier one stopped; None: it is never saved.
        log: receives progress messages; may raise to stop it, between two updates.

    Raises:
        UsageError: the demonstrations are unusable, or differ from those of the earlier one.
        CorruptCheckpoint: the checkpoint is corrupt.
    """

    def __init__(  # noqa: PLR0913 - all that a supervised start depends on
        self, *, learners: Learners[TokenLearner], policy: Policy, lessons: Lessons,
        sft: ReplySFTConfig | ChunkSFTConfig, bucket_bytes: int, folder: Path | None, log: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._learners, self._policy, self._sft, self._log = learners, policy, sft, log
        self._folder, self._bucket_bytes = folder, bucket_bytes
        self.measured, self.done, before = dict(lessons.measured), 0, None
        if folder is not None and (folder / MANIFEST).exists():
            tree = load_tree(folder)
            policy.load_trained_state(load_policy_file(folder).weights)
            before, self.done = tree["imitation"], tree["imitation"]["num_updates"]
            self.measured |= tree["measured"]
            log(f"going on after update {self.done} of {sft.updates}")
        learners.begin_as(policy, bucket_bytes)
        learners.call_all("begin_imitation", lessons.shown, sft, lessons.weights, before)

    def train(self, until: int) -> None:
        """Makes the updates up to number `until`, with messages: after the first, then after `log_every` of them, or as
        many as take `_PART_S`.

        Raises:
            NumericsError: the loss is not finite.
        """
        first, began = self.done, time.monotonic()
        spent_s, part = self.measured.get(metrics.SFT_WALL_S, 0.0), 1
        while True:
            self.done = max(self.done, min(until, self.done + part))
            loss, took_s = self._learners.call("imitator.train", self.done), time.monotonic() - began
            self.measured |= {metrics.SFT_LOSS: loss, metrics.SFT_WALL_S: spent_s + took_s}
            if self.done >= until:
                return
            self._log(f"supervised start: update {self.done} of {self._sft.updates}, loss {loss:.3f}")
            every, at_once = self._sft.log_every, int(_PART_S * (self.done - first) / took_s)
            part = max(1, min(every - self.done % every, at_once))

    def save(self) -> None:
        """Writes the checkpoint, in place of an earlier one.

        Raises:
            MachineError: the disk is full or cannot be written.
        """
        assert self._folder is not None, "only called where there is one"
        self._learners.sync_to(self._policy, self._bucket_bytes)
        state = {"imitation": self._learners.call("imitator.get_state"), "measured": self.measured}
        save_tree(self._folder, state, policy_file(self._policy))


def start(
    kind: Any, config: TokenConfig, policy: Policy, env: Env, learn: Learn, log: Callable[[str], None]
) -> tuple[dict[str, float], Sequence[TokenEpisode]]:
    """Trains the policy on demonstrations, or gives it another run's weights.

    Args:
        kind: has `gather`, which returns the demonstrations, and `take`, which gives the policy a folder's weights.
        config: with `sft`, which decides how to start.
        policy: policy of this process, which gets statistics, or another run's weights.
        env: env of the task; one in chunks has held-out states and a script for demonstrations.
        learn: see `Learn`.
        log: receives progress messages.

    Returns:
        The last loss, the seconds and metrics of the demonstrations, by names in `rlvlm.core.metrics`, and the held-out
        episodes; empty if nothing was imitated.

    Raises:
        UsageError: the demonstrations, or the weights, are unusable in this env.
    """
    if config.sft.start_from:
        folder = Path(config.sft.start_from).expanduser()
        log(f"starting from the policy of {folder}")
        kind.take(config, policy, env, folder, log)
        return {}, ()
    lessons = kind.gather(config, policy, env, log)
    return learn(lessons), lessons.held_out


def take_turns(
    config: TokenConfig, policy: ReplyPolicy, env: TurnEnv, folder: Path, log: Callable[[str], None]
) -> None:
    """Gives the policy the weights in `folder`; raises UsageError unless they belong to this task and policy."""
    wanted = sft_manifest_of(config.task, config.env_settings, policy.config, env.action_names)
    check_sft_manifest(folder, wanted, log)
    load_vlm(policy, folder / "algorithm")


def take_chunks(config: TokenConfig, policy: VLAPolicy, env: ChunkEnv, folder: Path, log: object) -> None:  # noqa: ARG001
    """Gives the policy the weights in `folder`, whose checkpoint itself says what they belong to."""
    take_vla(folder / "algorithm", policy)


def gather_turns(config: TokenConfig, policy: ReplyPolicy, env: TurnEnv, log: Callable[[str], None]) -> Lessons:  # noqa: ARG001
    """Returns demonstrations by the env's expert, or of the folder in `config.sft`, some held out for validation."""
    sft = config.sft
    slot = make_slot(config.task, config.env_settings.for_demonstrations())
    if sft.demonstrations:
        log(f"reading the demonstrations in {sft.demonstrations}")
        folder = Path(sft.demonstrations).expanduser()
        episodes = load_demonstrations(folder, slot.env, config.env_settings, sft, log)
    else:
        log(f"collecting {sft.turns:,} turns of the scripted expert")
        episodes = demonstrate(slot, sft, config.seed)
    episodes = [replace(episode, obs=episode.obs.with_history(config.history)) for episode in episodes]
    learned, held_out = split(episodes, sft.held_out)
    log(f"{len(learned):,} episodes with {sum(map(len, learned)):,} turns to learn from, {len(held_out):,} held out")
    warn_of_length(policy, learned, config.algo.max_reply_tokens, log)
    if not sft.labels:
        return Lessons(shown=learned, held_out=held_out, measured={})
    weights = Weights.of_rows(np.stack([cell for episode in learned for cell in episode.extras[WEIGHT]]))
    if sft.weighting == "condition":
        prompts = [text for episode in learned for text in episode.obs.texts[:-1]]
        texts = iter(told(prompts, weights.judged, _noise(config.seed)))
        # there is one more prompt than turns: the last is of the state after the episode
        learned = [
            replace(episode, obs=replace(episode.obs, texts=(*islice(texts, len(episode)), episode.obs.texts[-1])))
            for episode in learned
        ]
    return Lessons(shown=learned, weights=weights, held_out=held_out, measured=weights.metrics())


def gather_chunks(config: TokenConfig, policy: VLAPolicy, env: ChunkEnv, log: Callable[[str], None]) -> Lessons:
    """Returns demonstrations by the env's expert, or of the folder in `config.sft`; the VLA learns their statistics."""
    sft = config.sft
    if sft.demonstrations:
        shown = read_demonstrations(sft, config.task, config.env_settings, env, policy, log)
    else:
        log(f"{sft.episodes} demonstrations by the task's expert")
        shown = demonstrate_chunks(env, sft, config.seed, log, policy.horizon)
    weights: Weights | None = shown.weights
    # bins and scales that span random actions are too coarse for skilled ones
    good = np.arange(len(shown.actions)) if weights is None else np.flatnonzero(weights.is_good())
    policy.learn_statistics(replace(shown, obs=shown.obs.at(good.tolist()), actions=shown.actions[good]), env)
    if weights is not None and sft.weighting == "condition":
        for text in sorted(set(shown.obs.texts)):
            plain, asked = policy.read([text]), policy.read(positive([text]))
            if torch.equal(plain, asked):  # a tokenizer that truncates
                raise UsageError(
                    f"sft.weighting condition has no effect: the policy reads nothing behind {text!r}",
                    "choose another --sft.weighting, or import the data with a shorter sentence",
                )
        texts = told(shown.obs.texts, weights.judged, _noise(config.seed))
        shown = replace(shown, obs=replace(shown.obs, texts=texts))
    measured = {} if weights is None else weights.metrics()
    measured[metrics.SFT_DEMONSTRATIONS] = float(shown.num_episodes)
    return Lessons(shown=shown, weights=weights, measured=measured)


def _noise(seed: int) -> np.random.Generator:
    """Returns the generator that draws which answers lose their label."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(7,)))


def held_out_words(measured: Mapping[str, float], updates: int) -> str:
    """Returns a one-line summary of a supervised start of replies."""
    held_out = "no held-out turns"
    if metrics.SFT_VALID in measured:
        exact, valid = measured[metrics.SFT_EXACT_ACTION], measured[metrics.SFT_VALID]
        held_out = (
            f"held-out turns, greedy: {exact:.0%} with the demonstrated action, {valid:.0%} readable; sampled, as "
            f"rollouts are: {measured[metrics.SFT_SAMPLED_EXACT_ACTION]:.0%}, "
            f"{measured[metrics.SFT_SAMPLED_VALID]:.0%}"
        )
    return f"supervised start: {updates} updates in {measured[metrics.SFT_WALL_S]:.0f} s, {held_out}"
