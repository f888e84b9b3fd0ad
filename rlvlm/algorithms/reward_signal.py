"""Warns of a run whose rewards are all the same: from such rewards nothing can be learned, whoever gives them."""

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

_FEWEST_EPISODES = 40
"""Before that, a sparse reward may simply not have been met: at 5 % success, one run in eight meets none in 40."""


class RewardSignalMonitor:
    """Looks at everything that was given as reward since the start of a run, until two of it differ."""

    def __init__(self) -> None:
        self._bounds: dict[str, list[float]] = {}
        self._num_episodes = 0
        self._is_settled = False
        """Whether the rewards differ, or a warning was given."""

    def check(self, given: Mapping[str, NDArray[Any]], num_ended: int) -> None:
        """Warns, once, where all of it is the same.

        Args:
            given: new rewards by what each is for, `step` or `episode`; NaN where there is none. An episode's reward
                may be constant while those of its steps differ, as when a judge gives every episode one half at its
                last step.
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
        if not constant:
            self._is_settled = bool(self._bounds)
        elif self._num_episodes >= _FEWEST_EPISODES:
            self._is_settled = True
            what, reward = next(iter(constant.items()))
            logger.warning(
                "every %s of the first %d episodes has the same reward, %.3g: nothing can be learned from that. If a "
                "judge gives it, look at its answers in judge_panel.html and measure it with `rlvlm judge-bench`; if "
                "the env gives it, no episode has succeeded yet, or all have",
                what, self._num_episodes, reward,
            )  # fmt: skip

    def get_state(self) -> dict[str, Any]:
        """Everything, for a checkpoint."""
        return {"bounds": self._bounds, "num_episodes": self._num_episodes, "is_settled": self._is_settled}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `get_state` returned."""
        self._bounds = {what: list(bounds) for what, bounds in state["bounds"].items()}
        self._num_episodes, self._is_settled = state["num_episodes"], state["is_settled"]
