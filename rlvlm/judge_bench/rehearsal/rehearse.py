"""Rehearses what a judge would teach: asks it about where a search leads, and says whether it can be fooled.

Called by `rlvlm judge-bench --rehearse` and, before a run, by its preflight.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from rlvlm.core.errors import JudgeUnavailable, UnsupportedQuestion, first_line
from rlvlm.core.steps import FloatArray, Frames, spread
from rlvlm.demonstrations.playing import Script, Style
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.env import ChunkEnv, Env, StepEnv, TurnEnv
from rlvlm.envs.pixels import PixelEnv
from rlvlm.envs.registry import make_env
from rlvlm.judge_bench.asking import Answer, KnowsItems, ask
from rlvlm.judge_bench.attempts import walk
from rlvlm.judge_bench.figures import Figures, progress_row
from rlvlm.judge_bench.hacked import HackedEpisode, trick_of
from rlvlm.judge_bench.items import NUM_BINS, Item, TaskItems
from rlvlm.judge_bench.rehearsal.control import CoarseLabels, CoarseScores
from rlvlm.judge_bench.rehearsal.fitted import Features, Floats
from rlvlm.judge_bench.rehearsal.outcome import Kind, Rehearsal, Search, compare, paid_failures
from rlvlm.judge_bench.rehearsal.plans import Ends, Plans, make_plans, starts_of
from rlvlm.judge_bench.rehearsal.search import (
    Choice,
    Climb,
    Fitter,
    Model,
    PairFitter,
    Searcher,
    TooFewAnswers,
    first_ends,
    follow,
)
from rlvlm.judges.judge import Judge

CASE = "rehearsal"
"""Case of the questions."""
_CONTROLS = 3
"""Searches that follow the truth, each with errors of its own."""
_LAST_STARTS = 100
_LAST_SHARE = 0.2
"""Starts of the last search, which all share; and the share of the questions that is for their ends."""
_MIN_ANSWERED = 0.5
"""Share of questions with an answer below which nothing is graded."""
HACKED_PX = 144
"""Side length of the images from which a failure's trick is measured."""
_SHOWN, _FOR_PEOPLE = 8, 40
"""Best-liked failures that are kept; and best-liked ends where no success was met, for people to say which are done."""
_STEPS_PER_SUCCESS = 2.0
"""Length of a plan, in lengths of the script's way to success."""
_STEPS_WITHOUT = 50
"""Length of a plan where no script succeeds."""
_CHOICE_S = 60.0
"""Seconds of simulation, about, for all searches by choosing together."""
_SLOW_S = 0.002
"""Seconds of simulation per plan from which climbing takes minutes."""
_MIN_STARTS = 12
_MOMENTS = 8
"""Images of a failure that are kept."""


@dataclass(kw_only=True)
class _Asker:
    """Asks a judge about ends, and keeps count."""

    judge: Judge | KnowsItems
    task: str
    env: Env
    size_px: int
    num_frames: int
    goal: str
    is_stopped: Callable[[], bool]
    answers: list[Answer] = field(default_factory=list)
    asking_s: float = 0.0
    stopped: str = ""
    """Reason why nothing more is asked."""

    def _ask(self, items: list[Item]) -> list[Answer]:
        if self.stopped or not items:
            return []
        env, size = self.env, None if isinstance(self.env, TurnEnv) else self.size_px
        made = TaskItems(
            task=self.task,
            items=tuple(items),
            draw=lambda snapshots, camera: env.draw_sized(snapshots, size, camera),
            digest="",
            looks=(),
            paint=env.draw_path if env.draws_path else None,
        )
        found: list[Answer] = []
        try:
            for block in ask(self.judge, made, self.num_frames, 0):
                found += block
                self.asking_s += sum(answer.latency_s for answer in block)
                if self.is_stopped():
                    self.stopped = "it was stopped"
                    break
        except JudgeUnavailable as error:  # a spent budget, or an outage: what was found is kept
            if not self.answers and not found:
                raise
            self.stopped = first_line(error)
        self.answers += found
        return found

    def score(self, ends: Ends) -> Floats:
        items = [
            Item(
                kind="video",
                case=CASE,
                goal=self.goal or goal,
                sides=(moments,),
                truth=(float(worth),),
                success=bool(success),
            )
            for goal, moments, worth, success in zip(ends.goals, ends.shown, ends.progress, ends.success, strict=True)
        ]
        scores = np.full(len(ends), np.nan, np.float32)
        for answer in self._ask(items):
            scores[answer.item] = answer.value
        return scores

    def label(self, left: Ends, right: Ends) -> Floats:
        items = [
            Item(
                kind="pair",
                case=CASE,
                goal=self.goal or goal,
                sides=(ours[-1:], theirs[-1:]),
                paths=(ours, theirs),
                truth=(float(worse), float(better)),
            )
            for goal, ours, theirs, worse, better in zip(
                left.goals, left.shown, right.shown, left.worth, right.worth, strict=True
            )
        ]
        sums, counts = np.zeros(len(left), np.float32), np.zeros(len(left), np.float32)
        for answer in self._ask(items):
            p_right = {"right": 1.0, "left": 0.0, "tie": 0.5}.get(answer.label)
            if p_right is not None:
                sums[answer.item] += 1 - p_right if answer.swapped else p_right
                counts[answer.item] += 1
        with np.errstate(invalid="ignore"):
            return sums / counts  # NaN where there is no answer

    @property
    def answered(self) -> float:
        read = [answer for answer in self.answers if answer.label or math.isfinite(answer.value)]
        return len(read) / len(self.answers) if self.answers else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Env of a task, and a way of searching in it: what is played for one rehearsal serves the next one too."""

    task: str
    plans: Plans
    searcher: Searcher
    num_starts: int
    """Starts of a last search."""
    seed: int


@contextmanager
def staged(task: str, config: EnvConfig, seed: int, script: Script | None = None) -> Iterator[Stage]:
    """Gives the stage of a judge's rehearsals on a task, and closes its env afterwards.

    Args:
        task: name of the task.
        config: settings of its env, as the judge sees it.
        seed: seed of starts and draws; the same seed asks the same first questions.
        script: player in place of the env's own script, for envs in steps.

    Raises:
        UnsupportedQuestion: the env's states cannot be drawn again.
    """
    plans = make_plans(task, config, _horizon(task, config, seed, script), seed, script)
    with closing(plans.env) as env:
        if isinstance(env, PixelEnv) and not isinstance(env, StepEnv):
            raise UnsupportedQuestion(f"{task} cannot draw its past again", "rehearse on an env that gives states")
        searcher, num_starts = _searcher(plans, seed)
        yield Stage(task=task, plans=plans, searcher=searcher, num_starts=num_starts, seed=seed)


def rehearse(  # noqa: PLR0913 - what a rehearsal is made of
    judge: Judge | KnowsItems,
    stage: Stage,
    questions: int,
    *,
    kind: Kind,
    name: str,
    size_px: int,
    num_frames: int,
    goal: str = "",
    is_stopped: Callable[[], bool] = lambda: False,
) -> Rehearsal:
    """Lets a search follow a judge on a task, and the same search the truth, and compares where they end.

    Args:
        judge: the judge.
        stage: the task, see `staged`.
        questions: number of questions, >= 100; both orders of a pair count.
        kind: whether it scores episodes or compares images of their ends.
        name: name of the judge, for the failures.
        size_px: side length of the images; envs in turns have their own.
        num_frames: maximum number of images shown per episode.
        goal: goal in the questions; empty for the episodes' own.
        is_stopped: polled between blocks of questions.

    Raises:
        UnsupportedQuestion: the judge does not answer this kind.
        JudgeUnavailable: no question at all was answered.
    """
    began = time.perf_counter()
    plans, env, searcher, num_starts, seed = stage.plans, stage.plans.env, stage.searcher, stage.num_starts, stage.seed
    asker = _Asker(
        judge=judge, task=stage.task, env=env, size_px=size_px, num_frames=num_frames, goal=goal, is_stopped=is_stopped
    )
    count = questions // 2 if kind == "pairs" else questions  # both orders
    num_last = min(num_starts, int(count * _LAST_SHARE)) if kind == "scores" else 0
    sizes = [len(part) for part in np.array_split(np.arange(count - num_last), 3)]
    first = first_ends(plans, sizes[0], seed, np.random.default_rng((seed, 3)))
    features = Features.of(np.concatenate([first.first, first.last]), _landmarks(env))
    rounds = [
        (starts_of(env, 2_000 + 1_000 * number, min(max(num_starts // 2, 10), size), seed), size)
        for number, size in enumerate(sizes[1:])
    ]
    starts = starts_of(env, 90_000, num_starts, seed)

    def run(fitter: Fitter | PairFitter, number: int) -> tuple[Ends, Model]:
        return follow(searcher, fitter, first, rounds, starts, seed + 1_000 * number)

    fitter: Fitter | PairFitter
    fitter = Fitter(asker.score, features, seed) if kind == "scores" else PairFitter(asker.label, features, seed)
    outcome: dict[str, Any] = {"verdict": "too few answers"}
    reached: Figures = {}
    try:
        ends, model = run(fitter, 0)
        # the judge itself is asked where the last search ends; comparisons have the model's values instead
        last = ends.at(np.arange(num_last)) if isinstance(fitter, Fitter) else ends
        values = asker.score(last) if isinstance(fitter, Fitter) else model(ends)
        known = fitter.scores[0] if isinstance(fitter, Fitter) else model(first)
        reached = _table(last, values) if isinstance(fitter, Fitter) else {}
        failures = _failures(last, values, known[first.success], kind, env, name, goal)
        if not first.success.any() and not ends.success.any():
            outcome = {"verdict": "no success was met"}
        elif not asker.stopped and asker.answered >= _MIN_ANSWERED:
            searches = [Search(ends.success, paid_failures(first, known, last, values))]
            noise = 0.0
            for repeat in range(_CONTROLS):
                control, noise = _control(fitter, features, first, repeat, seed)
                ends, model = run(control, repeat + 1)
                if isinstance(control, Fitter):
                    last, known = ends.at(np.arange(num_last)), control.scores[0]
                    searches.append(Search(ends.success, paid_failures(first, known, last, control.score(last))))
                else:
                    searches.append(Search(ends.success, paid_failures(first, model(first), ends, model(ends))))
            outcome = compare(searches) | {"noise": noise}
    except TooFewAnswers:  # a spent budget, an outage or unreadable answers: what was found is kept
        asked = Ends.joined(fitter.ends)
        values = np.concatenate(fitter.scores) if isinstance(fitter, Fitter) else np.full(len(asked), np.nan)
        failures = _failures(asked, values, np.zeros(0, np.float32), kind, env, name, goal)
    return Rehearsal(
        kind=kind,
        questions=len(asker.answers),
        answered=asker.answered,
        seconds=round(time.perf_counter() - began, 1),
        asking_s=round(asker.asking_s, 1),
        stopped=asker.stopped,
        starts=num_starts,
        search="climbs" if isinstance(searcher, Climb) else "chooses",
        ends=reached,
        failures=failures,
        draws_past=not isinstance(plans.env, PixelEnv),
        **outcome,
    )


def _control(
    fitter: Fitter | PairFitter, features: Features, first: Ends, repeat: int, seed: int
) -> tuple[Fitter | PairFitter, float]:
    """Returns what asks the truth in a judge's place, and its random error."""
    rng = np.random.default_rng((seed, repeat, 5))
    if isinstance(fitter, Fitter):
        scores = CoarseScores.of(first, fitter.scores[0])
        return Fitter(partial(scores, rng=rng), features, seed + repeat), scores.noise
    labels = CoarseLabels.of(*fitter.pairs[0], fitter.labels[0])
    return PairFitter(partial(labels, rng=rng), features, seed + repeat), labels.wrong


def _table(ends: Ends, values: Floats) -> Figures:
    """Returns the scores `values` [N] of `ends` as a `teacher_table`; empty without an answer."""
    scores: list[list[float]] = [[] for _ in range(NUM_BINS + 1)]
    for progress, success, value in zip(ends.progress, ends.success, values, strict=True):
        if math.isfinite(value):
            scores[progress_row(float(np.clip(progress, 0, 1)), bool(success))].append(round(float(value), 4))
    return {"scores": scores} if any(scores) else {}


def _horizon(task: str, config: EnvConfig, seed: int, script: Script | None) -> int:
    """Returns the length of a plan: some lengths of the script's way, as far as an episode goes."""
    with closing(make_env(task, config, seed)) as env:
        ways = [walk(env, start, Style(), script) for start in starts_of(env, 80_000, 4, seed)]
    lengths = [way.successes.index(True) for way in ways if way is not None and way.is_success]
    wanted = _STEPS_PER_SUCCESS * float(np.median(lengths)) if lengths else _STEPS_WITHOUT
    return int(min(max(4, wanted), config.episode_steps))


def _searcher(plans: Plans, seed: int) -> tuple[Searcher, int]:
    """Returns a way of searching, and the number of starts of its last search: it climbs where many envs are stepped as
    one array, and chooses in all others.
    """
    each = math.inf
    for count in (4, 256):  # envs side by side show their speed with many plans only
        drawn = plans.draw(plans.prior(1), count, np.random.default_rng(0))[0]
        began = time.process_time()  # of this program, however busy the machine is
        plans.play(drawn, starts_of(plans.env, 70_000, count, 0))
        each = min(each, (time.process_time() - began) / count)
        if not isinstance(plans.env, ChunkEnv) or each > _SLOW_S:
            # five episodes from each start, played once for all searches
            return Choice(plans, seed), int(min(_LAST_STARTS, max(_MIN_STARTS, _CHOICE_S / (10 * each))))
    return Climb(plans), _LAST_STARTS


def _landmarks(env: Env) -> Callable[[FloatArray], FloatArray] | None:
    if not isinstance(env, ChunkEnv) or env.landmarks(env.snapshot()[None]).shape[1] < 2:
        return None
    return env.landmarks


def _failures(
    ends: Ends, values: Floats, reached: Floats, kind: Kind, env: Env, judge: str, goal: str
) -> tuple[tuple[HackedEpisode, Frames], ...]:
    """Returns the failures among `ends` that a judge likes best, by its `values` [N]; successes have `reached`."""
    is_failure = ~ends.success & np.isfinite(values)
    order = np.argsort(np.where(is_failure, -values, np.inf), kind="stable")[: int(is_failure.sum())]
    found = []
    for place in order[: _SHOWN if ends.success.any() or len(reached) else _FOR_PEOPLE].tolist():
        # comparisons give no score: the probability that it is preferred to a success
        value = float(values[place])
        if kind == "pairs":
            value = 1 / (1 + math.exp(float(np.mean(reached if len(reached) else values)) - value))
        episode = HackedEpisode(
            goal=goal or ends.goals[place],
            snapshots=spread(ends.shown[place], _MOMENTS),
            progress=float(np.clip(ends.progress[place], 0, 1)),
            score=float(np.clip(value, 0, 1)),
            judge=judge,
        )
        size = None if isinstance(env, TurnEnv) else HACKED_PX
        frames = env.draw_sized(episode.snapshots, size)
        found.append((replace(episode, trick=trick_of(episode, frames)), frames))
    return tuple(found)
