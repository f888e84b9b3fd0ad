"""Teachers: a judge that sees images, teachers that know the truth and err as people or judges do, and chance.

A question is a pair to compare, which is answered with a verdict, or a segment to score, with a score. All questions of
one call are of one kind. Built by `build_teacher`, asked by the loop.
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from rlvlm.core.errors import UsageError
from rlvlm.core.foreign import read_json, read_text
from rlvlm.core.judging import Clip, Label, Query, Score, Stamp, Status, Verdict
from rlvlm.core.references import check_call, is_reference, load_object
from rlvlm.core.state import Stateful
from rlvlm.core.steps import FloatArray, Frames, Pair, Segment, Trajectory
from rlvlm.envs.images import FrameStore
from rlvlm.judges.agreement import MIN_GAP
from rlvlm.judges.judge import Judge
from rlvlm.preferences.config import FeedbackConfig, SimulatedTeacherConfig, published_name, simulated_config
from rlvlm.preferences.dataset import sides_of
from rlvlm.rewards.config import TEACHERS

Question = TypeVar("Question", bound=Pair | Segment)
Given = TypeVar("Given", bound="Verdict | Score | Deferred")


@dataclass(frozen=True, slots=True)
class Deferred:
    """Placeholder for an answer that a person gives later, see `Teacher.follow`."""

    first: Verdict | None = None
    """Judge's answer, which is recorded and not trained on; None if no judge was asked."""


class Teacher(Stateful, Generic[Question, Given]):
    """Answers questions. A teacher of your own overrides `answer`, and what else it needs."""

    _stamp = Stamp(judge="teacher", revision="", prompt="", decoding="")
    """Stamp of the teacher in the records; `judge` is its name."""
    _rng: Any = None
    """Generator for the answers, if there is one; it is part of the state."""
    asks_person: bool = False
    """Whether answers may be deferred to a person."""
    disagreement: Callable[[Sequence[Question]], NDArray[np.float64]] | None = None
    """Function from N questions to the [N] disagreement of the reward model's members; set by the loop."""

    @classmethod
    def build(cls, *, judge: Judge | None, frames: FrameStore, goal: str, seed: int) -> Self:
        """Builds the teacher of a run; override this if it needs any of these arguments, see `build_teacher`."""
        return cls()

    def answer(self, questions: Sequence[Question], /) -> Sequence[Given]:
        """Returns one verdict per pair, or one score per segment, in order."""
        raise NotImplementedError(f"{type(self).__name__} needs a method answer(questions)")

    def prepare(self, questions: Sequence[Question], /) -> Callable[[], Sequence[Given]]:
        """Does at once what only this thread may do, and returns a function that gives the answers in any thread."""
        return partial(self.answer, questions)

    def follow(self, questions: Sequence[Question], /) -> Callable[[], Sequence[Given | None]]:
        """Puts the questions whose answers were `Deferred` to the person, and again after a restart.

        Called in the thread that may draw. Returns a function that is called repeatedly: it returns the answers so far,
        in order, and None for open questions.
        """
        return self.prepare(questions)

    def note_used(self, answers: Sequence[Given], /) -> None:
        """Notes deferred answers that are trained on from now on."""

    def prefer(self, margin: float) -> Verdict:
        """Returns the verdict of a teacher to whom the right side is better by `margin`; 0 is no preference."""
        return self.verdict(Label.of(0.0, margin))

    def verdict(self, label: Label, text: str = "") -> Verdict:
        """Returns the verdict with this label; a tie is no preference."""
        return Verdict(status=Status.of(label), label=label, stamp=self._stamp, text=text)

    def inform(self, recent: Sequence[Trajectory]) -> None:
        """Takes in the newest finished episodes, oldest first; called before every session."""

    def get_state(self) -> dict[str, Any]:
        """Returns the state that a restored teacher needs to give the same answers from here on."""
        own = {} if self._rng is None else {"rng": self._rng.bit_generator.state}
        return own | super().get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        if self._rng is not None:
            self._rng.bit_generator.state = state["rng"]


class JudgeTeacher(Teacher[Pair | Segment, Any]):
    """Draws the images, and asks a judge which side is closer to the goal, or how close one segment is.

    Args:
        judge: a local or served judge.
        frames: draws and caches images at the judge's size.
        goal: goal in the questions.
    """

    def __init__(self, judge: Judge, frames: FrameStore, goal: str) -> None:
        self._judge = judge
        self._frames = frames
        self._goal = goal

    def answer(self, questions: Sequence[Pair | Segment]) -> Sequence[Any]:
        return self.prepare(questions)()

    def prepare(self, questions: Sequence[Pair | Segment]) -> Callable[[], Sequence[Any]]:
        """Draws the images now, in the thread that owns the renderer, and returns a function that asks the judge."""
        sides = draw_sides(questions, self._frames)
        if sides.shape[1] == 1:
            return partial(self._judge.score, [Clip(goal=self._goal, frames=clip) for clip in sides[:, 0]])
        queries = [Query(goal=self._goal, left=left, right=right) for left, right in sides]
        return partial(self._judge.compare, queries)


def draw_sides(questions: Sequence[Pair | Segment], frames: FrameStore) -> Frames:
    """Returns images [N, S, L, H, W, 3] of N questions with S sides of L steps each, as shown to a judge."""
    snapshots = np.array([[side.snapshots for side in sides_of(question)] for question in questions])
    images = frames.frames(snapshots.reshape(-1, snapshots.shape[-1]))
    images = images.reshape(*snapshots.shape[:3], *images.shape[1:])
    for shown, question in zip(images, questions, strict=True):
        for clip, side in zip(shown, sides_of(question), strict=True):
            if len(side.path):
                clip[-1] = frames.paint_path(clip[-1], side.path)
    return images


class OracleTeacher(Teacher[Pair | Segment, Verdict | Score]):
    """Prefers the side with the larger true return; scores a segment by the true progress at its end.

    Source: Lee et al. 2021 (B-Pref), arXiv:2111.03026, sec. 3.1, the oracle. Departure: exactly equal returns are no
    preference, and not left.

    Args:
        by_progress: compares the true progress at the end, as a perfect judge of images would. The two are different
            truths: a return also counts what no image shows.
    """

    _stamp = Stamp(judge="oracle", revision="", prompt="", decoding="")

    def __init__(self, by_progress: bool = False) -> None:
        self._by_progress = by_progress

    def answer(self, questions: Sequence[Pair | Segment]) -> Sequence[Verdict | Score]:
        answers: list[Verdict | Score] = []
        for question in questions:
            if isinstance(question, Segment):
                progress = float(question.progress[-1])
                answers.append(Score(status=Status.OK, value=progress, stamp=self._stamp))
                continue
            left, right = (
                side.progress[-1] if self._by_progress else side.env_rewards.sum() for side in sides_of(question)
            )
            answers.append(self.prefer(float(right) - float(left)))
        return answers


class RandomTeacher(Teacher[Pair | Segment, Verdict | Score]):
    """Random labels, left or right, and random scores in [0, 1): the negative control, which must not teach anything.

    Args:
        seed: seed of the answers.
    """

    _stamp = Stamp(judge="random", revision="", prompt="", decoding="")

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def answer(self, questions: Sequence[Pair | Segment]) -> Sequence[Verdict | Score]:
        drawn = self._rng.random(len(questions))
        if questions and isinstance(questions[0], Segment):
            return [Score(status=Status.OK, value=float(value), stamp=self._stamp) for value in drawn]
        return [self.verdict(Label.RIGHT if value < 0.5 else Label.LEFT) for value in drawn]


class SimulatedTeacher(Teacher[Pair, Verdict]):
    """Compares true returns, or true progress, with the weaknesses of `config`, in the order skip, myopia, choice,
    mistake, equal, left.

    Every query takes two uniform draws whatever its answer, so that teachers with one seed differ by their weaknesses
    alone.

    Source: Lee et al. 2021 (B-Pref), arXiv:2111.03026, sec. 3.1 and 4. Departures:

    1. A threshold is a share of what a segment of the current policy is worth, and that share enters once. In B-Pref's
       code it enters twice from the second session on, so that a tenth becomes a hundredth.
    2. Two exactly equal returns are no preference for a perfectly rational teacher, where B-Pref calls them left.
    3. A skipped query is answered with no preference and the word `skipped`; B-Pref drops it. The combination with
       `FeedbackConfig.ties` equal is refused.
    4. `left` is a weakness of VLMs that prefer a side, not of people: it is not in B-Pref.
    5. With progress, a segment is worth the progress at its end.

    Args:
        config: weaknesses; without any this is the oracle.
        seed: seed of choice and mistakes.
        name: name in the records.
    """

    RECENT_EPISODES = 10
    """Number of episodes whose mean reward gives the worth of a segment of the current policy, as in B-Pref."""
    SKIPPED = "skipped: neither side is good enough to judge"
    STATE = ("_reward_per_step",)

    def __init__(self, config: SimulatedTeacherConfig, seed: int, name: str = "simulated") -> None:
        self._config = config
        self._rng = np.random.default_rng(seed)
        self._by_progress = config.truth == "progress"
        self._reward_per_step = 0.0
        names = ("mistake", "left", "beta", "gamma", "skip", "equal")
        weaknesses = " ".join(f"{name}={getattr(config, name):g}" for name in names)
        self._stamp = Stamp(judge=name, revision="", prompt="", decoding=weaknesses)

    def inform(self, recent: Sequence[Trajectory]) -> None:
        """Updates the mean reward of the current policy."""
        newest = list(recent)[-self.RECENT_EPISODES :]
        worth = [episode.progress if self._by_progress else episode.env_rewards for episode in newest]
        self._reward_per_step = float(np.concatenate(worth).mean(dtype=np.float64)) if worth else 0.0

    def prepare(self, pairs: Sequence[Pair]) -> Callable[[], list[Verdict]]:
        """Answers now: its estimate of the policy may change before another thread would answer."""
        verdicts = self.answer(pairs)
        return lambda: verdicts

    def answer(self, pairs: Sequence[Pair]) -> list[Verdict]:
        if not pairs:
            return []
        config = self._config
        if self._by_progress:  # a segment of one step whose reward is the progress
            rewards = np.array([(pair.left.progress[-1:], pair.right.progress[-1:]) for pair in pairs])
        else:
            rewards = np.array([(pair.left.env_rewards, pair.right.env_rewards) for pair in pairs])  # [N, 2, L]
        num_steps = rewards.shape[-1]
        left, right = rewards.sum(-1, dtype=np.float64).T  # [N] plain returns, for the thresholds
        average = self._reward_per_step * num_steps  # return of a segment of the current policy

        # myopia: step t of a segment weighs gamma^(L - 1 - t), so the end counts most
        weights = config.gamma ** np.arange(num_steps - 1, -1, -1)
        seen_left, seen_right = (side.astype(np.float64) @ weights for side in rewards.swapaxes(0, 1))
        gain = seen_right - seen_left
        if self._by_progress:
            gain[np.abs(gain) <= MIN_GAP] = 0  # rounding of positions where nothing moved
        # Bradley-Terry: P(right is preferred) = sigmoid(beta * gain); a rational teacher takes the larger return
        p_right = (np.sign(gain) + 1) / 2 if np.isinf(config.beta) else expit(config.beta * gain)

        # drawn for every pair, needed or not: teachers of one seed then differ by their weaknesses alone
        choice_draws, mistake_draws = self._rng.random((2, len(pairs)))
        says_right = (choice_draws < p_right) ^ (mistake_draws < config.mistake)
        is_tied = np.abs(right - left) < config.equal * average
        if np.isinf(config.beta):
            is_tied |= gain == 0
        is_skipped = (np.maximum(left, right) <= config.skip * average) & (config.skip * average > 0)
        # the largest draws choose the left side regardless; the smallest are mistakes, so no answer is both
        is_left = mistake_draws >= 1 - config.left
        verdicts = []
        for prefers_right, tied, skipped, biased in zip(says_right, is_tied, is_skipped, is_left, strict=True):
            if (skipped or tied) and not biased:
                verdicts.append(self.verdict(Label.TIE, self.SKIPPED if skipped else ""))
            else:
                verdicts.append(self.verdict(Label.RIGHT if prefers_right and not biased else Label.LEFT))
        return [replace(verdict, latency_s=config.seconds) for verdict in verdicts]


NUM_BINS = 10
"""Number of difficulty bins: equal parts of the gap in true progress; the first has the hardest pairs."""
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
    task: np.array([[float(share) for share in pair.split("/")] for pair in bins.split()], np.float32)
    for task, bins in _SHARES.items()
}
"""[10, 3] shares of correct, incorrect and undecided answers of a real VLM, in percent, smallest gaps first.

Source: RL-VLM-F, Wang et al. 2024, arXiv:2402.03681, and its website, read off the figure by eye (so sums may miss 100
by one or two). The VLM was Gemini-Pro-Vision, for the cloth GPT-4V, asked in two stages.
"""


def read_shares(path: Path, task: str = "") -> FloatArray:
    """Reads counts of correct, incorrect and undecided answers of a measured judge, smallest gaps first.

    Args:
        path: judge_report.csv of `rlvlm judge-report`, or bench.json of `rlvlm judge-bench`.
        task: task whose answers are taken from a bench; those of all tasks if it has none of this one.

    Returns:
        [10, 3]; for a bench [10, 2, 3], by whether the nearer side was shown on the left or on the right.

    Raises:
        ValueError: the file is missing, is about several judges, or lacks a column or a bin.
    """
    is_bench = path.suffix.lower() == ".json"  # of judge-bench; else of judge-report, which does not distinguish sides
    try:
        if is_bench:
            tables = read_json(path)["teacher"]
            shares = np.array(tables.get(task, tables["all"])["pairs"], np.float32)
            if shares.shape != (NUM_BINS, 2, 3):
                raise ValueError(f"counts of shape {shares.shape}")
        else:
            shares = _report_counts(path)
        if not (np.isfinite(shares).all() and (shares >= 0).all() and shares.any()):
            raise ValueError("it needs counts >= 0, and one that is not")
    except (OSError, KeyError, TypeError, ValueError, AttributeError, csv.Error, UnicodeDecodeError) as error:
        needed = (
            "rlvlm judge-bench writes one for a judge that compares"
            if is_bench
            else "it needs the columns bin (1 to 10), correct, incorrect, no_preference, invalid and failed, as "
            "judge_report.csv has them"
        )
        raise ValueError(
            f"feedback.measured {path} is no table of a judge's answers to pairs ({type(error).__name__}: {error}); "
            f"{needed}"
        ) from None
    return shares


def _report_counts(path: Path) -> FloatArray:
    rows = list(csv.DictReader(StringIO(read_text(path), newline="")))
    if len({row.get("source") for row in rows}) > 1:
        raise ValueError("it is about several judges; keep the rows of one")
    none = ("no_preference", "invalid", "failed")
    counts = {
        int(row["bin"]): [float(row["correct"]), float(row["incorrect"]), sum(float(row[name]) for name in none)]
        for row in rows
    }
    return np.array([counts[index + 1] for index in range(NUM_BINS)], np.float32)


class MeasuredTeacher(Teacher[Pair, Verdict]):
    """Compares true progress, and is right, wrong or undecided as often as a table says for gaps of that width.

    Every pair takes two uniform draws. A bin without measurements takes the shares of the whole table.

    Args:
        shares: [10, 3] correct, incorrect, undecided, in any unit, smallest gaps first; or [10, 2, 3], split by whether
            the nearer side is on the left or on the right, so that a preference for a side is imitated too.
        seed: seed of the draws.
        name: name of the measured judge.
    """

    def __init__(self, shares: FloatArray, seed: int, name: str) -> None:
        # without sides in the table the judge answers alike on both
        by_side = shares if shares.ndim == 3 else np.stack([shares, shares], axis=1)  # [10, 2, 3]
        # bins without measurements take the sum over all bins
        by_side = np.where(by_side.sum(2, keepdims=True) > 0, by_side, by_side.sum(0))
        by_side = by_side / by_side.sum(2, keepdims=True)
        self._ends = by_side.cumsum(2)
        # if neither side is nearer, a decided answer names the right one as often as among the hardest pairs
        decided, says_right = by_side[0, :, :2].sum(), by_side[0, 1, 0] + by_side[0, 0, 1]
        self._p_right = float(says_right / decided) if decided else 0.5
        self._rng = np.random.default_rng(seed)
        self._stamp = Stamp(judge=f"measured {name}", revision="", prompt="", decoding="")

    def answer(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """Returns one verdict per pair, in order; for equally near sides decided answers depend on chance alone."""
        verdicts = []
        for pair, (draw, side_draw) in zip(pairs, self._rng.random((len(pairs), 2)), strict=True):
            gain = float(pair.right.progress[-1] - pair.left.progress[-1])
            # one draw, compared with the cumulative shares: correct, wrong, undecided
            correct, decided, _ = self._ends[min(int(abs(gain) * NUM_BINS), NUM_BINS - 1), int(gain > 0)]
            says_right = side_draw < self._p_right if abs(gain) <= MIN_GAP else (gain > 0) == (draw < correct)
            verdicts.append(self.verdict(Label.TIE if draw >= decided else Label.RIGHT if says_right else Label.LEFT))
        return verdicts


def load_teacher(reference: str) -> type[Teacher]:
    """Returns the user's own teacher class that `my_file:NAME` refers to.

    Raises:
        UsageError: there is none, or it is no `Teacher`.
    """
    own = load_object(reference, "reward.teacher")
    if not (isinstance(own, type) and issubclass(own, Teacher)):
        fix = "derive it from rlvlm.preferences.teachers.Teacher"
        raise UsageError(f"reward.teacher {reference} is no Teacher", fix)
    if own.answer is Teacher.answer:
        raise UsageError(f"reward.teacher {reference} has no method answer", "give it answer(questions) -> answers")
    check_call(own.build, f"reward.teacher {reference}: build", by_name=("judge", "frames", "goal", "seed"))
    return own


def build_teacher(
    kind: str,
    *,
    judge: Judge | None,
    frames: FrameStore,
    goal: str,
    seed: int,
    task: str = "",
    feedback: FeedbackConfig | None = None,
) -> Teacher:
    """Returns the teacher that `StepRewardConfig.teacher` names.

    Args:
        kind: name of the teacher; `my_file:MyTeacher` is the user's own `Teacher`.
        judge: judge of the images; only a judge teacher needs one.
        frames: draws images at the judge's size.
        goal: goal in the questions.
        seed: seed of chance and of simulated weaknesses.
        task: task of the published table.
        feedback: weaknesses of a simulated teacher, table of a measured one; None takes the defaults.

    Raises:
        ValueError: a judge teacher has no judge, a table cannot be read, or a task was not published.
        UsageError: there is no such teacher of the user's own.
    """
    feedback = feedback or FeedbackConfig()
    if kind not in TEACHERS and is_reference(kind, "reward.teacher"):
        return load_teacher(kind).build(judge=judge, frames=frames, goal=goal, seed=seed)
    simulated = simulated_config(kind, feedback)
    if simulated is not None:
        return SimulatedTeacher(simulated, seed)
    made: dict[str, Callable[[], Teacher]] = {
        "published": lambda: MeasuredTeacher(SHARES[published_name(task)], seed, task),
        "measured": lambda: MeasuredTeacher(read_shares(Path(feedback.measured), task), seed, feedback.measured),
        "oracle": lambda: OracleTeacher(by_progress=False),
        "progress": lambda: OracleTeacher(by_progress=True),
        "random": lambda: RandomTeacher(seed),
    }
    if kind in made:
        return made[kind]()
    if judge is None:
        raise ValueError("a judge teacher needs a judge, got none; pass one, or choose teacher oracle or random")
    return JudgeTeacher(judge, frames, goal)
