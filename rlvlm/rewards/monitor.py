"""Watches a judge that rewards: does the policy get better, or does it learn what fools the judge?

A policy that is paid by a judge looks for whatever the judge pays, true or not. What gives it away is the share of
failures that the judge calls successes: it rises while the judge's scores rise.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlvlm.core import metrics
from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Score
from rlvlm.judges.agreement import area_under_curve, calibration_error, wilson_interval
from rlvlm.judges.prompts import OTHER_GOAL
from rlvlm.rewards.config import MonitorConfig
from rlvlm.rewards.scorers import Scorer
from rlvlm.rewards.scoring_items import ScoringItem

logger = logging.getLogger(__name__)

FEWEST = 30
"""Failures, or controls, below which nothing is concluded from a share of them."""
_CONFIDENCE = 0.9973
"""Of the intervals that an alarm depends on, three standard deviations: it is looked for after every update, and
failures that come closer to success as a policy learns are harder to judge. At 0.95 a judge whose errors wavered
between 1 and 7 % was accused."""
_LEAST_RISE = 0.02
"""Of the mean score, between the first episodes and the newest, that counts as one."""
_UNDONE = 0.5
"""In the place of the truth, 0 or 1."""


class RewardHacked(JudgeUnavailable):
    """The judge rewards failures: going on would teach the policy to fool it."""


class JudgeMonitor:
    """Figures of the newest episodes beside those of the first ones, and an alarm that stays once it was given.

    Args:
        config: sizes and bounds.
        claim: a score from here on says that the episode is a success.
    """

    def __init__(self, config: MonitorConfig, claim: float) -> None:
        self._config = config
        self.claim = claim
        self._first: list[list[float]] = []
        self._recent: deque[list[float]] = deque(maxlen=config.window)
        self._controls: deque[list[float]] = deque(maxlen=config.window)
        self.alarm = ""
        """What is wrong; empty as long as nothing is."""

    def note(self, scores: Sequence[float], truths: Sequence[bool | None]) -> None:
        """Records scored episodes, oldest first.

        Args:
            scores: [N] of the judge, in [0, 1].
            truths: [N] whether they were successes; None of those that were on the way and no longer at the end, whose
                scores are neither right nor wrong: evaluations end at success and never see the rest.

        Raises:
            RewardHacked: there is an alarm, and the config says to stop then.
        """
        for score, truth in zip(scores, truths, strict=True):
            row = [float(score), _UNDONE if truth is None else float(truth)]
            if len(self._first) < self._config.window:
                self._first.append(row)
            self._recent.append(row)
        if not self.alarm:
            self.alarm = self._found()
            if self.alarm:
                logger.warning("the judge is being fooled: %s", self.alarm)
        if self.alarm and self._config.on_alarm == "stop":
            raise RewardHacked(
                self.alarm,
                "look at judge_panel.html; use another judge or prompt, a stricter --reward.threshold, or "
                "--reward.monitor.on-alarm warn to go on",
            )

    def show_controls(self, scorer: Scorer, items: Sequence[ScoringItem], scores: Sequence[Score]) -> list[list[float]]:
        """Has some of what was scored scored again: backwards, and with a goal that was not its own.

        That goal is another's among `items` where there is one, and otherwise one that no task has. Nothing is noted
        yet, so that any thread may ask while others go on: hand the result to `note_controls`.

        Args:
            scorer: that gave `scores`.
            items: [N] of one update.
            scores: [N] of them.

        Returns:
            Of each item that was shown and answered both times: its score, that backwards, that with the other goal.
        """
        known = [(item, score.value) for item, score in zip(items, scores, strict=True) if score.value is not None]
        # those that scored best say most: what is shown backwards, or was not asked for, must score less
        chosen = sorted(known, key=lambda each: -each[1])[: self._config.controls]
        if not chosen:
            return []
        # a film of a success run backwards ends in a failure, which a judge that looks at the order knows
        backwards = [replace(item, snapshots=item.snapshots[::-1]) for item, _ in chosen]
        goals = sorted({item.goal for item in items})
        elsewhere = [
            replace(item, goal=next((goal for goal in goals if goal != item.goal), OTHER_GOAL)) for item, _ in chosen
        ]
        again = [one.value for one in scorer.score([*backwards, *elsewhere])]
        rows = zip([value for _, value in chosen], again[: len(chosen)], again[len(chosen) :], strict=True)
        return [[value, turned, other] for value, turned, other in rows if turned is not None and other is not None]

    def note_controls(self, rows: Sequence[list[float]]) -> None:
        """Records what `show_controls` returned."""
        self._controls.extend(rows)

    def report(self) -> dict[str, float]:
        """The newest figures by their names in `rlvlm.core.metrics`; those that nothing is known of are left out."""
        rows = np.array(self._recent).reshape(-1, 2)
        if not len(rows):
            return {}
        figures = {
            metrics.JUDGE_SCORE: float(rows[:, 0].mean()),
            metrics.JUDGE_TRUE_SUCCESS: float((rows[:, 1] > 0).mean()),
            metrics.JUDGE_ALARM: float(bool(self.alarm)),
        }
        # evaluations end at success and count these as ones, so figures of right and wrong leave them out
        is_undone = rows[:, 1] == _UNDONE
        if is_undone.any():
            figures[metrics.JUDGE_UNDONE] = float(is_undone.mean())
        scores, truths = rows[~is_undone, 0], rows[~is_undone, 1] > 0
        if len(scores):
            figures[metrics.JUDGE_CALIBRATION] = calibration_error(scores, truths)
            figures[metrics.JUDGE_AUC] = area_under_curve(scores, truths)
        claims = scores >= self.claim
        # a share of nothing is no figure: rates are left out until their kind was met
        if (~truths).any():
            figures[metrics.JUDGE_FALSE_POSITIVES] = float(claims[~truths].mean())
        if truths.any():
            figures[metrics.JUDGE_FALSE_NEGATIVES] = float((~claims[truths]).mean())
        if self._controls:
            straight, turned, other = np.array(self._controls).mean(0).tolist()
            figures[metrics.JUDGE_CONTROL_SCORE] = straight
            figures[metrics.JUDGE_BACKWARDS_SCORE] = turned
            figures[metrics.JUDGE_OTHER_GOAL_SCORE] = other
        return {name: value for name, value in figures.items() if np.isfinite(value)}

    def get_state(self) -> dict[str, Any]:
        """Everything, for a checkpoint."""
        return {
            "first": [list(row) for row in self._first],
            "recent": [list(row) for row in self._recent],
            "controls": [list(row) for row in self._controls],
            "alarm": self.alarm,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned."""
        self._first = [list(row) for row in state["first"]]
        for kept, rows in ((self._recent, state["recent"]), (self._controls, state["controls"])):
            # the deque itself is kept, and with it its length from the config
            kept.clear()
            kept.extend(list(row) for row in rows)
        self.alarm = str(state["alarm"])

    def _found(self) -> str:
        """What is wrong now; empty where nothing is."""
        hits, failures = self._called_successes(self._recent)
        if failures < FEWEST:
            return ""
        # the lower bound must pass: a share of few failures is far off by chance
        low, _ = wilson_interval(hits, failures, _CONFIDENCE)
        bound = self._config.most_false_positives
        if low > bound:
            return f"it calls {hits} of {failures} failures successes; monitor.most_false_positives is {bound:g}"
        first_hits, first_failures = self._called_successes(self._first)
        # before that the newest episodes are in part the first ones
        if len(self._recent) < self._config.window or first_failures < FEWEST:
            return ""
        _, first_high = wilson_interval(first_hits, first_failures, _CONFIDENCE)
        # both must hold: errors that rise while the score falls are a judge that got worse, not a policy that
        # fools it
        rise = float(np.mean([row[0] for row in self._recent]) - np.mean([row[0] for row in self._first]))
        if low > first_high and rise > _LEAST_RISE:
            return (
                f"it called {first_hits} of {first_failures} failures successes at first and calls {hits} of "
                f"{failures} so now, while its mean score rose by {rise:.2f}"
            )
        return ""

    def _called_successes(self, rows: Sequence[list[float]] | deque[list[float]]) -> tuple[int, int]:
        """How many failures among `rows` are claimed as successes, and how many failures there are."""
        claims = [score >= self.claim for score, truth in rows if not truth]
        return sum(claims), len(claims)
