"""Whether answers can be predicted better than a coin's, asked again and again. Kept by the reward model."""

import math
from collections.abc import Iterable
from typing import Any

from scipy.special import betaincc, betaln

ENOUGH = math.log(100)
"""Log of the odds at which answers count as no coin's: a coin's ever get there in one run of a hundred."""


def log_odds(num_right: int, num: int) -> float:
    """How much likelier `num_right` of `num` answers are from a predictable source than from a coin, as a log.

    The source that can be predicted is right with a probability drawn uniformly from (1/2, 1]. Against a coin the
    odds are a martingale that starts at 1, so that they ever reach 100 has a probability of at most 1 / 100, however
    often one looks.

    In statistics' words: a test martingale (an e-process) of the null hypothesis that each answer is a fair coin's.

    Source: Ville's inequality; Shafer 2021, "Testing by betting", sec. 2.
    """
    upper_half = float(betaincc(num_right + 1, num - num_right + 1, 0.5))  # underflows where a coin is far likelier
    if upper_half == 0:
        return -math.inf
    return (num + 1) * math.log(2) + float(betaln(num_right + 1, num - num_right + 1)) + math.log(upper_half)


class Evidence:
    """Counts how many answers were predicted, each by a model that had not seen it, and remembers that it was enough.

    Once it was enough it stays so: later answers can be harder without being a coin's.
    """

    def __init__(self) -> None:
        self.num_right = self.num = 0
        self.is_enough = False

    def add(self, is_right: Iterable[bool]) -> None:
        """Takes in whether each of some answers was predicted."""
        for right in is_right:
            self.num_right, self.num = self.num_right + bool(right), self.num + 1
            self.is_enough = self.is_enough or log_odds(self.num_right, self.num) >= ENOUGH

    def get_state(self) -> dict[str, Any]:
        """The counts."""
        return {"num_right": self.num_right, "num": self.num, "is_enough": self.is_enough}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned."""
        self.num_right, self.num = int(state["num_right"]), int(state["num"])
        self.is_enough = bool(state["is_enough"])
