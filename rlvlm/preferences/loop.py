"""When a teacher is asked and what follows: draw, ask, record, store, fit. Called by the algorithm."""

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from rlvlm import metrics
from rlvlm.envs.pictures import FrameStore
from rlvlm.envs.world import World
from rlvlm.preferences.config import FeedbackConfig, RewardModelConfig
from rlvlm.preferences.dataset import Comparisons
from rlvlm.preferences.networks import PictureInput, RewardInput, StateInput
from rlvlm.preferences.queries import draw_pairs, look_alike
from rlvlm.preferences.records import QueryRecord, Tally, record_queries
from rlvlm.preferences.reward_model import RewardModel
from rlvlm.preferences.sessions import Answered, AskAhead, AskAndWait, Asking, Session
from rlvlm.preferences.source import PreferenceReward
from rlvlm.preferences.teachers import InformedTeacher, Teacher
from rlvlm.types import Pair, Trajectory

_ROUNDS = 100
"""How often a session tries to replace pairs that look alike."""
_PICTURE_BYTES = 600_000_000
"""Memory for pictures at the reward model's size, touched only as pictures come: a visible robot makes many."""
_ARRAYS = ("obs", "actions", "next_obs", "env_rewards", "snapshots", "progress", "success")

logger = logging.getLogger(__name__)


class PreferenceLoop:
    """Learns a reward from comparisons while the agent learns from the reward.

    Source: Lee et al. 2021 (PEBBLE), arXiv:2106.05091, algorithm 1, lines 9-19; Wang et al. 2024 (RL-VLM-F),
    arXiv:2402.03681. Departures:

    1. Pairs that look alike are drawn again before anybody is asked, and cost nothing of the budget.
    2. A session that yields no label is no error: nothing is fitted, and the next one comes on schedule.
    3. With `FeedbackConfig.ahead` the answers of a session are used at the next one.

    Args:
        teacher: answers queries.
        frames: tells which snapshots look alike; any size will do.
        model: fitted to the answers.
        config: when and about what the teacher is asked.
        seed: of the draws.
    """

    def __init__(
        self, *, teacher: Teacher, frames: FrameStore, model: RewardModel, config: FeedbackConfig, seed: int
    ) -> None:
        self._teacher = teacher
        self._asking: Asking = AskAhead(teacher) if config.ahead else AskAndWait(teacher)
        self._frames = frames
        self._model = model
        self._config = config
        self._rng = np.random.default_rng(seed)
        self._comparisons = Comparisons(config.ties)
        self._recent: deque[Trajectory] = deque(maxlen=config.recent_episodes)
        self._tally = Tally()
        self._records: list[QueryRecord] = []
        self._num_sessions = 0
        self._next_step = config.first_step
        self.source = PreferenceReward(model)

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
        return env_steps >= self._next_step and has_budget and has_segments

    def run_session(self, env_steps: int) -> dict[str, float]:
        """Holds a session and returns its metrics: counts and accuracy of the whole run, the rest of this session.

        Raises:
            JudgeUnavailable: the teacher does not answer or cannot be understood. The session stays due.
            NumericsError: the reward model's loss is not finite.
        """
        if isinstance(self._teacher, InformedTeacher):
            self._teacher.inform(self._recent)
        pairs, num_look_alike = self._draw()
        answered = self._asking.put(
            Session(number=self._num_sessions, env_steps=env_steps, pairs=pairs, num_look_alike=num_look_alike)
        )
        num_stored = self._take_in(answered)
        fitted = self._fit(num_stored)
        self._schedule_next(env_steps)
        wait_s = sum(session.wait_s for session in answered)
        told = {metrics.TEACHER_WAIT_S: wait_s, metrics.COMPARISONS: float(len(self._comparisons))}
        return self._tally.metrics() | told | fitted

    def finish(self) -> None:
        """Waits for answers that are still to come and records them; nothing is fitted any more.

        Raises:
            JudgeUnavailable: as in `run_session`.
        """
        self._take_in(self._asking.finish())

    def drain_records(self) -> list[QueryRecord]:
        """The records since the last call. They are not part of the state: write them before saving it."""
        records, self._records = self._records, []
        return records

    def get_state(self) -> dict[str, Any]:
        """Everything that `set_state` needs to go on exactly: dicts, lists, arrays, numbers and strings."""
        return {
            "rng": self._rng.bit_generator.state,
            "asking": self._asking.get_state(),
            "model": self._model.get_state(),
            "comparisons": self._comparisons.get_state(),
            "recent": _pack(self._recent),
            "tally": self._tally.get_state(),
            "num_sessions": self._num_sessions,
            "next_step": self._next_step,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned, in a loop built from the same configs."""
        self._rng.bit_generator.state = state["rng"]
        self._asking.set_state(state["asking"])
        self._model.set_state(state["model"])
        self._comparisons.set_state(state["comparisons"])
        self._recent = deque(_unpack(state["recent"]), maxlen=self._config.recent_episodes)
        self._tally.set_state(state["tally"])
        self._num_sessions = int(state["num_sessions"])
        self._next_step = int(state["next_step"])

    @property
    def _num_asked(self) -> int:
        """Queries of the whole run, those still unanswered among them."""
        return self._tally.num_asked + self._asking.num_pending

    def _draw(self) -> tuple[list[Pair], int]:
        """Pairs worth asking about, as many as session and budget allow, and how many were drawn that look alike."""
        wanted = min(self._config.queries, self._config.max_queries - self._num_asked)
        pairs: list[Pair] = []
        num_drawn = 0
        for _ in range(_ROUNDS):
            drawn = draw_pairs(self._recent, wanted - len(pairs), self._config.segment_steps, self._rng)
            num_drawn += len(drawn)
            alike = look_alike(drawn, self._frames)
            pairs += [pair for pair, same in zip(drawn, alike, strict=True) if not same]
            if len(pairs) == wanted:
                break
        return pairs, num_drawn - len(pairs)

    def _take_in(self, answered: Sequence[Answered]) -> int:
        """Records and stores answers; returns how many of them train."""
        num_stored = 0
        for one in answered:
            session, verdicts = one.session, one.verdicts
            num, num_pairs = len(verdicts), len(session.pairs)
            assert num == num_pairs, f"a teacher owes one verdict per pair, got {num} of {num_pairs}"
            records = record_queries(session.pairs, verdicts, env_step=session.env_steps, session=session.number,
                                     timestamp=time.time())  # fmt: skip
            self._records += records
            self._tally.count(records, session.num_look_alike)
            self._tally.check_teacher(verdicts)
            num_stored += self._comparisons.add(session.pairs, verdicts)
        return num_stored

    def _fit(self, num_stored: int) -> dict[str, float]:
        """Fits the model when there are new labels."""
        if not num_stored:
            logger.info("session %d brought no label that trains; the reward stays as it is", self._num_sessions)
            return {}
        started = time.perf_counter()
        fitted = self._model.fit(self._comparisons)
        return fitted | {metrics.REWARD_FIT_S: time.perf_counter() - started}

    def _schedule_next(self, env_steps: int) -> None:
        """The next session comes at the first point of the schedule after `env_steps`."""
        self._num_sessions += 1
        periods = (env_steps - self._config.first_step) // self._config.every_steps + 1
        self._next_step = self._config.first_step + periods * self._config.every_steps


def _pack(trajectories: deque[Trajectory]) -> dict[str, Any]:
    """Trajectories end to end, one array per field."""
    if not trajectories:
        return {"lengths": [], "terminated": [], "arrays": {}}
    return {
        "lengths": [len(trajectory) for trajectory in trajectories],
        "terminated": [int(trajectory.terminated) for trajectory in trajectories],
        "arrays": {name: np.concatenate([getattr(trajectory, name) for trajectory in trajectories])
                   for name in _ARRAYS},
    }  # fmt: skip


def _unpack(packed: dict[str, Any]) -> list[Trajectory]:
    """The inverse of `_pack`."""
    cuts = np.cumsum(packed["lengths"])[:-1].astype(int)
    parts = {name: np.split(array, cuts) for name, array in packed["arrays"].items()}
    return [
        Trajectory(
            obs=parts["obs"][at],
            actions=parts["actions"][at],
            next_obs=parts["next_obs"][at],
            env_rewards=parts["env_rewards"][at],
            snapshots=parts["snapshots"][at],
            progress=parts["progress"][at],
            success=parts["success"][at],
            terminated=bool(terminated),
        )
        for at, terminated in enumerate(packed["terminated"])
    ]


def build_preference_loop(
    world: World,
    teacher: Teacher,
    *,
    feedback: FeedbackConfig,
    reward_model: RewardModelConfig,
    sees: Literal["image", "state"],
    seed: int,
) -> PreferenceLoop:
    """A loop with a fresh reward model.

    Args:
        world: draws pictures; may be a training env, which is not disturbed.
        teacher: from `teachers.build_teacher`.
        feedback: when and about what the teacher is asked.
        reward_model: the ensemble.
        sees: what the ensemble looks at, `RewardConfig.model`.
        seed: of draws, weights and shuffling.
    """
    frames = FrameStore(world, reward_model.picture_px, max(_PICTURE_BYTES // (3 * reward_model.picture_px**2), 1))
    inputs: RewardInput = PictureInput(frames, reward_model.picture_px)
    if sees == "state":
        obs_shape, action_shape = world.observation_space.shape, world.action_space.shape
        assert obs_shape is not None and action_shape is not None, "a World has box spaces"
        inputs = StateInput(obs_shape[0], action_shape[0])
    seeds = np.random.SeedSequence(seed).generate_state(2)
    model = RewardModel(inputs, reward_model, int(seeds[0]))
    return PreferenceLoop(teacher=teacher, frames=frames, model=model, config=feedback, seed=int(seeds[1]))
