"""A critic of episodes from the simulator's state: values of chunks, so that each gets its own credit, or rewards of
every turn by how much it changed the probability of success. The algorithm has it complete every update's episodes.

Sources: Pinto et al. 2018, arXiv:1710.06542 (a critic that sees the state, for a policy that sees images); Schulman et
al. 2017, arXiv:1707.06347 (PPO); Ng et al. 1999 (rewards by a potential). Departures: scores are in [0, 1], so the
critic is a classifier of them (`outcome_value`), trained on those of several updates; and the potential changes from
update to update (Devlin and Kudenko 2012, for whom the best policy stays the same too).
"""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.algorithms.outcome_value import OutcomeValue
from rlvlm.core import metrics
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.errors import UsageError
from rlvlm.core.state import Stateful
from rlvlm.core.steps import FloatArray
from rlvlm.judges.agreement import calibration_error
from rlvlm.rewards.config import ValueConfig

_IMAGE_PX = 16
"""Side of the images that stand for a state which snapshots do not contain."""
NUM_GOALS = 16
"""Flags of goals that the env does not list: goals share one if their hashes do."""


class Critic(Stateful):
    """Predicts an episode's outcome before each of its turns or chunks.

    Args:
        config: sizes and step sizes.
        env: env of the task.
        seed: seed of weights and minibatches.
        episode_steps: env steps of the longest episode; None: the env's.
        sees_images: whether small images stand for the state of an env whose snapshots do not contain it.

    Raises:
        UsageError: the env's snapshots refer to images, and do not contain its state.
    """

    STATE = ("_value", "_latest")

    def __init__(
        self, config: ValueConfig, env: Any, seed: int, *, episode_steps: int | None = None, sees_images: bool = False
    ) -> None:
        nothing = np.zeros((1, env.snapshot_size), np.float32)
        self._is_drawn = env.pixels is not None and not env.landmarks(nothing).size
        if self._is_drawn and not sees_images:
            what = f"a critic of the state needs one, and {type(env).__name__} gives pixels alone"
            raise UsageError(what, "--algo.advantage.values policy --policy.pocket.has-values, or --algo.preset grpo")
        self._env, self._episode_steps = env, episode_steps or env.episode_steps
        self._asked = {text: index for index, text in enumerate(getattr(env, "instructions", ()))}
        num_flags = len(self._asked) or NUM_GOALS
        num_pixels = 3 * _IMAGE_PX**2 if self._is_drawn else 0
        size = num_pixels or self._seen(nothing).shape[1]
        size += getattr(env, "proprio_size", 0) + 1 + num_flags
        self._value = OutcomeValue(config, size, seed, num_flags=num_flags, num_pixels=num_pixels)
        self._pending: list[tuple[FloatArray, float, bool]] = []
        """Features of finished episodes that it has not learned from, their outcomes, and their true ones."""
        self._latest: dict[str, float] = {}

    @property
    def tells_apart(self) -> bool:
        """Whether it has learned from outcomes that differ."""
        return self._value.tells_apart

    def fill(self, episodes: Sequence[TokenEpisode]) -> list[TokenEpisode]:
        """Returns the episodes with the predicted scores before each of their chunks; then trains the critic on them.

        The first time, and without episodes, there are no predictions.
        """
        if not episodes:
            return []
        scores = np.array([episode.rewards.sum() for episode in episodes], np.float32)
        features = [self._features_of(episode)[:-1] for episode in episodes]
        filled: list[TokenEpisode] = []
        if self._value.is_fitted:
            parts = [self._value.predict(rows).mean(0) for rows in features]
            filled = [replace(episode, values=own) for episode, own in zip(episodes, parts, strict=True)]
            came, self._latest = scores.repeat([len(rows) for rows in features]), {}
            if came.max() > came.min():  # otherwise there is nothing to explain
                explained = 1.0 - float(np.var(came - np.concatenate(parts)) / np.var(came))
                self._latest[metrics.UPDATE_EXPLAINED] = explained
        self._value.learn(features, scores)
        return filled

    def note(self, episodes: Sequence[TokenEpisode], outcomes: FloatArray) -> None:
        """Keeps finished episodes, to learn from after the next `shape`; `outcomes` [E] that are NaN are unknown."""
        self._pending += [
            (self._features_of(episode)[:-1], outcome, episode.is_success)
            for episode, outcome in zip(episodes, outcomes.tolist(), strict=True)
            if episode.is_over and np.isfinite(outcome)
        ]

    def shape(
        self, episodes: Sequence[TokenEpisode], gamma: float, scale: float, rates: tuple[float, float]
    ) -> list[TokenEpisode]:
        """Returns the episodes with `shaping_rewards` added to those of their turns; then learns from those of `note`.

        Nothing is added before it has met outcomes that differ.

        Args:
            episodes: episodes, or pieces of them.
            gamma: discount per turn, of the advantages.
            scale: reward of a success minus that of a failure.
            rates: as in `OutcomeValue.learn`.
        """
        shaped, added = list(episodes), [np.zeros(1, np.float32)]
        if self.tells_apart:
            for number, episode in enumerate(episodes):
                values = self._value.predict(self._features_of(episode)[-len(episode) - 1 :]).mean(0)
                added.append((scale * shaping_rewards(values, episode.terminated, gamma)).astype(np.float32))
                shaped[number] = replace(episode, rewards=episode.rewards + added[-1])
        self._latest = {metrics.VALUE_SHAPING: float(np.abs(np.concatenate(added)).mean())}
        if self._pending:
            features, outcomes, truths = zip(*self._pending, strict=True)
            self._pending = []
            if self._value.is_fitted:
                values = self._value.predict(np.concatenate(features))
                true = np.repeat(truths, [len(rows) for rows in features])
                self._latest[metrics.VALUE_CALIBRATION] = calibration_error(values.mean(0), true)
                self._latest[metrics.VALUE_SPREAD] = float(values.std(0).mean())
            self._value.learn(features, np.array(outcomes, np.float32), rates)
        self._latest[metrics.VALUE_IS_KNOWN] = float(self.tells_apart)
        return shaped

    def report(self) -> dict[str, float]:
        """Returns the newest update's metrics: the share of the scores' variance predicted (`fill`; none before the
        first update), or calibration and spread of the values of new episodes, and the mean size of what was added
        (`shape`).
        """
        return self._latest

    def _features_of(self, episode: TokenEpisode) -> FloatArray:
        """Returns [C + 1, F] of the C turns of the whole episode so far and of the state after them: the simulator's
        state, proprioception, the share of time elapsed, and which of the env's instructions, or which goal, it
        follows.
        """
        # a piece of an episode in turns has observations of its own turns alone, each of which is an env step
        obs, before = episode.obs, episode.first_step
        snapshots, proprio = obs.snapshots[:, -self._env.snapshot_size :], obs.proprio  # the newest, of a history
        if before:
            snapshots = np.concatenate([episode.snapshots[:before], snapshots])
            proprio = np.concatenate([np.zeros((before, proprio.shape[1])), proprio])
        gone = np.concatenate([np.arange(before), [before], episode.ends])[:, None] / self._episode_steps
        flags = np.zeros((len(gone), len(self._asked) or NUM_GOALS))
        if not self._asked:
            flags[:] = goal_flags(episode.goals[0])
        elif obs.texts[0] in self._asked:
            flags[:, self._asked[obs.texts[0]]] = 1.0
        return np.concatenate([self._seen(snapshots), proprio, gone, flags], axis=1, dtype=np.float32)

    def _seen(self, snapshots: FloatArray) -> FloatArray:
        """Returns [C, F] of the state: offsets and distances between landmarks, or the whole state if there are none,
        or the colours of a small image.

        A hand that misses by a centimetre is visible in its offset to the thing, but hardly in both positions.
        """
        if self._is_drawn:
            return self._env.draw_sized(snapshots, _IMAGE_PX).reshape(len(snapshots), -1) / np.float32(255)
        positions = self._env.landmarks(snapshots)  # [C, K, D]
        first, second = np.triu_indices(positions.shape[1], 1)
        if not len(first):
            return snapshots
        offsets = positions[:, second] - positions[:, first]
        return np.concatenate([offsets.reshape(len(offsets), -1), np.linalg.norm(offsets, axis=2)], axis=1)


def goal_flags(goal: str) -> FloatArray:
    """Returns [NUM_GOALS], 1 at the place of a goal that is not listed, else 0."""
    return np.eye(NUM_GOALS, dtype=np.float32)[sha256(goal.encode()).digest()[0] % NUM_GOALS]


def shaping_rewards(values: NDArray[np.floating], is_end: bool, gamma: float) -> NDArray[np.floating]:
    """Returns [T], what each turn is paid for the change of the potential V: gamma V(s') - V(s).

    Args:
        values: [T + 1] V before each turn, and after the last one.
        is_end: whether the episode was over for good, where V is 0. After a cut, by a time limit or between two
            updates, V stays what it is, as what is still to come is bootstrapped.
        gamma: discount of the advantages, in [0, 1].

    Source: Ng et al. 1999, "Policy invariance under reward transformations".
    """
    after = np.append(values[1:-1], 0.0 if is_end else values[-1])
    # the sum from t on is gamma^n V(s_T) - V(s_t): of an ended episode a baseline of the state, whatever was done in it
    return gamma * after - values[:-1]
