"""`rlvlm.Watch`: a judge that is tried before anything is trained, and watched while it rewards in anybody's trainer.

    with rlvlm.Watch(judge, goal="open the drawer", suite=my_episodes) as watch:
        reward = watch.score(frames, truth=None)      # inside of a reward function
    watch.report("watch.html")

The preflight is the bench's, the alarms are those of our own runs (`rewards.monitor`).
"""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
from matplotlib.figure import Figure

from rlvlm.core.disk import write_whole
from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Clip, Score
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.demonstrations.trajectory import RobotTrajectory
from rlvlm.judge_bench.asking import asking_order
from rlvlm.judge_bench.bench import make_task
from rlvlm.judge_bench.items import TaskItems
from rlvlm.judge_bench.preflight import known_recordings, preflight
from rlvlm.judge_bench.suites import Suite, find_suite
from rlvlm.judges.client import Choices, ClipImages, Clips, Judge, Pairs, Scores, as_frames
from rlvlm.judges.config import Faulty
from rlvlm.judges.judge import Judge as JudgeProtocol
from rlvlm.pages.charts import ACCENT, INK, titled
from rlvlm.pages.page import Section, Table, page
from rlvlm.rewards.config import MonitorConfig
from rlvlm.rewards.monitor import JudgeMonitor
from rlvlm.rewards.scorers import JudgeScorer
from rlvlm.rewards.scoring_items import ScoringItem

MAX_PX = 512
"""Longer side to which images of known episodes are reduced, pixels."""
_OWN_CONTROLS = 8
"""Successes among episodes of one's own that are shown again as controls."""
_SEED = 0
"""Seed of the order of asking."""
_THRESHOLD = 0.5
"""Score from which the judge is taken to call an episode a success, where the preflight found no better one."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Figures of one batch of scored episodes."""

    num_scored: int
    score: float
    truth: float


class Watch:
    """Asks a judge for rewards, and raises an alarm as soon as the policy fools it. Safe to use from several threads.

    Args:
        judge: judge to ask.
        goal: goal of the episodes, unless `score` names another.
        suite: known answers for the preflight: what `judge-bench` takes (a frozen suite, a table of videos, a LeRobot
            data set, tasks), or a list of own episodes: frames [L, H, W, 3], whether it succeeded, and its goal if it
            has one of its own; a success has to end where it succeeds, because pieces of it are shown as failures. None
            skips it.
        faulty: `--judge.faulty` of a run: whether a judge with a fault that the preflight finds is refused.
        monitor: bounds of the alarms, and what an alarm does: `on_alarm` warn logs it, stop raises `RewardHacked`.
        every: episodes after which the newest are held against those before, and some are shown again as controls.
        num_frames: maximum number of images of a known episode that are shown.
    """

    def __init__(
        self,
        judge: Judge,
        goal: str = "",
        suite: str | Path | Sequence[tuple[ClipImages, bool] | tuple[ClipImages, bool, str]] | None = None,
        *,
        faulty: Faulty = "refuse",
        monitor: MonitorConfig | None = None,
        every: int = 32,
        num_frames: int = 8,
    ) -> None:
        if every < 1 or num_frames < 1:
            raise ValueError(f"every and num_frames must be >= 1, got {every} and {num_frames}")
        self._judge, self._goal, self._suite, self._faulty = judge, goal, suite, faulty
        self._every, self._num_frames = every, num_frames
        self._config = monitor or MonitorConfig()
        self._lock = threading.Lock()
        self._monitor: JudgeMonitor | None = None
        self._threshold = self._config.success_threshold or _THRESHOLD
        self._known: list[tuple[Clip, float, bool]] = []
        self._waiting: list[tuple[Clip, Score, bool | None]] = []
        self._batches: list[_Batch] = []
        self._counts = {"scored": 0, "without an answer": 0}
        self.findings: list[str] = []
        """What the preflight found, a line each; empty if it found no fault, or was skipped."""
        self.judge = WatchedJudge(self)
        """The watched judge, for adapters that take a `Judge`: what they ask is watched, without truth."""

    def __enter__(self) -> Self:
        """Asks about the known answers.

        Raises:
            JudgeRefused: the judge has a fatal fault, or one that a policy can exploit; `faulty` ok goes on.
            UsageError: the suite cannot be read, or has no success.
        """
        for made in self._known_items():
            asked = _Kept(self._judge.protocol)
            # a judge that rewards scores; pairs are for judges that compare
            made = _scored(made)
            figures = preflight(
                asked, made, self._num_frames, _SEED,
                min_auc=self._config.min_auc, refuses_faulty=self._faulty == "refuse", log=self.findings.append,
            )  # fmt: skip
            made.close()
            order = [made.items[index] for index, _ in asking_order(made, _SEED)["scores"]]
            self._known += [
                (clip, score.value, item.success)
                for item, (clip, score) in zip(order, asked.scored, strict=True)
                if score.value is not None and item.is_video and item.source < 0
            ]
            threshold = figures.get("threshold")
            if self._config.success_threshold is None and threshold is not None and 0 < threshold <= 1:
                self._threshold = float(threshold)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._look()

    def score(self, frames: ClipImages, truth: bool | None = None, goal: str = "") -> float | None:
        """Returns the judge's score of one episode in [0, 1]; None if there is no answer that can be read.

        Args:
            frames: the episode, [L, H, W, 3] of uint8 or a list of images.
            truth: whether it succeeded, if you know: it is held against the score and never changes it.
            goal: goal, if it is not the watch's.

        Raises:
            RewardHacked: there is an alarm, and the monitor's `on_alarm` is stop.
            JudgeUnavailable: the judge does not answer.
        """
        return self.score_all([frames], None if truth is None else [truth], goal).values[0]

    def score_all(self, clips: Clips, truths: Sequence[bool] | None = None, goal: str | Sequence[str] = "") -> Scores:
        """Returns what `Judge.score` does for [N] episodes at once; raises as `score`.

        Args:
            clips: [N] episodes.
            truths: [N] whether each succeeded; None: not known.
            goal: goal of all, or of each; empty for the watch's.
        """
        asked, answers = self._judge.ask_clips(clips, goal or self._goal)
        self._note(asked, answers, truths)
        return Scores.of(answers)

    @property
    def alarm(self) -> str:
        """What is wrong, with its figures; empty without an alarm."""
        return self._monitor.alarm if self._monitor else ""

    def figures(self) -> dict[str, float]:
        """Returns the newest figures by name, plain numbers for any logger: `judge/score`, `judge/alarm`...."""
        with self._lock:
            return self._monitor.report() if self._monitor else {}

    def report(self, path: str | Path) -> None:
        """Writes the judge's page of this run into one HTML file."""
        with self._lock:
            self._look()
        write_whole(Path(path), page("The judge of this run", self._sections()))

    def _known_items(self) -> list[TaskItems]:
        if self._suite is None:
            return []
        if isinstance(self._suite, str | Path):
            suite = find_suite(str(self._suite))
            return [make_task(suite, task, size_px=MAX_PX, seed=_SEED, asks_turns=False) for task in suite.tasks]
        films = [
            _film(number, frames, rest[0] if rest else self._goal, truth)
            for number, (frames, truth, *rest) in enumerate(self._suite)
        ]
        suite = Suite(
            name="own episodes", tasks=("own episodes",), pairs=0, videos=len(films), controls=_OWN_CONTROLS, tracks=0
        )
        made = known_recordings(suite, films, MAX_PX, _SEED)
        if not made.items:
            raise UsageError(
                "none of the known episodes succeeded, so any low score would be right", "add some successes"
            )
        return [made]

    def _note(self, asked: Sequence[Clip], answers: Sequence[Score], truths: Sequence[bool] | None) -> None:
        known: Sequence[bool | None] = [None] * len(asked) if truths is None else [bool(truth) for truth in truths]
        with self._lock:
            if self._monitor is None:
                config = replace(self._config, uses_truth=truths is not None)
                self._monitor = JudgeMonitor(config, self._threshold)
                self._monitor.expect([score for _, score, _ in self._known], [truth for *_, truth in self._known])
                self._config = config
            elif self._config.uses_truth != (truths is not None):
                raise UsageError(
                    "the truth is known about some episodes and not about others", "give it for all, or none"
                )
            self._counts["scored"] += len(answers)
            self._counts["without an answer"] += sum(answer.value is None for answer in answers)
            self._waiting += [each for each in zip(asked, answers, known, strict=True) if each[1].value is not None]
            if len(self._waiting) >= self._every:
                self._look()

    def _look(self) -> None:
        """Holds the episodes that wait against those before, and shows some of them again."""
        monitor, waiting = self._monitor, self._waiting
        if monitor is None or not waiting:
            return
        self._waiting = []
        scores = [score.value or 0.0 for _, score, _ in waiting]
        truths = [truth for *_, truth in waiting]
        truth = float(np.mean([bool(one) for one in truths])) if self._config.uses_truth else np.nan
        self._batches.append(_Batch(self._counts["scored"], float(np.mean(scores)), truth))
        clips = [clip for clip, *_ in waiting]
        items = [
            ScoringItem(
                goal=clip.goal,
                snapshots=np.array([(place, moment) for moment in range(len(clip.frames))], np.float32),
                is_success=truth,
                progress=0.0,
            )
            for place, (clip, _, truth) in enumerate(waiting)
        ]

        def draw(moments: FloatArray) -> Frames:
            return np.stack([clips[int(place)].frames[int(moment)] for place, moment in moments])

        if self._config.controls:
            # images of one call share a size, and episodes may not
            by_size = {clip.frames.shape[1:]: [] for clip in clips}
            for place, clip in enumerate(clips):
                by_size[clip.frames.shape[1:]].append(place)
            most = max(by_size.values(), key=len)
            scorer = JudgeScorer(self._judge.protocol, draw, remembers=False)
            chosen = [items[place] for place in most]
            monitor.note_controls(monitor.show_controls(scorer, chosen, [waiting[place][1] for place in most]))
        if self._known and self._config.known_again and len(self._batches) % self._config.known_every == 0:
            halves = [[each for each in self._known if each[2] is truth] for truth in (True, False)]
            again = [each for half in halves for each in half[: (self._config.known_again + 1) // 2]]
            now = self._judge.protocol.score([clip for clip, *_ in again])
            monitor.note_again(now, [score for _, score, _ in again], [truth for *_, truth in again])
        monitor.note(scores, truths)  # last: it may raise

    def _sections(self) -> list[Section]:
        alarm, figures = self.alarm, self._monitor.report() if self._monitor else {}
        said = "No alarm" if not alarm else "Alarm"
        first = Section(
            finding=f"{said} in {self._counts['scored']} episodes.",
            alerts=[alarm] if alarm else [],
            tiles={**self._counts, "known answers before": len(self._known)},
        )
        asked = "No fault was found." if self._known else "Nothing was asked before the run: no suite was named."
        before = Section(
            heading="Before the run",
            points=[("", line) for line in self.findings],
            notes=[] if self.findings else [asked],
        )
        rows = [(name, f"{value:.3g}") for name, value in figures.items()]
        return [
            first,
            before,
            Section(heading="While it rewarded", charts={"score and truth": self._chart()} if self._batches else {}),
            Section(heading="Newest figures", tables=[Table(heads=("figure", "value"), rows=rows)] if rows else []),
        ]

    def _chart(self) -> Figure:
        figure = titled(7.5, 3.2, "What the judge says, and what is true")
        axes = figure.subplots()
        at = [batch.num_scored for batch in self._batches]
        axes.plot(at, [batch.score for batch in self._batches], color=ACCENT, label="judge's score")
        if self._config.uses_truth:
            axes.plot(at, [batch.truth for batch in self._batches], color=INK, label="true success")
        axes.set(xlabel="episodes scored", ylim=(-0.02, 1.02))
        axes.legend()
        return figure


class WatchedJudge:
    """A `Judge` to its callers; what it is asked is watched."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def score(self, clips: Clips, goal: str | Sequence[str] = "") -> Scores:
        return self._watch.score_all(clips, None, goal)

    async def score_async(self, clips: Clips, goal: str | Sequence[str] = "") -> Scores:
        return await asyncio.to_thread(self._watch.score_all, clips, None, goal)

    def compare(self, pairs: Pairs, goal: str | Sequence[str] = "") -> Choices:
        return self._watch._judge.compare(pairs, goal or self._watch._goal)  # noqa: SLF001 - choices are not watched


class _Kept:
    """A judge that keeps what it was asked and said."""

    def __init__(self, judge: JudgeProtocol) -> None:
        self._judge, self.stamp = judge, judge.stamp
        self.compare = judge.compare
        self.scored: list[tuple[Clip, Score]] = []

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        scores = self._judge.score(clips)
        self.scored += zip(clips, scores, strict=True)
        return scores


def _scored(made: TaskItems) -> TaskItems:
    """Returns the items without pairs; controls keep pointing at their originals."""
    kept = [index for index, item in enumerate(made.items) if not item.is_pair]
    place = {index: number for number, index in enumerate(kept)}
    items = tuple(replace(item, source=place.get(item.source, -1)) for item in (made.items[index] for index in kept))
    return replace(made, items=items)


def _film(number: int, frames: ClipImages, goal: str, truth: bool) -> RobotTrajectory:
    images = as_frames(frames)
    nothing = np.zeros((len(images), 1), np.float32)
    return RobotTrajectory(
        name=f"episode {number}",
        file=Path("own episodes"),
        instruction=goal,
        actions=nothing,
        proprio=nothing,
        look=lambda moments: images[moments][:, None],
        success=bool(truth),
    )
