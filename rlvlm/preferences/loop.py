"""When a teacher is asked and what follows: draw, ask, record, store, fit. Made and called by the algorithm."""

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from rlvlm.core import metrics
from rlvlm.core.steps import Pair, Segment, Trajectory
from rlvlm.envs.env import StepEnv
from rlvlm.envs.images import FrameStore
from rlvlm.preferences.config import FeedbackConfig, RewardModelConfig
from rlvlm.preferences.dataset import sides_of
from rlvlm.preferences.losses import PREFERENCE, SCORE
from rlvlm.preferences.networks import reward_input
from rlvlm.preferences.queries import PairQueries, ScoreQueries
from rlvlm.preferences.records import FeedbackCounts, Record, record_answers
from rlvlm.preferences.reward_model import Disagreement, LearnedReward, RewardModel
from rlvlm.preferences.teachers import Teacher
from rlvlm.rewards.config import StepRewardConfig
from rlvlm.vlms.devices import pick_device

logger = logging.getLogger(__name__)

_IMAGE_BYTES = 600_000_000
"""Memory for images at the reward model's size, touched only as images come: a visible robot makes many."""
_LEARNING: dict[str, Any] = {"preference": (PairQueries, PREFERENCE), "score": (ScoreQueries, SCORE)}
"""By source: what is asked about, and what the answers say about rewards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """Questions put together at one point of the run, and what the teacher answered."""

    number: int
    """From 0."""
    env_steps: int
    """Env steps done when it was put together."""
    questions: list[Any]
    """Pairs to be compared, or segments to be scored."""
    num_look_alike: int
    """Questions that were drawn but not asked."""
    answers: list[Any] = field(default_factory=list)
    """One verdict per pair or score per segment, in order; none before it is answered."""
    wait_s: float = 0.0
    """How long the agent stood still for them, seconds."""


class TeacherQueue:
    """Has sessions answered: before the agent takes its next step, or while it learns on.

    Images are drawn at once, in the thread that owns the renderer; ahead, only the wait for a judge moves to another
    one, and a session is handed back when the next one is put. Answers are used at a fixed step, whenever they came,
    so a run does not depend on how fast the judge was.

    Args:
        teacher: answers.
        ahead: whether the agent learns on meanwhile.
    """

    def __init__(self, teacher: Teacher, *, ahead: bool) -> None:
        self._teacher = teacher
        self._ahead = ahead
        self._state_before = teacher.get_state()
        self._pending: tuple[Session, Future[list[Any]]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="teacher")

    @property
    def num_pending(self) -> int:
        """Queries asked and not handed back yet."""
        return 0 if self._pending is None else len(self._pending[0].questions)

    def put(self, session: Session) -> list[Session]:
        """Asks; returns this session, answered, or where it is asked ahead the one before it.

        Raises:
            JudgeUnavailable: the teacher answered nothing at all.
        """
        answered = self.finish()
        started = time.perf_counter()
        # a checkpoint made while the teacher answers holds this state and the questions, which are then asked again
        self._state_before = self._teacher.get_state()
        # drawing needs the renderer of this thread; only the wait may move to another one
        prepared = self._teacher.prepare(session.questions) if session.questions else lambda: []
        if not self._ahead:
            return [replace(session, answers=prepared(), wait_s=time.perf_counter() - started)]
        self._pending = session, self._thread.submit(prepared)
        return answered

    def finish(self) -> list[Session]:
        """The pending session, once it is answered; empty without one. Raises as `put` does."""
        if self._pending is None:
            return []
        session, future = self._pending
        started = time.perf_counter()
        answers = future.result()
        self._pending = None
        return [replace(session, answers=answers, wait_s=time.perf_counter() - started)]

    def get_state(self) -> dict[str, Any]:
        """The teacher's state before it was asked what is pending, and that as arrays `[N, S, L, ...]` of S sides."""
        if self._pending is None:
            return {"teacher": self._teacher.get_state(), "pending": []}
        session = self._pending[0]
        packed = {
            "number": session.number,
            "env_steps": session.env_steps,
            "num_look_alike": session.num_look_alike,
            "num_questions": len(session.questions),
            "sides": {
                column.name: np.array([[getattr(side, column.name) for side in sides_of(q)] for q in session.questions])
                for column in fields(Segment)
            },
        }
        return {"teacher": self._state_before, "pending": [packed]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; what was pending is asked again."""
        if self._pending is not None:  # a teacher that still answers would draw from the state that is restored
            wait([self._pending[1]])
        self._teacher.set_state(state["teacher"])
        self._pending = None
        for packed in state["pending"]:
            questions: list[Pair | Segment] = []
            for index in range(packed["num_questions"]):
                columns = {name: column[index] for name, column in packed["sides"].items()}
                num_sides = len(columns["obs"])
                sides = [Segment(**{name: each[side] for name, each in columns.items()}) for side in range(num_sides)]
                questions.append(sides[0] if num_sides == 1 else Pair(left=sides[0], right=sides[1]))
            about = {name: packed[name] for name in ("number", "env_steps", "num_look_alike")}
            self.put(Session(**about, questions=questions))


class FeedbackLoop:
    """Learns a reward from a teacher's answers while the agent learns from the reward.

    Source: Lee et al. 2021 (PEBBLE), arXiv:2106.05091, algorithm 1, lines 9-19; Wang et al. 2024 (RL-VLM-F),
    arXiv:2402.03681. Departures:

    1. Questions whose images show nothing new are drawn again before the teacher is asked, and cost no budget.
    2. A session that yields no label is no error: nothing is fitted, and the next one comes on schedule.
    3. With `FeedbackConfig.ahead` the answers of a session are used at the next one, those of the last at once.
    4. The teacher is not asked at the run's end, where nothing would train on the answers.

    Args:
        teacher: answers.
        queries: draws the questions and keeps the answers.
        model: fitted to them.
        config: when and about what the teacher is asked.
        seed: of the draws.
        total_steps: env steps of the run, at whose end the teacher is not asked; None where it has no end.
        has_progress: whether the env measures progress; else answers are held against true returns.
    """

    def __init__(
        self,
        *,
        teacher: Teacher,
        queries: PairQueries | ScoreQueries,
        model: RewardModel,
        config: FeedbackConfig,
        seed: int,
        total_steps: int | None = None,
        has_progress: bool = True,
    ) -> None:
        self._teacher = teacher
        self._has_progress = has_progress
        self._asking = TeacherQueue(teacher, ahead=config.ahead)
        self._queries: Any = queries
        self._model = model
        self._config = config
        self._rng = np.random.default_rng(seed)
        self._recent: deque[Trajectory] = deque(maxlen=config.recent_episodes)
        self._counts = FeedbackCounts()
        self._records: list[Record] = []
        self.num_sessions = 0
        """Sessions held so far."""
        self._next_step = config.first_step
        self._end = math.inf if total_steps is None else total_steps
        self.source = LearnedReward(model)
        self.disagreement = Disagreement(model)

    def add(self, trajectory: Trajectory) -> None:
        """Remembers a finished episode; the oldest beyond `recent_episodes` is forgotten."""
        self._recent.append(trajectory)

    def is_due(self, env_steps: int) -> bool:
        """Whether a session is to be held now: on schedule, within the budget, and with something to draw from."""
        has_budget = self._num_asked < self._config.max_queries
        # an agent that falls at once has only short episodes
        has_segments = any(len(trajectory) >= self._config.segment_steps for trajectory in self._recent)
        return self._next_step <= env_steps < self._end and has_budget and has_segments

    def steps_to_session(self, env_steps: int) -> int | None:
        """Env steps until the next one, >= 0; None where the budget or the run ends before."""
        if self._num_asked >= self._config.max_queries or self._next_step >= self._end:
            return None
        return max(self._next_step - env_steps, 0)

    def run_session(self, env_steps: int) -> dict[str, float]:
        """Holds a session and returns its metrics: counts and accuracy of the whole run, the rest of this session.

        Raises:
            JudgeUnavailable: the teacher does not answer or cannot be understood. The session stays due.
            NumericsError: the reward model's loss is not finite.
        """
        config, queries = self._config, self._queries
        # before the draw: thresholds of a simulated teacher are shares of what the present policy gets
        self._teacher.inform(self._recent)
        # the last session may be smaller: the budget is of the whole run
        wanted = min(config.queries, config.max_queries - self._num_asked)
        questions, num_look_alike = queries.draw(self._recent, wanted, self._rng)
        session = Session(
            number=self.num_sessions, env_steps=env_steps, questions=questions, num_look_alike=num_look_alike
        )
        answered = self._asking.put(session)
        # the first point of the schedule after now: points that went by without a session are not made up for
        periods = (env_steps - config.first_step) // config.every_steps + 1
        next_step = config.first_step + periods * config.every_steps
        if next_step >= self._end or self._num_asked >= config.max_queries:
            answered += self._asking.finish()  # no later session could use what this one asked ahead
        fitted: dict[str, float] = {}
        if self._store(answered):
            started = time.perf_counter()
            fitted = self._model.fit(queries.examples)
            fitted[metrics.REWARD_FIT_S] = time.perf_counter() - started
        else:
            logger.info("session %d brought no label that trains; the reward stays as it is", self.num_sessions)
        self.num_sessions += 1
        self._next_step = next_step
        wait_s = sum(each.wait_s for each in answered)
        return (
            self._counts.metrics()
            | {metrics.TEACHER_WAIT_S: wait_s, queries.count: float(len(queries.examples))}
            | fitted
        )

    def finish(self) -> None:
        """Waits for answers that are still to come and records them; nothing is fitted any more.

        Raises:
            JudgeUnavailable: as in `run_session`.
        """
        self._store(self._asking.finish())

    def drain_records(self) -> list[Record]:
        """The records since the last call. They are not part of the state: write them before saving it."""
        records, self._records = self._records, []
        return records

    def get_state(self) -> dict[str, Any]:
        """Everything that `set_state` needs to go on exactly; the episodes end to end, one array per field."""
        # one array per field for all episodes: a hundred small arrays each would make as many files in the archive
        columns = [column.name for column in fields(Trajectory) if column.name != "terminated"]
        recent = {
            "lengths": [len(episode) for episode in self._recent],
            "terminated": [int(episode.terminated) for episode in self._recent],
            "arrays": {name: np.concatenate([getattr(episode, name) for episode in self._recent]) for name in columns}
            if self._recent
            else {},
        }
        return {
            "rng": self._rng.bit_generator.state,
            "asking": self._asking.get_state(),
            "model": self._model.get_state(),
            "subject": self._queries.get_state(),
            "recent": recent,
            "tally": self._counts.get_state(),
            "num_sessions": self.num_sessions,
            "next_step": self._next_step,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned, in a loop built from the same configs; undrained records are gone."""
        self._rng.bit_generator.state = state["rng"]
        self._asking.set_state(state["asking"])
        self._model.set_state(state["model"])
        self._queries.set_state(state["subject"])
        ends = np.cumsum(state["recent"]["lengths"])[:-1].astype(int)
        parts = {name: np.split(array, ends) for name, array in state["recent"]["arrays"].items()}
        self._recent.clear()
        for index, terminated in enumerate(state["recent"]["terminated"]):
            columns = {name: part[index] for name, part in parts.items()}
            self._recent.append(Trajectory(**columns, terminated=bool(terminated)))
        self._counts.set_state(state["tally"])
        self._records = []
        self.num_sessions = int(state["num_sessions"])
        self._next_step = int(state["next_step"])

    @property
    def _num_asked(self) -> int:
        """Queries of the whole run, those still unanswered among them."""
        return self._counts.num_asked + self._asking.num_pending

    def _store(self, answered: Sequence[Session]) -> int:
        """Records and stores answers; returns how many of them train."""
        num_stored = 0
        for session in answered:
            num, num_asked = len(session.answers), len(session.questions)
            assert num == num_asked, f"a teacher owes one answer per question, got {num} of {num_asked}"
            records = record_answers(
                session.questions, session.answers, env_step=session.env_steps, session=session.number,
                timestamp=time.time(), has_progress=self._has_progress,
            )  # fmt: skip
            self._records += records
            self._counts.count(records, session.num_look_alike)
            num_stored += self._queries.add(session.questions, session.answers)
        return num_stored


def build_loop(
    env: StepEnv,
    teacher: Teacher,
    *,
    reward: StepRewardConfig,
    feedback: FeedbackConfig,
    reward_model: RewardModelConfig,
    seed: int,
    total_steps: int | None = None,
) -> FeedbackLoop:
    """A loop with a fresh reward model.

    Args:
        env: draws images; may be a training env, which is not disturbed.
        teacher: from `teachers.build_teacher`.
        reward: its source is one that learns, and says from what; its model what the ensemble looks at.
        feedback: when and about what the teacher is asked.
        reward_model: the ensemble.
        seed: of draws, weights and shuffling.
        total_steps: env steps of the run; None where it has no end.
    """
    make_queries, objective = _LEARNING[reward.source]
    image_bytes = 3 * reward_model.image_px**2
    frames = FrameStore(env, reward_model.image_px, max(_IMAGE_BYTES // image_bytes, 1))
    # two streams, so that a change of the draws leaves the weights as they were, and the other way round
    seeds = np.random.SeedSequence(seed).generate_state(2)
    inputs = reward_input(env, frames, reward, reward_model)
    model = RewardModel(
        inputs, reward_model, int(seeds[0]), objective, pick_device(reward_model.device, "reward-model")
    )
    queries = make_queries(frames, model, feedback)
    return FeedbackLoop(
        teacher=teacher,
        queries=queries,
        model=model,
        config=feedback,
        seed=int(seeds[1]),
        total_steps=total_steps,
        has_progress=env.has_progress,
    )
