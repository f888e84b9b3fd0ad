"""What a run has done so far, in numbers by their names in `rlvlm.core.metrics`. Kept by every algorithm."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core import metrics

_RECENT_EPISODES = 10


class TrainingStats:
    """Counters, the newest facts and means of the last episodes."""

    def __init__(self) -> None:
        self.env_steps = 0
        """Env steps so far, of all envs together."""
        self._steps_taken = 0
        self._num_episodes = 0
        self._recent: deque[list[float]] = deque(maxlen=_RECENT_EPISODES)
        self._facts: dict[str, float] = {}

    def record(self, new_steps: int, episodes: Iterable[tuple[float, bool]]) -> None:
        """Counts steps, and the true return and success of the episodes that ended in them."""
        ended = [[env_return, float(is_success)] for env_return, is_success in episodes]
        self.env_steps += new_steps
        self._num_episodes += len(ended)
        self._recent.extend(ended)

    def take_new_steps(self) -> int:
        """Env steps since the last call, or since what was loaded."""
        new, self._steps_taken = self.env_steps - self._steps_taken, self.env_steps
        return new

    def note(self, facts: Mapping[str, float]) -> None:
        """Keeps numbers until newer ones of the same names come."""
        self._facts |= facts

    def note_rewards(self, rewards: NDArray[np.float32], episode_steps: int, leaves_out: bool) -> None:
        """Notes what a round's transitions were given.

        Args:
            rewards: [B] as they went into the replay; NaN where the source has given none.
            episode_steps: T.
            leaves_out: whether those without stay without, and are counted.
        """
        if np.isfinite(rewards).all():
            self._facts[metrics.TRAIN_LEARNED_RETURN] = float(rewards.sum()) / (len(rewards) / episode_steps)
        if leaves_out:
            before = self._facts.get(metrics.TRAIN_LEFT_OUT, 0.0)
            self._facts[metrics.TRAIN_LEFT_OUT] = before + float(np.isnan(rewards).sum())

    def report(self) -> dict[str, float]:
        """The newest numbers; returns and success are means of 10 episodes, and missing until the first has ended."""
        numbers = {metrics.ENV_STEPS: float(self.env_steps), metrics.EPISODES: float(self._num_episodes)}
        if self._recent:
            means = np.mean(self._recent, axis=0)
            numbers |= {metrics.TRAIN_EPISODE_RETURN: float(means[0]), metrics.TRAIN_EPISODE_SUCCESS: float(means[1])}
        return numbers | self._facts

    def save_tree(self) -> dict[str, Any]:
        """Everything, for a checkpoint."""
        return {
            "recent": list(self._recent),
            "facts": self._facts,
            "env_steps": self.env_steps,
            "num_episodes": self._num_episodes,
        }

    def load_tree(self, tree: Mapping[str, Any]) -> None:
        """Restores what `save_tree` returned."""
        self._recent = deque(tree["recent"], maxlen=_RECENT_EPISODES)
        self._facts = dict(tree["facts"])
        self.env_steps, self._num_episodes = tree["env_steps"], tree["num_episodes"]
        self._steps_taken = self.env_steps
