"""Teachers that ask a person, who answers when there is time: a person alone, or beside a judge. Built by
`make_teacher`.

The run does not wait. A person's pending answers are `Deferred`; after every rollout the loop checks for new answers
(`asking.TeacherQueue.num_ready`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.judging import Query, Verdict
from rlvlm.core.steps import Frames, Pair, Trajectory
from rlvlm.envs.images import FrameStore
from rlvlm.judges.judge import PatientJudge
from rlvlm.labels.records import describe
from rlvlm.preferences.config import FeedbackConfig, MixedConfig
from rlvlm.preferences.teachers import Deferred, SimulatedTeacher, Teacher, build_teacher, draw_sides
from rlvlm.rewards.config import StepRewardConfig


class PersonTeacher(Teacher):
    """Defers every query to a person.

    Args:
        person: shows the queries to people, who answer in any order, at any time.
        frames: draws images at the judge's size.
        goal: goal in the queries.
        goal_picture: [1, H, W, 3] image of the reached goal to show; None shows none.
    """

    asks_person = True

    def __init__(self, person: PatientJudge, frames: FrameStore, goal: str, goal_picture: Frames | None = None) -> None:
        self._person = person
        self._frames = frames
        self._goal = goal
        self._goal_picture = goal_picture

    def answer(self, questions: Sequence[Pair]) -> list[Deferred]:
        return [Deferred() for _ in questions]

    def follow(self, questions: Sequence[Pair]) -> Callable[[], list[Verdict | None]]:
        sides = draw_sides(questions, self._frames)
        about = {"goal": self._goal, "goal_picture": self._goal_picture}
        queries = [Query(left=left, right=right, **about) for left, right in sides]
        self._person.ask(queries)
        # digests and not images are kept while the person takes time, which may be hours
        asked = [describe(query)[0] for query in queries]
        return lambda: self._person.find(asked)


class MixedTeacher(Teacher):
    """Asks a judge about every query, and a person about those on which the judge is least reliable.

    At most a `share` of a session waits for the person at any time, so that an absent person delays nothing.

    Args:
        judge: answers every query at once; its answers to the person's queries are not trained on.
        person: answers its queries, at once or later.
        config: share and budget of the person's queries.
    """

    asks_person = True
    STATE = ("_judge", "_person", "_num_asked", "_num_answered", "_seconds")

    def __init__(self, judge: Teacher, person: Teacher, config: MixedConfig) -> None:
        self._judge = judge
        self._person = person
        self._config = config
        self._num_asked = self._num_answered = 0
        """Number of queries put to the person, and number of answered ones."""
        self._seconds = 0.0
        """Total time of the person's answers, in seconds."""

    def inform(self, recent: Sequence[Trajectory]) -> None:
        for teacher in (self._judge, self._person):
            teacher.inform(recent)

    def answer(self, questions: Sequence[Pair]) -> list[Verdict | Deferred]:
        return self.prepare(questions)()

    def prepare(self, questions: Sequence[Pair]) -> Callable[[], list[Verdict | Deferred]]:
        ask = self._judge.prepare(questions)
        return lambda: self._defer(questions, ask())

    def follow(self, questions: Sequence[Pair]) -> Callable[[], Sequence[Verdict | None]]:
        return self._person.follow(questions)

    def note_used(self, answers: Sequence[Verdict]) -> None:
        self._num_answered += len(answers)
        self._seconds += sum(answer.latency_s for answer in answers)

    def _defer(self, questions: Sequence[Pair], verdicts: Sequence[Verdict]) -> list[Verdict | Deferred]:
        config, num_waiting = self._config, self._num_asked - self._num_answered
        num = math.ceil(config.share * len(questions)) - num_waiting
        num = max(min(num, config.max_answers - self._num_asked), 0)
        if self._seconds >= 60 * config.max_minutes or not num:
            return list(verdicts)
        disagreement = np.zeros(len(questions)) if self.disagreement is None else self.disagreement(questions)
        chosen = set(most_doubtful(verdicts, disagreement, num).tolist())
        self._num_asked += len(chosen)
        return [Deferred(verdict) if index in chosen else verdict for index, verdict in enumerate(verdicts)]


def most_doubtful(verdicts: Sequence[Verdict], disagreement: NDArray[np.float64], num: int) -> NDArray[np.int64]:
    """Returns the queries on which a judge is least reliable.

    Args:
        verdicts: [N] the judge's verdicts.
        disagreement: [N] disagreement of the reward model's members about each query.
        num: number of queries to return.

    Returns:
        [min(num, N)] indices: first the queries whose votes are split (the two orders disagree) or that have no label
        (unreadable or missing), then the others; within each group by falling disagreement, and among equals in the
        order in which they were drawn.
    """
    is_decided = [verdict.label is not None and not verdict.is_split for verdict in verdicts]
    return np.lexsort((-disagreement, np.array(is_decided)))[:num]


def make_teacher(
    reward: StepRewardConfig, feedback: FeedbackConfig, person: Teacher | None, *, seed: int, **options: Any
) -> Teacher:
    """Returns the teacher of a run, people included.

    Args:
        reward: names the teacher.
        feedback: weaknesses of simulated teachers, and the person's share for the teacher mixed.
        person: a `PersonTeacher`, if a real person is asked.
        seed: seed of chance and of simulated weaknesses.
        options: options of `build_teacher`: judge, frames, goal and task.

    Raises:
        ValueError, UsageError: as `build_teacher` does.
    """
    if reward.teacher == "mixed" and feedback.mixed.person == "simulated":
        # a separate stream, or a simulated judge and person would err about the same queries
        own_seed = int(np.random.SeedSequence(seed, spawn_key=(1,)).generate_state(1)[0])
        person = SimulatedTeacher(feedback.mixed.simulated, own_seed, "simulated person")
    if not reward.may_ask_person:
        return build_teacher(reward.teacher, seed=seed, feedback=feedback, **options)
    assert person is not None, "it has been checked"
    if reward.teacher == "human":
        return person
    judge = build_teacher(reward.first_teacher, seed=seed, feedback=feedback, **options)
    return MixedTeacher(judge, person, feedback.mixed)


def compares_progress(reward: StepRewardConfig, feedback: FeedbackConfig) -> bool:
    """Returns whether a teacher of the run needs an env that measures progress."""
    simulated = {"simulated": feedback.simulated} if reward.first_teacher == "simulated" else {}
    if reward.teacher == "mixed" and feedback.mixed.person == "simulated":
        simulated["person"] = feedback.mixed.simulated
    by_progress = any(config.truth == "progress" for config in simulated.values())
    return by_progress or reward.first_teacher in ("progress", "measured")
