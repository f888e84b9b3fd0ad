"""Teachers who are right, wrong or undecided as often as a judge was measured to be. Built by `teachers`."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlvlm.core.judging import Label, Stamp, Status, Verdict
from rlvlm.core.steps import FloatArray, Pair

NUM_BINS = 10
"""Difficulty bins: equal parts of the gap in true progress; the first has the hardest pairs."""
_SHARES = {
    "CartPole": "24/13/62 29/5/66 35/1/64 37/1/62 52/1/47 69/1/30 86/0/14 93/2/6 100/0/0 100/0/0",
    "Drawer": "42/28/30 47/42/11 53/46/1 51/49/1 57/43/0 54/43/3 61/39/0 65/33/3 68/32/0 80/19/1",
    "Soccer": "45/45/9 42/39/18 48/41/11 51/44/5 56/42/2 64/30/6 76/21/3 84/16/0 100/0/0 100/0/0",
    "Sweep": "24/16/60 38/20/42 42/16/43 42/38/20 14/35/51 46/10/44 54/26/19 60/25/15 58/9/33 79/8/13",
    "Cloth": "27/25/49 33/20/47 31/19/49 46/12/43 37/10/52 42/20/38 40/13/47 58/4/38 50/0/50 55/9/36",
    "Rope": "27/25/47 32/10/59 44/16/40 51/17/31 65/15/20 67/14/19 71/11/18 80/15/4 87/2/10 69/19/11",
    "Water": "51/43/6 56/43/1 65/35/0 65/34/1 60/38/2 62/31/7 59/34/7 63/29/8 57/22/22 72/14/14",
}
SHARES: dict[str, FloatArray] = {
    task: np.array([[float(share) for share in one.split("/")] for one in bins.split()], np.float32)
    for task, bins in _SHARES.items()
}
"""[10, 3] correct, incorrect, undecided answers of a real VLM, in percent, the pairs with the smallest gaps first.

Source: RL-VLM-F, Wang et al. 2024, arXiv:2402.03681, and its website, read off the figure by eye (so sums may miss 100
by one or two). The VLM was Gemini-Pro-Vision, for the cloth GPT-4V, asked in two stages.
"""
_SMALLEST_GAP = 1e-6


def read_shares(path: Path) -> FloatArray:
    """[10, 3] counts of correct, incorrect and undecided answers from the judge_report.csv of `rlvlm judge-report`.

    Raises:
        ValueError: the file is not there, is about several judges, or lacks a column or a bin.
    """
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        if len({row.get("source") for row in rows}) > 1:
            raise ValueError("it is about several judges; keep the rows of one")
        none = ("no_preference", "invalid", "failed")
        counts = {
            int(row["bin"]): [float(row["correct"]), float(row["incorrect"]), sum(float(row[name]) for name in none)]
            for row in rows
        }
        shares = np.array([counts[place + 1] for place in range(NUM_BINS)], np.float32)
    except (OSError, KeyError, TypeError, ValueError, csv.Error, UnicodeDecodeError) as error:
        raise ValueError(
            f"feedback.measured {path} is no table of a judge ({type(error).__name__}: {error}); it needs the columns "
            "bin (1 to 10), correct, incorrect, no_preference, invalid and failed, as judge_report.csv has them"
        ) from None
    if not (np.isfinite(shares).all() and (shares >= 0).all() and shares.any()):
        raise ValueError(f"feedback.measured {path} needs counts >= 0, and one that is not")
    return shares


class MeasuredTeacher:
    """Compares true progress, and is right, wrong or undecided as often as a table says for gaps of that width.

    Two uniform draws are spent on every pair. A bin in which nothing was measured takes the shares of the whole table.

    Args:
        shares: [10, 3] correct, incorrect, undecided, in any unit, smallest gaps first.
        seed: of the draws.
        name: of the judge that was measured.
    """

    def __init__(self, shares: FloatArray, seed: int, name: str) -> None:
        shares = np.where(shares.sum(1, keepdims=True) > 0, shares, shares.sum(0))
        self._ends = (shares / shares.sum(1, keepdims=True)).cumsum(1)  # [10, 3]
        self._rng = np.random.default_rng(seed)
        self._stamp = Stamp(judge=f"measured {name}", revision="", prompt="", decoding="")

    def answer(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """One verdict per pair, in order; where both sides are as far, those who decide toss a coin."""
        verdicts = []
        for pair, (draw, coin) in zip(pairs, self._rng.random((len(pairs), 2)), strict=True):
            gain = float(pair.right.progress[-1] - pair.left.progress[-1])
            correct, decided, _ = self._ends[min(int(abs(gain) * NUM_BINS), NUM_BINS - 1)]
            if draw >= decided:
                verdicts.append(Verdict(status=Status.NO_PREFERENCE, label=Label.TIE, stamp=self._stamp))
                continue
            says_right = coin < 0.5 if abs(gain) <= _SMALLEST_GAP else (gain > 0) == (draw < correct)
            label = Label.RIGHT if says_right else Label.LEFT
            verdicts.append(Verdict(status=Status.OK, label=label, stamp=self._stamp))
        return verdicts

    def get_state(self) -> dict[str, Any]:
        return {"rng": self._rng.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        self._rng.bit_generator.state = state["rng"]
