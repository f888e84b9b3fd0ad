"""Counts of a run so far, and a warning if its rewards are all equal. Filled by the algorithms."""

import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core import metrics
from rlvlm.core.state import Stateful
from rlvlm.core.steps import FloatArray

logger = logging.getLogger(__name__)

_RECENT_EPISODES = 10
_MIN_EPISODES = 40
"""Episodes before the warning: a sparse reward may not have occurred yet; at 5 % success, one run in eight has none in
40."""


class RewardSignalMonitor(Stateful):
    """Monitors all rewards since the start of a run, until two of them differ."""

    STATE = ("_bounds", "_num_episodes", "_is_settled")

    def __init__(self) -> None:
        self._bounds: dict[str, list[float]] = {}
        self._num_episodes = 0
        self._is_settled = False
        """Whether the rewards differ, or a warning was given."""

    def check(self, given: Mapping[str, FloatArray], num_ended: int) -> None:
        """Warns, once, if all rewards are equal.

        Args:
            given: new rewards by what they are for, `step` or `episode`; NaN if there is none. An episode's reward may
                be constant while those of its steps differ, as when a judge gives every episode one half at its last
                step.
            num_ended: episodes that ended with them.
        """
        if self._is_settled:
            return
        for what, rewards in given.items():
            known = rewards[np.isfinite(rewards)]
            if known.size:
                low, high = self._bounds.setdefault(what, [math.inf, -math.inf])
                self._bounds[what] = [min(low, float(known.min())), max(high, float(known.max()))]
        self._num_episodes += num_ended
        constant = {what: low for what, (low, high) in self._bounds.items() if low == high}
        if not constant:  # two rewards differ in each kind that was given: nothing left to check
            self._is_settled = bool(self._bounds)
        elif self._num_episodes >= _MIN_EPISODES:
            self._is_settled = True
            what, reward = next(iter(constant.items()))
            logger.warning(
                "every %s of the first %d episodes has the same reward, %.3g: nothing can be learned from that. If a "
                "judge gives it, look at its answers in judge_panel.html and measure it with `rlvlm judge-bench`; if "
                "the env gives it, no episode has succeeded yet, or all have",
                what, self._num_episodes, reward,
            )  # fmt: skip


class TrainingStats(Stateful):
    """Counters, newest values, and means of the last episodes."""

    STATE = ("_recent", "_facts", "env_steps", "_num_episodes", "_rewards_of_running", "signal")

    def __init__(self) -> None:
        self.env_steps = 0
        """Env steps so far, of all envs together."""
        self._steps_taken = 0
        self._num_episodes = 0
        self._recent: deque[list[float]] = deque(maxlen=_RECENT_EPISODES)
        self._facts: dict[str, float] = {}
        self._rewards_of_running = 0.0
        self.signal = RewardSignalMonitor()

    def record(self, new_steps: int, episodes: Iterable[tuple[float, bool]]) -> None:
        """Counts steps, and the true return and success of the episodes that ended in them."""
        ended = [[env_return, float(is_success)] for env_return, is_success in episodes]
        self.env_steps += new_steps
        self._num_episodes += len(ended)
        self._recent.extend(ended)

    def take_new_steps(self) -> int:
        """Returns the env steps since the last call, or since the last load."""
        new, self._steps_taken = self.env_steps - self._steps_taken, self.env_steps
        return new

    def note(self, facts: Mapping[str, float]) -> None:
        """Stores values until newer ones of the same names come."""
        self._facts |= facts

    def note_rewards(self, rewards: NDArray[np.float32], num_ended: int, leaves_out: bool) -> None:
        """Records the rewards of a round's transitions; the learned return is a mean over episodes of any length.

        Args:
            rewards: [B] rewards stored in the replay; NaN if the source gave none.
            num_ended: episodes that ended in the round; rewards of unfinished ones count with those that end next.
            leaves_out: whether transitions without a reward stay without one, and are counted.
        """
        self.signal.check({"step": rewards}, num_ended)
        # novelty labels when drawing: such a round's rewards are all NaN, and no return is known
        if np.isfinite(rewards).all():
            self._rewards_of_running += float(rewards.sum())
            if num_ended:  # otherwise its rewards wait for the end of an episode
                self._facts[metrics.TRAIN_LEARNED_RETURN] = self._rewards_of_running / num_ended
                self._rewards_of_running = 0.0
        if leaves_out:
            before = self._facts.get(metrics.TRAIN_LEFT_OUT, 0.0)
            self._facts[metrics.TRAIN_LEFT_OUT] = before + float(np.isnan(rewards).sum())

    def report(self) -> dict[str, float]:
        """Returns the newest metrics; returns and success are means of 10 episodes, missing until one has ended."""
        numbers = {metrics.ENV_STEPS: float(self.env_steps), metrics.EPISODES: float(self._num_episodes)}
        if self._recent:
            means = np.mean(self._recent, axis=0)
            numbers |= {metrics.TRAIN_EPISODE_RETURN: float(means[0]), metrics.TRAIN_EPISODE_SUCCESS: float(means[1])}
        return numbers | self._facts

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._steps_taken = self.env_steps
