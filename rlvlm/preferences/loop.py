"""When a teacher is asked and what follows: draw, ask, record, store, fit. Called by the algorithm, made by `build`."""

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from rlvlm.core import metrics
from rlvlm.core.steps import Trajectory
from rlvlm.preferences.answers.sessions import Answered, Asking, AsyncLabelling, Session, SyncLabelling
from rlvlm.preferences.answers.teachers import InformedTeacher, Teacher
from rlvlm.preferences.config import FeedbackConfig
from rlvlm.preferences.dataset import Examples
from rlvlm.preferences.model.reward_model import RewardModel
from rlvlm.preferences.records import FeedbackCounts, Record
from rlvlm.preferences.source import Disagreement, LearnedReward

_ARRAYS = ("obs", "actions", "next_obs", "env_rewards", "snapshots", "progress", "success")

logger = logging.getLogger(__name__)


class Subject(Protocol):
    """What a loop asks about: `comparing` has pairs compared, `scoring` has single frames scored."""

    examples: Examples
    """What was said so far."""
    count: str
    """Metric with their number."""

    def draw(self, recent: Sequence[Trajectory], num: int, rng: np.random.Generator) -> tuple[list[Any], int]:
        """Up to `num` questions worth asking, and how many were drawn whose images tell nothing new."""
        ...

    def add(self, questions: Sequence[Any], answers: Sequence[Any]) -> int:
        """Takes answers into `examples`; returns how many of them train."""
        ...

    def record(self, session: Session, answers: Sequence[Any], timestamp: float) -> Sequence[Record]:
        """The records of a session, in order."""
        ...

    def get_state(self) -> dict[str, Any]:
        """Everything that `set_state` needs to go on exactly."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned."""
        ...


class FeedbackLoop:
    """Learns a reward from a teacher's answers while the agent learns from the reward.

    Source: Lee et al. 2021 (PEBBLE), arXiv:2106.05091, algorithm 1, lines 9-19; Wang et al. 2024 (RL-VLM-F),
    arXiv:2402.03681. Departures:

    1. Questions whose images tell nothing new are drawn again before anybody is asked, and cost no budget.
    2. A session that yields no label is no error: nothing is fitted, and the next one comes on schedule.
    3. With `FeedbackConfig.ahead` the answers of a session are used at the next one, those of the last at once.
    4. Nobody is asked at the run's end, where nothing would train on the answers.

    Args:
        teacher: answers.
        subject: what is asked about; keeps the answers.
        model: fitted to them.
        config: when and about what the teacher is asked.
        seed: of the draws.
        total_steps: env steps of the run, at whose end nobody is asked; None where it has no end.
    """

    def __init__(
        self,
        *,
        teacher: Teacher,
        subject: Subject,
        model: RewardModel,
        config: FeedbackConfig,
        seed: int,
        total_steps: int | None = None,
    ) -> None:
        self._teacher = teacher
        self._asking: Asking = AsyncLabelling(teacher) if config.ahead else SyncLabelling(teacher)
        self._subject = subject
        self._model = model
        self._config = config
        self._rng = np.random.default_rng(seed)
        self._recent: deque[Trajectory] = deque(maxlen=config.recent_episodes)
        self._counts = FeedbackCounts()
        self._records: list[Record] = []
        self._num_sessions = 0
        self._next_step = config.first_step
        self._end = math.inf if total_steps is None else total_steps
        self.source = LearnedReward(model)
        self.disagreement = Disagreement(model)

    @property
    def num_sessions(self) -> int:
        """Sessions held so far."""
        return self._num_sessions

    def add(self, trajectory: Trajectory) -> None:
        """Remembers a finished episode; the oldest beyond `recent_episodes` is forgotten."""
        self._recent.append(trajectory)

    def is_due(self, env_steps: int) -> bool:
        """Whether a session is to be held now: on schedule, within the budget, and with something to draw from."""
        has_budget = self._num_asked < self._config.max_queries
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
        if isinstance(self._teacher, InformedTeacher):
            self._teacher.inform(self._recent)
        wanted = min(self._config.queries, self._config.max_queries - self._num_asked)
        questions, num_look_alike = self._subject.draw(self._recent, wanted, self._rng)
        answered = self._asking.put(
            Session(number=self._num_sessions, env_steps=env_steps, questions=questions, num_look_alike=num_look_alike)
        )
        # The first point of the schedule after now: points that went by without a session are not made up for.
        periods = (env_steps - self._config.first_step) // self._config.every_steps + 1
        next_step = self._config.first_step + periods * self._config.every_steps
        if next_step >= self._end or self._num_asked >= self._config.max_queries:
            answered += self._asking.finish()  # no later session could use what this one asked ahead
        fitted: dict[str, float] = {}
        if self._take_in(answered):
            started = time.perf_counter()
            fitted = self._model.fit(self._subject.examples)
            fitted[metrics.REWARD_FIT_S] = time.perf_counter() - started
        else:
            logger.info("session %d brought no label that trains; the reward stays as it is", self._num_sessions)
        self._num_sessions += 1
        self._next_step = next_step
        wait_s = sum(session.wait_s for session in answered)
        told = {metrics.TEACHER_WAIT_S: wait_s, self._subject.count: float(len(self._subject.examples))}
        return self._counts.metrics() | told | fitted

    def finish(self) -> None:
        """Waits for answers that are still to come and records them; nothing is fitted any more.

        Raises:
            JudgeUnavailable: as in `run_session`.
        """
        self._take_in(self._asking.finish())

    def drain_records(self) -> list[Record]:
        """The records since the last call. They are not part of the state: write them before saving it."""
        records, self._records = self._records, []
        return records

    def get_state(self) -> dict[str, Any]:
        """Everything that `set_state` needs to go on exactly: dicts, lists, arrays, numbers and strings."""
        return {
            "rng": self._rng.bit_generator.state,
            "asking": self._asking.get_state(),
            "model": self._model.get_state(),
            "subject": self._subject.get_state(),
            "recent": _pack(self._recent),
            "tally": self._counts.get_state(),
            "num_sessions": self._num_sessions,
            "next_step": self._next_step,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned, in a loop built from the same configs; undrained records are gone."""
        self._rng.bit_generator.state = state["rng"]
        self._asking.set_state(state["asking"])
        self._model.set_state(state["model"])
        self._subject.set_state(state["subject"])
        self._recent = deque(_unpack(state["recent"]), maxlen=self._config.recent_episodes)
        self._counts.set_state(state["tally"])
        self._records = []
        self._num_sessions = int(state["num_sessions"])
        self._next_step = int(state["next_step"])

    @property
    def _num_asked(self) -> int:
        """Queries of the whole run, those still unanswered among them."""
        return self._counts.num_asked + self._asking.num_pending

    def _take_in(self, answered: Sequence[Answered]) -> int:
        """Records and stores answers; returns how many of them train."""
        num_stored = 0
        for one in answered:
            session, answers = one.session, one.answers
            num, num_asked = len(answers), len(session.questions)
            assert num == num_asked, f"a teacher owes one answer per question, got {num} of {num_asked}"
            records = self._subject.record(session, answers, time.time())
            self._records += records
            self._counts.count(records, session.num_look_alike)
            self._counts.check_teacher(answers)
            num_stored += self._subject.add(session.questions, answers)
        return num_stored


def _pack(trajectories: deque[Trajectory]) -> dict[str, Any]:
    """Trajectories end to end, one array per field."""
    if not trajectories:
        return {"lengths": [], "terminated": [], "arrays": {}}
    return {
        "lengths": [len(trajectory) for trajectory in trajectories],
        "terminated": [int(trajectory.terminated) for trajectory in trajectories],
        "arrays": {
            name: np.concatenate([getattr(trajectory, name) for trajectory in trajectories]) for name in _ARRAYS
        },
    }


def _unpack(packed: dict[str, Any]) -> list[Trajectory]:
    """The inverse of `_pack`."""
    cuts = np.cumsum(packed["lengths"])[:-1].astype(int)
    parts = {name: np.split(array, cuts) for name, array in packed["arrays"].items()}
    return [
        Trajectory(**{name: parts[name][at] for name in _ARRAYS}, terminated=bool(terminated))
        for at, terminated in enumerate(packed["terminated"])
    ]
