"""Watches a teacher of comparisons while a reward is learned from its labels: does it reward something else?

A judge that is right everywhere but near the goal teaches a policy to stay where it is liked best. Three symptoms show
it, all of them against the simulator's truth: clear labels that are wrong more often than at first, in some part of the
way; clear labels that were hardly right from the start; and evaluations whose learned return rises while the truth
falls. That success is reached and lost again is none of them: perfect labels do that too. A fourth needs no truth of
the run: known pairs of the preflight, compared again, that are right more seldom than at first.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core import metrics
from rlvlm.core.state import Stateful
from rlvlm.core.steps import Pair, Segment
from rlvlm.judges.agreement import average_ranks, has_risen, label_outcome, wilson_interval
from rlvlm.preferences.records import QueryRecord
from rlvlm.rewards.config import LabelMonitorConfig
from rlvlm.rewards.monitor import CONFIDENCE, MIN_EPISODES, Alarm

_PARTS = 5
"""Parts of the way; labels are counted for each part of the nearer side with each of the farther one."""
_MIN_LABELS = 10
"""Number of labels of two such parts below which no conclusion is drawn."""
_CONFIDENCE = 0.9995
"""Confidence of the interval of their share of wrong ones, 3.5 standard deviations: there are 15 pairs of parts."""
_EVALUATIONS = 8
"""Number of newest evaluations whose learned and true returns are compared."""
_OPPOSED = -0.75
"""Rank correlation of these from which learned and true return are opposed: of 8 unrelated pairs 1.5 % reach it."""


class LabelMonitor(Stateful):
    """Statistics of the newest clear labels against the first ones, and an alarm that stays once it is raised.

    Args:
        config: sizes and bounds.
    """

    # evaluations are left out: they are no part of training, and a checkpoint is the same with and without one
    STATE = ("_first", "_recent", "_known", "_again", "_alarm")

    def __init__(self, config: LabelMonitorConfig) -> None:
        self._config = config
        # [truth of the nearer side, gap in truth, whether the label is wrong] of decided labels
        self._first: list[list[float]] = []
        self._recent: deque[list[float]] = deque(maxlen=config.window)
        # [learned, true] return of each evaluation
        self._evaluations: deque[list[float]] = deque(maxlen=_EVALUATIONS)
        self._alarm = Alarm()
        # snapshots, paths and truth of known pairs; numbers of them that were right at first and now, and of all
        self._known: list[dict[str, Any]] = []
        self._again: list[int] = []

    @property
    def alarm(self) -> str:
        """Fault that was found; empty without one."""
        return self._alarm.text

    def note(self, records: Sequence[object]) -> None:
        """Takes answers; of them decided comparisons whose truth is known and no tie count.

        Raises:
            RewardHacked: there is an alarm, and `on_alarm` is stop.
        """
        for record in records:
            if not isinstance(record, QueryRecord) or record.correct is None:
                continue
            left, right = record.progress or record.returns
            row = [max(left, right), abs(right - left), float(not record.correct)]
            if len(self._first) < self._config.window // 4:  # before the policy gets where the judge may be wrong
                self._first.append(row)
            self._recent.append(row)
        self._alarm.check(self._found(), self._config.on_alarm)

    def expect(self, known: Sequence[dict[str, Any]]) -> None:
        """Takes known pairs: `snapshots` [2, S], `paths` (two, [P, S] each) and `truth` [2] of both sides."""
        self._known = list(known[: self._config.known_again])

    def known_pairs(self, session: int) -> list[Pair]:
        """Returns the known pairs if they are to be compared again in this session, else none."""
        if session % self._config.known_every:
            return []
        none = np.zeros((1, 0), np.float32)
        sides = [
            [
                Segment(
                    obs=none, actions=none, next_obs=none, snapshots=snapshot[None], path=path,
                    env_rewards=np.array([truth]), progress=np.array([truth]),
                )
                for snapshot, path, truth in zip(row["snapshots"], row["paths"], row["truth"], strict=True)
            ]
            for row in self._known
        ]  # fmt: skip
        return [Pair(left=left, right=right) for left, right in sides]

    def note_known(self, labels: Sequence[str]) -> None:
        """Takes the answers to `known_pairs`; the first ones are what later ones are held to."""
        gains = [float(right - left) for left, right in (row["truth"] for row in self._known)]
        right = sum(label_outcome(*each) == "right" for each in zip(labels, gains, strict=True))
        self._again = [self._again[0] if self._again else right, right, len(labels)]

    def note_evaluation(self, learned_return: float, true_return: float) -> None:
        """Takes the mean learned and true return of an evaluation; those that are not finite are left out."""
        if np.isfinite(learned_return) and np.isfinite(true_return):
            self._evaluations.append([float(learned_return), float(true_return)])

    def report(self) -> dict[str, float]:
        """Returns the newest figures by their names in `rlvlm.core.metrics`, without unknown ones."""
        if not self._recent:
            return {}
        figures = {metrics.JUDGE_ALARM: float(self._alarm.kind)}
        if self._again:
            before, now, count = self._again
            figures[metrics.JUDGE_KNOWN_SHIFT] = (now - before) / count
        clear = self._clear(self._recent)
        if len(clear):
            figures[metrics.JUDGE_CLEAR_RIGHT] = float(1 - clear[:, 2].mean())
        parts = [float(part[:, 2].mean()) for _, part in self._parts(clear) if len(part) >= _MIN_LABELS]
        return figures | ({metrics.JUDGE_WORST_PART: max(parts)} if parts else {})

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned, also that of a version without known pairs."""
        super().set_state({"known": [], "again": []} | state)

    def _clear(self, rows: Sequence[list[float]] | deque[list[float]]) -> NDArray[np.float64]:
        """Returns those of `rows` [N, 3] whose gap in truth is clear, as a share of the range of all labels kept.

        The first ones count too: of a policy that stays near the goal the newest sides are all alike, and an honest
        judge errs about small gaps.
        """
        found, kept = (np.array(each, np.float64).reshape(-1, 3) for each in (rows, [*self._first, *self._recent]))
        if not len(kept):
            return found
        # progress spans [0, 1] at the most; returns have any range
        span = max(float(kept[:, 0].max() - (kept[:, 0] - kept[:, 1]).min()), 1e-9)
        return found[found[:, 1] >= self._config.clear_gap * span]

    def _parts(self, clear: NDArray[np.float64]) -> Iterator[tuple[str, NDArray[np.float64]]]:
        """Yields name and rows of the clear labels whose sides lie in each two parts of the way."""
        if not len(clear):
            return
        nearer, farther = clear[:, 0], clear[:, 0] - clear[:, 1]
        edges = np.linspace(farther.min(), nearer.max(), _PARTS + 1)
        names = [f"{edges[part]:.2f} to {edges[part + 1]:.2f}" for part in range(_PARTS)]
        high, low = (
            np.clip(np.searchsorted(edges, side, side="right") - 1, 0, _PARTS - 1) for side in (nearer, farther)
        )
        for part in range(_PARTS):
            for other in range(part + 1):
                yield f"{names[part]} and {names[other]}", clear[(high == part) & (low == other)]

    def _found(self) -> Iterator[tuple[int, str]]:
        """Yields faults, each as a key of `metrics.JUDGE_ALARMS` and its evidence."""
        clear = self._clear(self._recent)
        wrong, count = int(clear[:, 2].sum()), len(clear)
        if count >= 3 * MIN_EPISODES:
            high = 1 - wilson_interval(wrong, count, CONFIDENCE)[0]
            if high < self._config.min_accuracy:
                bound = f"reward.monitor.min_accuracy is {self._config.min_accuracy:g}"
                yield 10, f"of {count} clear labels {count - wrong} are right, which is surely below the bound; {bound}"
        first = self._clear(self._first)
        first = first[np.argsort(first[:, 1], kind="stable")]
        # before that the newest labels include first ones
        if len(self._recent) > 2 * len(self._first) and len(first) >= MIN_EPISODES:
            for name, part in self._parts(clear):
                if len(part) < _MIN_LABELS:
                    continue
                # an honest judge errs more about smaller gaps, and a policy near its goal meets no others
                alike = int((first[:, 1] <= part[:, 1].max()).sum())
                before = first[: max(alike, MIN_EPISODES)]
                first_wrong, part_wrong = int(before[:, 2].sum()), int(part[:, 2].sum())
                low, _ = wilson_interval(part_wrong, len(part), _CONFIDENCE)
                _, first_high = wilson_interval(first_wrong, len(before), CONFIDENCE)
                if low > max(first_high, self._config.max_wrong):
                    what = f"of {len(part)} clear labels between sides at {name} {part_wrong} are wrong"
                    told = f"of the {len(before)} closest first ones {first_wrong}"
                    yield 9, f"{what}, {told}: it likes something better than the goal"
        yield from self._without_labels()

    def _without_labels(self) -> Iterator[tuple[int, str]]:
        """Yields faults that known pairs and evaluations show."""
        if self._again:
            before, now, count = self._again
            if has_risen((count - now, count), (count - before, count), CONFIDENCE):
                what = f"of {count} known pairs that were compared again {now} are right, and {before} were at first"
                yield 8, f"{what}: it is no longer the judge that was tried"
        if len(self._evaluations) == _EVALUATIONS:
            learned, true = np.array(self._evaluations).T
            if min(np.ptp(learned), np.ptp(true)) > 0:
                opposed = float(np.corrcoef(average_ranks(learned), average_ranks(true))[0, 1])
                if opposed < _OPPOSED:
                    what = f"in the last {_EVALUATIONS} evaluations the learned return rises where the truth falls"
                    yield 11, f"{what} (rank correlation {opposed:.2f})"
