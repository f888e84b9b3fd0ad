"""Watches a judge that rewards: does the policy improve, or does it learn to fool the judge?

A policy that is rewarded by a judge exploits whatever the judge rewards, right or wrong. An alarm is a rise over what
was measured before: by the preflight on known items, and by the run's first episodes. So a judge that is wrong at
random, which the bench measured, gives none. Three symptoms need the simulator's truth (more failures called
successes; the same, while scores rise; scores that no longer tell successes from failures), and the others do not:
controls that keep their lead, episodes that score above known successes, starts that are called successes, and known
items that are answered otherwise than before the run.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlvlm.core import metrics
from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Score
from rlvlm.core.state import Stateful
from rlvlm.core.steps import FloatArray
from rlvlm.judges.agreement import (
    ALIKE,
    area_interval,
    area_under_curve,
    calibration_error,
    has_risen,
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
MIN_KNOWN = 8
"""Number of known failures, or successes, below which they are no baseline."""
CONFIDENCE = 0.9973
"""Confidence of the intervals behind an alarm, three standard deviations: it is checked after every update, and
failures that come closer to success as a policy learns are harder to judge. At 0.95 a judge with errors between 1
and 7 % raised an alarm."""
_MOST_KEPT = 0.5
"""Tolerated share of controls that keep half of their lead."""
_LEAST_RISE = 0.02
"""Minimum rise of the mean score, from the first episodes to the newest, that counts."""
_MOST_FALSE = 0.5
"""Share of failures called successes that is an alarm without any baseline."""
_MOST_ABOVE = 0.75
"""Tolerated probability that a new episode scores above a known success."""
_LEAST_SHIFT = 0.1
"""Minimum change of the mean score of known items, shown again, that counts."""
_SHIFT_ERRORS = 4.0
"""Standard errors by which it has to differ from 0: there are few items, and they are shown again many times."""
_UNKNOWN = 0.5
"""Value in place of the truth, 0 or 1, for episodes that lost their success, and for all where truth is not used."""
_NUM_COLUMNS = 6
"""Numbers in a row of controls, see `JudgeMonitor.show_controls`."""


class RewardHacked(JudgeUnavailable):
    """The judge rewards failures: going on would teach the policy to fool it."""


class Alarm(Stateful):
    """An alarm of a judge's monitor, which stays once it is raised."""

    STATE = ("alarm=text", "kind")

    def __init__(self) -> None:
        self.text = ""
        """Fault that was found, with its figures; empty without one."""
        self.kind = 0
        """Key in `metrics.JUDGE_ALARMS`; 0 without an alarm."""

    def check(self, found: Iterator[tuple[int, str]], on_alarm: str) -> None:
        """Raises the alarm for the first of the faults `found`, kinds and evidence, unless there is one already.

        Raises:
            RewardHacked: there is an alarm, and `on_alarm` is stop.
        """
        if not self.text:
            self.kind, self.text = next(found, (0, ""))
            if self.text:
                logger.warning("the judge is being fooled: %s", self.text)
        if self.text and on_alarm == "stop":
            raise RewardHacked(
                self.text,
                "look at judge_panel.html; use another judge or prompt, a stricter --reward.threshold, or "
                "--reward.monitor.on-alarm warn to go on",
            )


class JudgeMonitor(Stateful):
    """Statistics of the newest episodes against the first ones and known items, and an alarm.

    Args:
        config: sizes and bounds.
        success_threshold: score from which the judge is taken to call an episode a success.
        robot_columns: columns of a snapshot with the robot's own pose (`Env.robot_columns`); without any, no control
            moves the robot alone.
        goals_in_view: goals that a snapshot's scene offers (`Env.goals_in_view`); None knows only those of the run.
    """

    STATE = ("_first", "_recent", "_controls", "_known", "_again", "_alarm")

    def __init__(
        self,
        config: MonitorConfig,
        success_threshold: float,
        robot_columns: Sequence[int] = (),
        goals_in_view: Callable[[FloatArray], Sequence[str]] | None = None,
    ) -> None:
        self._config, self._goals_in_view = config, goals_in_view
        self.success_threshold = success_threshold
        self.is_graded = True
        """Whether scores are paid as they are; else all from the threshold on are paid alike."""
        self._robot_columns = list(robot_columns)
        self._first: list[list[float]] = []
        self._recent: deque[list[float]] = deque(maxlen=config.window)
        self._controls: deque[list[float]] = deque(maxlen=config.window)
        # [score, truth] of the preflight's items, and [score, score now, truth] of those shown again last
        self._known: list[list[float]] = []
        self._again: list[list[float]] = []
        self._alarm = Alarm()

    @property
    def alarm(self) -> str:
        """Fault that was found; empty without one."""
        return self._alarm.text

    def expect(self, scores: Sequence[float], truths: Sequence[bool]) -> None:
        """Takes a judge's scores of known items, before the run, as what it is to be held to: [N] and [N]."""
        self._known = [[float(score), float(truth)] for score, truth in zip(scores, truths, strict=True)]

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
            is_known = truth is not None and self._config.uses_truth
            row = [float(score), float(bool(truth)) if is_known else _UNKNOWN]
            if len(self._first) < self._config.window:
                self._first.append(row)
            self._recent.append(row)
        self._alarm.check(self._found(), self._config.on_alarm)

    def show_controls(self, scorer: Scorer, items: Sequence[ScoringItem], scores: Sequence[Score]) -> list[list[float]]:
        """Scores some of the items again: as if nothing had happened, backwards, with a goal that is not their own, and
        with the robot's movement alone.

        That goal is another one that is in view, else another one among `items` where the env does not say what is in
        view, else one that no task has. Nothing is recorded yet, so that any thread may ask while others go on: pass
        the result to `note_controls`.

        Args:
            scorer: scorer that gave `scores`.
            items: [N] items of one update.
            scores: [N] scores of the items.

        Returns:
            For each item shown and answered each time: its score, that backwards, that with the other goal, that of its
            first moment alone, whether the other goal is in view or among theirs, so that their policy could reach it,
            and the score of the robot's movement alone, NaN if the env does not tell robot and things apart.
        """
        known = [
            (item, score.value)
            for item, score in zip(items, scores, strict=True)
            # a single image is its own first moment and its own way back, so that it would only seem to be fooled
            if score.value is not None and (len(item.snapshots) > 1 or item.action)
        ]
        # the best-scored episodes say most: changed in these ways, they must score less
        chosen = sorted(known, key=lambda each: -each[1])[: self._config.controls]
        if not chosen:
            return []
        goals = sorted({item.goal for item in items})
        # of something that nobody sees the answer is easy
        offered = [self._goals_in_view(item.snapshots[-1]) if self._goals_in_view else () for item, _ in chosen]
        others = [
            next((goal for goal in in_view or goals if goal != item.goal), OTHER_GOAL)
            for (item, _), in_view in zip(chosen, offered, strict=True)
        ]
        # what the judge gives for nothing: a lead is measured from there, and not from the other episodes, which all
        # score alike once a policy has found what the judge likes
        still = [_reshown(item, item.snapshots[:1].repeat(len(item.snapshots), axis=0)) for item, _ in chosen]
        # a reversed success ends in a failure, which a judge that considers the order recognises
        backwards = [replace(item, snapshots=item.snapshots[::-1], path=item.path[::-1]) for item, _ in chosen]
        elsewhere = [replace(item, goal=goal) for (item, _), goal in zip(chosen, others, strict=True)]
        alone = [self._robot_alone(item) for item, _ in chosen] if self._robot_columns else []
        # none of them is a success: simulated scorers know the truth and see no image
        shown = [replace(item, is_success=False, progress=0.0) for item in (*still, *backwards, *elsewhere, *alone)]
        again = [score.value for score in scorer.score(shown)]
        again += [np.nan] * (len(chosen) - len(alone))
        columns = [again[begin : begin + len(chosen)] for begin in range(0, 4 * len(chosen), len(chosen))]
        rows = zip(chosen, *columns, others, strict=True)
        return [
            [value, turned, other, unmoved, float(goal != OTHER_GOAL and not item.action), robot]
            for (item, value), unmoved, turned, other, robot, goal in rows
            if turned is not None and other is not None and unmoved is not None and robot is not None
        ]

    def note_controls(self, rows: Sequence[list[float]]) -> None:
        """Records what `show_controls` returned."""
        self._controls.extend(rows)

    def note_again(self, scores: Sequence[Score], first: Sequence[float], truths: Sequence[bool]) -> None:
        """Records known items that were shown again: [N] scores now, [N] those before the run, [N] the truth."""
        self._again = [
            [before, score.value, float(truth)]
            for score, before, truth in zip(scores, first, truths, strict=True)
            if score.value is not None
        ]

    def report(self) -> dict[str, float]:
        """Returns the newest figures by their names in `rlvlm.core.metrics`, without unknown ones."""
        rows = np.array(self._recent).reshape(-1, 2)
        if not len(rows):
            return {}
        figures = {metrics.JUDGE_SCORE: float(rows[:, 0].mean()), metrics.JUDGE_ALARM: float(self._alarm.kind)}
        figures |= self._against_truth(rows) if self._config.uses_truth else {}
        if (above := self._above_known()) is not None:
            figures[metrics.JUDGE_ABOVE_KNOWN] = above[0]
        if self._again:
            before, now, _ = np.array(self._again).T
            figures[metrics.JUDGE_KNOWN_SHIFT] = float((now - before).mean())
        if self._controls:
            straight, turned, other, unmoved, _, alone = np.array(self._controls).mean(0).tolist()
            figures[metrics.JUDGE_CONTROL_SCORE] = straight
            figures[metrics.JUDGE_BACKWARDS_SCORE] = turned
            figures[metrics.JUDGE_OTHER_GOAL_SCORE] = other
            figures[metrics.JUDGE_START_SCORE] = unmoved
            figures[metrics.JUDGE_ROBOT_ALONE_SCORE] = alone  # NaN, and so left out, where nothing tells it apart
            for name, (hits, count) in zip(metrics.JUDGE_KEPT, self._kept_controls(), strict=True):
                figures |= {name: hits / count} if count else {}
        return {name: value for name, value in figures.items() if np.isfinite(value)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned, also that of an older version."""
        if not isinstance(state["alarm"], dict):  # before known items, with alarm and kind side by side
            alarm = {"alarm": state["alarm"], "kind": int(state.get("kind", bool(state["alarm"])))}
            state = {"known": [], "again": []} | state | {"alarm": alarm}
        super().set_state(state)
        if any(len(row) < _NUM_COLUMNS for row in self._controls):  # rows of older versions lack the start's score
            self._controls.clear()

    def _robot_alone(self, item: ScoringItem) -> ScoringItem:
        """Returns the item with the robot's movement, and everything else as it was at first."""
        moments = item.snapshots[:1].repeat(len(item.snapshots), axis=0)
        moments[:, self._robot_columns] = item.snapshots[:, self._robot_columns]
        return _reshown(item, moments, moves_hand=True)

    def _against_truth(self, rows: FloatArray) -> dict[str, float]:
        """Returns the figures of `rows` [N, 2] that need the simulator's truth."""
        figures = {metrics.JUDGE_TRUE_SUCCESS: float((rows[:, 1] > 0).mean())}
        # evaluations end at success and count these as successes, so error rates leave them out
        success_lost = rows[:, 1] == _UNKNOWN
        if success_lost.any():
            figures[metrics.JUDGE_UNDONE] = float(success_lost.mean())
        scores, truths = rows[~success_lost, 0], rows[~success_lost, 1] > 0
        if len(scores):
            figures[metrics.JUDGE_CALIBRATION] = calibration_error(scores, truths)
            figures[metrics.JUDGE_AUC] = area_under_curve(scores, truths)
        if (ends := _area_interval(rows)) is not None:
            figures[metrics.JUDGE_AUC_LOW], figures[metrics.JUDGE_AUC_HIGH] = ends
        claims = scores >= self.success_threshold
        # a share of nothing is undefined: rates are left out until their kind occurred
        if (~truths).any():
            figures[metrics.JUDGE_FALSE_POSITIVES] = float(claims[~truths].mean())
        if truths.any():
            figures[metrics.JUDGE_FALSE_NEGATIVES] = float((~claims[truths]).mean())
        return figures

    def _found(self) -> Iterator[tuple[int, str]]:
        """Yields faults, each as a key of `metrics.JUDGE_ALARMS` and its evidence."""
        yield from self._false_positives()
        ways = ("shown backwards", "given another goal of the run", "shown with the robot's movement alone")
        for kind, way, (hits, count) in zip((3, 3, 5), ways, self._kept_controls(), strict=True):
            if count >= MIN_EPISODES and wilson_interval(hits, count, CONFIDENCE)[0] > _MOST_KEPT:
                what = f"of {count} of its best scored that were {way}, {hits} kept half of their lead over the start"
                yield kind, f"{what}: it does not look for the goal"
        ends = _area_interval(self._recent)
        before = _area_interval(self._known, MIN_KNOWN)
        if ends is not None and ends[1] < min(self._config.min_auc, 1.0 if before is None else before[0]):
            bound = f"monitor.min_auc is {self._config.min_auc:g}"
            known = "" if before is None else f", of known items between {before[0]:.2f} and {before[1]:.2f}"
            yield 4, f"its area under the curve lies between {ends[0]:.2f} and {ends[1]:.2f}{known}; {bound}"
        yield from self._without_truth()

    def _false_positives(self) -> Iterator[tuple[int, str]]:
        bar = self._bar()
        hits, failures = _above(self._recent, bar)
        if failures < MIN_EPISODES:
            return
        # the lower bound must pass: a share of few failures is unreliable
        low, _ = wilson_interval(hits, failures, CONFIDENCE)
        bound = self._config.max_false_positives
        known_hits, known_failures = _above(self._known, bar)
        what = f"failures score like successes, {bar:.2f} or more"
        if known_failures < MIN_KNOWN:
            if low > max(bound, _MOST_FALSE):
                yield 1, f"{hits} of {failures} {what}"
        elif low > bound and has_risen((hits, failures), (known_hits, known_failures), CONFIDENCE):
            yield 1, f"{hits} of {failures} {what}; before the run {known_hits} of {known_failures} known ones did"
        first_hits, first_failures = _above(self._first, bar)
        # before that the newest episodes include first ones
        if len(self._recent) < self._config.window or first_failures < MIN_EPISODES:
            return
        # both must hold: if errors rise while the score falls, the judge got worse, and no policy fools it
        rise = float(np.mean([row[0] for row in self._recent]) - np.mean([row[0] for row in self._first]))
        # two intervals apart, where known failures, which are few, have that of the difference: by that test 3 of 40
        # runs of an honest judge gave an alarm (`benchmarks/false_alarms.py`)
        _, first_high = wilson_interval(first_hits, first_failures, CONFIDENCE)
        # as a policy learns its task, failures become few and come near the goal, where any noise makes some of them
        # score like successes: of all that does, ever less is a failure
        paid, first_paid = (sum(score >= bar for score, _ in rows) for rows in (self._recent, self._first))
        is_as_true = first_paid > 0 and hits / max(paid, 1) < wilson_interval(first_hits, first_paid, CONFIDENCE)[1]
        if low > first_high and rise > _LEAST_RISE and not is_as_true:
            yield (
                2,
                f"{hits} of {failures} {what}, and at first {first_hits} of {first_failures} did; its mean score rose "
                f"by {rise:.2f}",
            )

    def _without_truth(self) -> Iterator[tuple[int, str]]:
        """Yields faults that known items and controls show, whatever the simulator says of the episodes."""
        if (above := self._above_known()) is not None and above[1] > _MOST_ABOVE:
            newest = float(np.mean([row[0] for row in self._recent]))
            known = float(np.mean([score for score, truth in self._known if truth]))
            if newest - known > ALIKE:
                what = f"its {len(self._recent)} newest episodes score {newest:.2f} on average"
                yield 6, f"{what}, known successes {known:.2f}: it likes something better than the goal"
        starts = [unmoved for _, _, _, unmoved, *_ in self._controls]
        called = sum(score >= self.success_threshold for score in starts)
        if len(starts) >= MIN_EPISODES and wilson_interval(called, len(starts), CONFIDENCE)[0] > _MOST_FALSE:
            yield 7, f"of {len(starts)} episodes' first moments alone, it calls {called} successes"
        if len(self._again) >= MIN_KNOWN:
            before, now, truth = np.array(self._again).T
            # once as they are, once by how far successes lie above failures
            for shift in (now - before, (now - before) * np.where(truth > 0, 1, -1)):
                error = float(shift.std(ddof=1)) / len(shift) ** 0.5
                if abs(shift.mean()) > max(_SHIFT_ERRORS * error, _LEAST_SHIFT):
                    what = f"{len(shift)} known items that were shown again score {abs(shift.mean()):.2f} otherwise"
                    yield 8, f"{what} than before the run: it is no longer the judge that was tried"
                    return

    def _above_known(self) -> tuple[float, float] | None:
        """Returns the probability that a new episode scores above a known success, ties counting half, and its lower
        bound; None without a full window or with few known successes.
        """
        known = [score for score, truth in self._known if truth]
        if len(known) < MIN_KNOWN or len(self._recent) < self._config.window:
            return None
        newest = [row[0] for row in self._recent]
        area = area_under_curve([*newest, *known], [True] * len(newest) + [False] * len(known))
        return area, area_interval(area, len(newest), len(known), CONFIDENCE)[0]

    def _kept_controls(self) -> tuple[tuple[int, int], ...]:
        """Returns how many controls keep their lead and how many there are: backwards, with another goal, and with the
        robot's movement alone.

        Only goals that a policy of this run could reach count, since a judge may well ignore others.
        """
        rows = np.array(self._controls).reshape(-1, _NUM_COLUMNS)
        straight, turned, other, unmoved, is_reachable, alone = rows.T
        elsewhere, robot = is_reachable > 0, np.isfinite(alone)
        return (
            kept_leads(straight, turned, unmoved),
            kept_leads(straight[elsewhere], other[elsewhere], unmoved[elsewhere]),
            kept_leads(straight[robot], alone[robot], unmoved[robot]),
        )

    def _bar(self) -> float:
        """Returns the score from which on a failure scores like a success: that of half of the known successes and of
        half of the newest ones, and at least the threshold.

        A judge that grades how near the goal is gives a near miss almost as much as a success, above any threshold
        between the two, and is right. A policy that fools its judge is paid as much for failures as for successes.
        """
        if not self.is_graded:
            return self.success_threshold
        successes = ([score for score, truth in rows if truth == 1] for rows in (self._known, self._recent))
        return max([self.success_threshold, *(float(np.median(some)) for some in successes if len(some) >= MIN_KNOWN)])


def _above(rows: Sequence[list[float]] | deque[list[float]], bar: float) -> tuple[int, int]:
    """Returns how many failures among `rows`, scores and truths, score `bar` or more, and the number of failures."""
    hits = [score >= bar for score, truth in rows if not truth]
    return sum(hits), len(hits)


def _area_interval(rows: Iterable[Sequence[float]], least: int = MIN_EPISODES) -> tuple[float, float] | None:
    """Returns the interval of the area under the curve of `rows` [N, 2], scores and truths; None with fewer than
    `least` successes or failures.
    """
    known = np.array([row for row in rows if row[1] != _UNKNOWN]).reshape(-1, 2)
    is_true = known[:, 1] > 0
    counts = int(is_true.sum()), int((~is_true).sum())
    if min(counts) < least:
        return None
    return area_interval(area_under_curve(known[:, 0], is_true), *counts, CONFIDENCE)


def _reshown(item: ScoringItem, moments: FloatArray, *, moves_hand: bool = False) -> ScoringItem:
    """Returns the item with other moments [L, S]; the hand's path is one point unless the hand still moves."""
    path = item.path if moves_hand or not len(item.path) else item.path[:1].repeat(len(item.path), axis=0)
    return replace(item, snapshots=moments, path=path)
