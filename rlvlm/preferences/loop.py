"""Sessions of a teacher: draw, ask, record, store, fit. Built and called by the algorithm."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core import metrics
from rlvlm.core.judging import Verdict
from rlvlm.core.state import Stateful
from rlvlm.core.steps import Pair, Trajectory
from rlvlm.envs.env import StepEnv
from rlvlm.envs.images import FrameStore
from rlvlm.preferences.asking import Session, TeacherQueue
from rlvlm.preferences.config import FeedbackConfig, RewardModelConfig
from rlvlm.preferences.losses import PREFERENCE, SCORE
from rlvlm.preferences.monitor import LabelMonitor
from rlvlm.preferences.networks import reward_input
from rlvlm.preferences.queries import Candidates, PairQueries, ScoreQueries, disagreement
from rlvlm.preferences.records import FeedbackCounts, Record, record_answers
from rlvlm.preferences.reward_model import Disagreement, LearnedReward, RewardModel
from rlvlm.preferences.teachers import Deferred, Teacher
from rlvlm.rewards.config import LabelMonitorConfig, StepRewardConfig
from rlvlm.vlms.devices import pick_device

logger = logging.getLogger(__name__)

_IMAGE_BYTES = 600_000_000
"""Memory for images at the reward model's size, used only as images come: a visible robot makes many."""
_LEARNING: dict[str, Any] = {"preference": (PairQueries, PREFERENCE), "score": (ScoreQueries, SCORE)}
"""For each source, its kind of queries and the objective of their answers."""


class FeedbackLoop(Stateful):
    """Learns a reward from a teacher's answers while the agent learns from the reward.

    Source: Lee et al. 2021 (PEBBLE), arXiv:2106.05091, algorithm 1, lines 9-19; Wang et al. 2024 (RL-VLM-F),
    arXiv:2402.03681. Departures:

    1. Questions whose images show nothing new are drawn again before the teacher is asked, and cost no budget.
    2. A session without a label is no error: nothing is fitted, and the next session comes on schedule.
    3. With `FeedbackConfig.ahead` the answers of a session are used at the next one, those of the last at once.
    4. The teacher is not asked at the run's end, since nothing would train on the answers.
    5. The run does not wait for a person. Answers are used once a tenth of a session has come, or all open ones; no
       session is drawn while `FeedbackConfig.queries` questions are open.

    Args:
        teacher: teacher to ask.
        queries: draws the questions and stores the answers.
        model: reward model fitted to the answers.
        config: schedule and choice of the queries.
        seed: seed of the draws.
        total_steps: env steps of the run, at whose end the teacher is not asked; None for an endless run.
        has_progress: whether the env measures progress; otherwise answers are compared with true returns.
    """

    STATE = ("_rng", "_asking", "_model", "subject=_queries", "tally=_counts", "monitor", "num_sessions", "_next_step")

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
        self.compare_anew: Callable[[Sequence[Pair]], Sequence[Verdict]] | None = None
        """Compares pairs without the teacher's memory, for those that the monitor knows; None compares none."""
        self.monitor = LabelMonitor(LabelMonitorConfig())
        """Watches the answers."""
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
        """Number of sessions so far."""
        self._next_step = config.first_step
        self._end = math.inf if total_steps is None else total_steps
        self.source = LearnedReward(model)
        self.disagreement = Disagreement(model)
        teacher.disagreement = self._disagreement

    def add(self, trajectory: Trajectory) -> None:
        """Adds a finished episode; drops the oldest beyond `recent_episodes`."""
        self._recent.append(trajectory)

    def is_due(self, env_steps: int) -> bool:
        """Returns whether to draw a session now, or to use answers of a person."""
        num_ready, config = self._asking.num_ready, self._config
        # a fit takes as long as some answers, so a few are used together; the last ones need not wait for more
        has_answers = num_ready >= max(config.queries // 10, 1) or 0 < num_ready == self._asking.num_open
        return self._draws(env_steps) or (has_answers and env_steps < self._end)

    def _draws(self, env_steps: int) -> bool:
        """Returns whether to draw questions now: on schedule, within the budget, with long enough episodes, and with
        fewer questions open for a person than a session has.
        """
        config = self._config
        has_room = self._num_asked < config.max_queries and self._asking.num_open < config.queries
        # an agent that falls at once has only short episodes
        has_segments = any(len(trajectory) >= config.segment_steps for trajectory in self._recent)
        return self._next_step <= env_steps < self._end and has_room and has_segments

    def steps_to_session(self, env_steps: int) -> int | None:
        """Returns the env steps until the next session; None if budget or run end before, or a person is behind."""
        is_full = self._num_asked >= self._config.max_queries or self._asking.num_open >= self._config.queries
        if is_full or self._next_step >= self._end:
            return None
        return max(self._next_step - env_steps, 0)

    def run_session(self, env_steps: int) -> dict[str, float]:
        """Draws a session if one is due, uses a person's new answers, and returns metrics: counts and accuracy of the
        whole run, the rest of this session.

        Raises:
            JudgeUnavailable: the teacher does not answer or cannot be understood. The session stays due.
            NumericsError: the reward model's loss is not finite.
        """
        queries, next_step, number = self._queries, self._next_step, self.num_sessions
        answered = []
        if self._draws(env_steps):
            answered, next_step = self._ask(env_steps)
            number += 1
        answered += self._asking.take()
        fitted: dict[str, float] = {}
        if self._store(answered, env_steps):
            started = time.perf_counter()
            fitted = self._model.fit(queries.examples)
            fitted[metrics.REWARD_FIT_S] = time.perf_counter() - started
        elif not self._asking.num_open:
            logger.info("session %d brought no label that trains; the reward stays as it is", self.num_sessions)
        self.num_sessions, self._next_step = number, next_step
        wait_s = sum(each.wait_s for each in answered)
        return (
            self._counts.metrics()
            | self._open_metrics()
            | {metrics.TEACHER_WAIT_S: wait_s, queries.count: float(len(queries.examples))}
            | self.monitor.report()
            | fitted
        )

    def _ask(self, env_steps: int) -> tuple[list[Session], int]:
        """Draws a session and asks the teacher; returns the answered sessions, and the step of the next one."""
        config, queries = self._config, self._queries
        # before the draw: thresholds of a simulated teacher are shares of the current policy's return
        self._teacher.inform(self._recent)
        if self.compare_anew is not None and (known := self.monitor.known_pairs(self.num_sessions)):
            self.monitor.note_known([verdict.label or "" for verdict in self.compare_anew(known)])
        # the last session may be smaller: the budget covers the whole run
        wanted = min(config.queries - self._asking.num_open, config.max_queries - self._num_asked)
        questions, num_look_alike = queries.draw(self._recent, wanted, self._rng)
        session = Session(
            number=self.num_sessions, env_steps=env_steps, questions=questions, num_look_alike=num_look_alike
        )
        answered = self._asking.put(session)
        # the next point of the schedule: points that passed without a session are not made up for
        periods = (env_steps - config.first_step) // config.every_steps + 1
        next_step = config.first_step + periods * config.every_steps
        if next_step >= self._end or self._num_asked >= config.max_queries:
            answered += self._asking.finish()  # no later session could use the answers
        return answered, next_step

    def finish(self, env_steps: int) -> dict[str, float]:
        """Waits for a judge's pending answers, and records them together with a person's new ones, without another fit.

        Logs the number of questions left to a person, and returns the metrics that this changes.

        Raises:
            JudgeUnavailable: as in `run_session`.
        """
        self._store(self._asking.finish() + self._asking.take(), env_steps)
        if self._asking.num_open:
            logger.warning("%d questions to a person were left unanswered", self._asking.num_open)
        return self._counts.metrics() | self._open_metrics() if self._teacher.asks_person else {}

    def drain_records(self) -> list[Record]:
        """Returns the records since the last call. They are not part of the state: write them before saving it."""
        records, self._records = self._records, []
        return records

    def get_state(self) -> dict[str, Any]:
        """Returns everything that `set_state` needs to continue exactly; episodes end to end, one array per field."""
        # one array per field for all episodes: hundreds of small arrays would make as many files in the archive
        columns = [column.name for column in fields(Trajectory) if column.name != "terminated"]
        recent = {
            "lengths": [len(episode) for episode in self._recent],
            "terminated": [int(episode.terminated) for episode in self._recent],
            "arrays": {name: np.concatenate([getattr(episode, name) for episode in self._recent]) for name in columns}
            if self._recent
            else {},
        }
        return super().get_state() | {"recent": recent}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned, in a loop built from the same configs; undrained records are lost."""
        # checkpoints of before have no monitor
        super().set_state({"monitor": self.monitor.get_state()} | state)
        ends = np.cumsum(state["recent"]["lengths"])[:-1].astype(int)
        parts = {name: np.split(array, ends) for name, array in state["recent"]["arrays"].items()}
        self._recent.clear()
        for index, terminated in enumerate(state["recent"]["terminated"]):
            columns = {name: part[index] for name, part in parts.items()}
            self._recent.append(Trajectory(**columns, terminated=bool(terminated)))
        self._records = []

    def _open_metrics(self) -> dict[str, float]:
        """Returns the number of open questions if a person is asked."""
        return {metrics.QUERIES_OPEN: float(self._asking.num_open)} if self._teacher.asks_person else {}

    def _disagreement(self, questions: Sequence[Any]) -> NDArray[np.float64]:
        """Returns [N] disagreements of the reward model's members about each question; 0 before the first fit."""
        if not self._model.num_fits or not questions:
            return np.zeros(len(questions))
        return disagreement(Candidates(questions, self._model.ensemble, self._queries.examples).returns)

    @property
    def _num_asked(self) -> int:
        """Queries of the whole run, including unanswered ones."""
        return self._counts.num_asked + self._asking.num_pending

    def _store(self, answered: Sequence[Session], env_steps: int) -> int:
        """Records and stores answers; returns how many of them are trained on, from `env_steps` on."""
        num_stored = 0
        for session in answered:
            num, num_asked = len(session.answers), len(session.questions)
            assert num == num_asked, f"a teacher owes one answer per question, got {num} of {num_asked}"
            given = [index for index, answer in enumerate(session.answers) if not isinstance(answer, Deferred)]
            part = session.part(given, [session.answers[index] for index in given])
            records = [replace(record, used_step=env_steps) for record in self._recorded(part)]
            self._records += records
            self._counts.count(records, session.num_look_alike, by_person=session.by_person)
            self.monitor.note(records)
            num_stored += self._queries.add(part.questions, part.answers)
            # a judge's answer to a query for a person is recorded, but not trained on
            deferred = {i: answer for i, answer in enumerate(session.answers) if isinstance(answer, Deferred)}
            firsts = {i: answer.first for i, answer in deferred.items() if answer.first is not None}
            self._records += self._recorded(session.part(list(firsts), list(firsts.values())))
        return num_stored

    def _recorded(self, session: Session) -> list[Record]:
        """Returns the records of a session's answers."""
        return record_answers(
            session.questions, session.answers, env_step=session.env_steps, session=session.number,
            timestamp=time.time(), indices=session.indices, has_progress=self._has_progress,
        )  # fmt: skip


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
    """Returns a loop with a new reward model.

    Args:
        env: draws images; may be a training env, which is not disturbed.
        teacher: from `teachers.build_teacher`.
        reward: source to learn, and kind of reward model.
        feedback: schedule and choice of the queries.
        reward_model: settings of the ensemble.
        seed: seed of draws, weights and shuffling.
        total_steps: env steps of the run; None for an endless run.
    """
    make_queries, objective = _LEARNING[reward.source]
    image_bytes = 3 * reward_model.image_px**2
    frames = FrameStore(env, reward_model.image_px, max(_IMAGE_BYTES // image_bytes, 1))
    # two streams, so that a change of the draws leaves the weights unchanged, and vice versa
    seeds = np.random.SeedSequence(seed).generate_state(2)
    inputs = reward_input(env, frames, reward, reward_model)
    model = RewardModel(
        inputs, reward_model, int(seeds[0]), objective, pick_device(reward_model.device, "reward-model")
    )
    queries = make_queries(frames, model, feedback)
    loop = FeedbackLoop(
        teacher=teacher,
        queries=queries,
        model=model,
        config=feedback,
        seed=int(seeds[1]),
        total_steps=total_steps,
        has_progress=env.has_progress,
    )
    loop.monitor = LabelMonitor(reward.monitor)
    return loop
