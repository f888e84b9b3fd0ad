"""Watches a judge that rewards: does the policy improve, or does it learn to fool the judge?

A policy that is rewarded by a judge exploits whatever the judge rewards, right or wrong. Three symptoms show it: more
failures called successes while scores rise; scores that no longer tell successes from failures; and scores that stay
the same if an episode is shown backwards or with another goal. The last needs no truth.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlvlm.core import metrics
from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Score
from rlvlm.core.state import Stateful
from rlvlm.judges.agreement import (
    area_interval,
    area_under_curve,
    calibration_error,
    kept_leads,
    wilson_interval,
)
from rlvlm.judges.prompts import OTHER_GOAL
from rlvlm.rewards.config import MonitorConfig
from rlvlm.rewards.scorers import Scorer
from rlvlm.rewards.scoring_items import ScoringItem

logger = logging.getLogger(__name__)

MIN_EPISODES = 30
"""Number of failures, or of controls, below which no conclusion is drawn from a share of them."""
_CONFIDENCE = 0.9973
"""Confidence of the intervals behind an alarm, three standard deviations: it is checked after every update, and
failures that come closer to success as a policy learns are harder to judge. At 0.95 a judge with errors between 1
and 7 % raised an alarm."""
_MOST_KEPT = 0.5
"""Tolerated share of controls that keep half of their lead."""
_LEAST_RISE = 0.02
"""Minimum rise of the mean score, from the first episodes to the newest, that counts."""
_UNDONE = 0.5
"""Value in place of the truth, 0 or 1, for episodes that lost their success."""


class RewardHacked(JudgeUnavailable):
    """The judge rewards failures: going on would teach the policy to fool it."""


class JudgeMonitor(Stateful):
    """Statistics of the newest episodes against the first ones, and an alarm that stays once it is raised.

    Args:
        config: sizes and bounds.
        success_threshold: score from which the judge is taken to call an episode a success.
    """

    STATE = {
        "first": "_first",
        "recent": "_recent",
        "controls": "_controls",
        "alarm": "alarm",
        "kind": "_kind",
    }

    def __init__(self, config: MonitorConfig, success_threshold: float) -> None:
        self._config = config
        self.success_threshold = success_threshold
        self._first: list[list[float]] = []
        self._recent: deque[list[float]] = deque(maxlen=config.window)
        self._controls: deque[list[float]] = deque(maxlen=config.window)
        self.alarm = ""
        """Fault that was found; empty without one."""
        self._kind = 0  # key of the alarm in `metrics.JUDGE_ALARMS`

    def note(self, scores: Sequence[float], truths: Sequence[bool | None]) -> None:
        """Records scored episodes, oldest first.

        Args:
            scores: [N] the judge's scores, in [0, 1].
            truths: [N] whether they were successes; None for those that lost their success, whose scores are neither
                right nor wrong: evaluations end at success and never see the rest.

        Raises:
            RewardHacked: there is an alarm, and `on_alarm` is stop.
        """
        for score, truth in zip(scores, truths, strict=True):
            row = [float(score), _UNDONE if truth is None else float(truth)]
            if len(self._first) < self._config.window:
                self._first.append(row)
            self._recent.append(row)
        if not self.alarm:
            self._kind, self.alarm = next((pair for pair in self._found() if pair[1]), (0, ""))
            if self.alarm:
                logger.warning("the judge is being fooled: %s", self.alarm)
        if self.alarm and self._config.on_alarm == "stop":
            raise RewardHacked(
                self.alarm,
                "look at judge_panel.html; use another judge or prompt, a stricter --reward.threshold, or "
                "--reward.monitor.on-alarm warn to go on",
            )

    def show_controls(self, scorer: Scorer, items: Sequence[ScoringItem], scores: Sequence[Score]) -> list[list[float]]:
        """Scores some of the items again: backwards, and with a goal that is not their own.

        That goal is another one among `items` if there is one, else one that no task has. Nothing is recorded yet, so
        that any thread may ask while others go on: pass the result to `note_controls`.

        Args:
            scorer: scorer that gave `scores`.
            items: [N] items of one update.
            scores: [N] scores of the items.

        Returns:
            For each item shown and answered both times: its score, that backwards, that with the other goal, the mean
            score of `items`, and whether the other goal is among theirs, so that their policy could reach it.
        """
        known = [(item, score.value) for item, score in zip(items, scores, strict=True) if score.value is not None]
        # the best-scored episodes say most: shown backwards, or with another goal, they must score less
        chosen = sorted(known, key=lambda each: -each[1])[: self._config.controls]
        if not chosen:
            return []
        ordinary = float(np.mean([value for _, value in known]))
        # a reversed success ends in a failure, which a judge that considers the order recognises
        backwards = [replace(item, snapshots=item.snapshots[::-1], path=item.path[::-1]) for item, _ in chosen]
        goals = sorted({item.goal for item in items})
        others = [next((goal for goal in goals if goal != item.goal), OTHER_GOAL) for item, _ in chosen]
        elsewhere = [replace(item, goal=goal) for (item, _), goal in zip(chosen, others, strict=True)]
        again = [score.value for score in scorer.score([*backwards, *elsewhere])]
        rows = zip(chosen, again[: len(chosen)], again[len(chosen) :], others, strict=True)
        return [
            [value, turned, other, ordinary, float(goal in goals and not item.action)]
            for (item, value), turned, other, goal in rows
            if turned is not None and other is not None
        ]

    def note_controls(self, rows: Sequence[list[float]]) -> None:
        self._controls.extend(rows)

    def report(self) -> dict[str, float]:
        """Returns the newest figures by their names in `rlvlm.core.metrics`, without unknown ones."""
        rows = np.array(self._recent).reshape(-1, 2)
        if not len(rows):
            return {}
        figures = {
            metrics.JUDGE_SCORE: float(rows[:, 0].mean()),
            metrics.JUDGE_TRUE_SUCCESS: float((rows[:, 1] > 0).mean()),
            metrics.JUDGE_ALARM: float(self._kind),
        }
        # evaluations end at success and count these as successes, so error rates leave them out
        success_lost = rows[:, 1] == _UNDONE
        if success_lost.any():
            figures[metrics.JUDGE_UNDONE] = float(success_lost.mean())
        scores, truths = rows[~success_lost, 0], rows[~success_lost, 1] > 0
        if len(scores):
            figures[metrics.JUDGE_CALIBRATION] = calibration_error(scores, truths)
            figures[metrics.JUDGE_AUC] = area_under_curve(scores, truths)
        if (ends := self._area_interval()) is not None:
            figures[metrics.JUDGE_AUC_LOW], figures[metrics.JUDGE_AUC_HIGH] = ends
        claims = scores >= self.success_threshold
        # a share of nothing is undefined: rates are left out until their kind occurred
        if (~truths).any():
            figures[metrics.JUDGE_FALSE_POSITIVES] = float(claims[~truths].mean())
        if truths.any():
            figures[metrics.JUDGE_FALSE_NEGATIVES] = float((~claims[truths]).mean())
        if self._controls:
            straight, turned, other, *_ = np.array(self._controls).mean(0).tolist()
            figures[metrics.JUDGE_CONTROL_SCORE] = straight
            figures[metrics.JUDGE_BACKWARDS_SCORE] = turned
            figures[metrics.JUDGE_OTHER_GOAL_SCORE] = other
            kept = self._kept_controls()
            for name, (hits, count) in zip(
                (metrics.JUDGE_KEPT_BACKWARDS, metrics.JUDGE_KEPT_OTHER_GOAL), kept, strict=True
            ):
                figures |= {name: hits / count} if count else {}
        return {name: value for name, value in figures.items() if np.isfinite(value)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; checkpoints of older versions only knew the first kind of alarm."""
        super().set_state({"kind": bool(state["alarm"])} | state)
        if any(len(row) < 5 for row in self._controls):  # rows of older versions lack the ordinary score
            self._controls.clear()

    def _found(self) -> Iterator[tuple[int, str]]:
        """Yields possible faults, each as a key of `metrics.JUDGE_ALARMS` and its evidence, which is empty without a
        fault.
        """
        yield from self._false_positives()
        ways = ("shown backwards", "given another goal of the run")
        for way, (hits, count) in zip(ways, self._kept_controls(), strict=True):
            if count >= MIN_EPISODES and wilson_interval(hits, count, _CONFIDENCE)[0] > _MOST_KEPT:
                what = f"of {count} of its best scored that were {way}, {hits} kept half of their lead over the others"
                yield 3, f"{what}: it does not look for the goal"
        ends = self._area_interval()
        if ends is not None and ends[1] < self._config.min_auc:
            bound = f"monitor.min_auc is {self._config.min_auc:g}"
            yield 4, f"its area under the curve lies between {ends[0]:.2f} and {ends[1]:.2f}; {bound}"

    def _false_positives(self) -> Iterator[tuple[int, str]]:
        hits, failures = self._called_successes(self._recent)
        if failures < MIN_EPISODES:
            return
        # the lower bound must pass: a share of few failures is unreliable
        low, _ = wilson_interval(hits, failures, _CONFIDENCE)
        bound = self._config.max_false_positives
        if low > bound:
            yield 1, f"it calls {hits} of {failures} failures successes; monitor.max_false_positives is {bound:g}"
        first_hits, first_failures = self._called_successes(self._first)
        # before that the newest episodes include first ones
        if len(self._recent) < self._config.window or first_failures < MIN_EPISODES:
            return
        _, first_high = wilson_interval(first_hits, first_failures, _CONFIDENCE)
        # both must hold: if errors rise while the score falls, the judge got worse, and no policy fools it
        rise = float(np.mean([row[0] for row in self._recent]) - np.mean([row[0] for row in self._first]))
        if low > first_high and rise > _LEAST_RISE:
            yield (
                2,
                f"it called {first_hits} of {first_failures} failures successes at first and calls {hits} of "
                f"{failures} so now, while its mean score rose by {rise:.2f}",
            )

    def _kept_controls(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns how many controls keep their lead and how many there are, once backwards and once with another goal.

        Only goals that a policy of this run could reach count, since a judge may well ignore others.
        """
        rows = np.array(self._controls).reshape(-1, 5)
        elsewhere = rows[rows[:, 4] > 0]
        return kept_leads(rows[:, 0], rows[:, 1], rows[:, 3]), kept_leads(
            elsewhere[:, 0], elsewhere[:, 2], elsewhere[:, 3]
        )

    def _area_interval(self) -> tuple[float, float] | None:
        """Returns the interval of the newest episodes' area under the curve; None with few successes or failures."""
        known = np.array([row for row in self._recent if row[1] != _UNDONE]).reshape(-1, 2)
        is_true = known[:, 1] > 0
        counts = int(is_true.sum()), int((~is_true).sum())
        if min(counts) < MIN_EPISODES:
            return None
        return area_interval(area_under_curve(known[:, 0], is_true), *counts, _CONFIDENCE)

    def _called_successes(self, rows: Sequence[list[float]] | deque[list[float]]) -> tuple[int, int]:
        """Returns how many failures among `rows` are called successes, and the number of failures."""
        claims = [score >= self.success_threshold for score, truth in rows if not truth]
        return sum(claims), len(claims)
