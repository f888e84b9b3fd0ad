"""Pairs of segments that a teacher compares: a subject of the feedback loop."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlvlm.core import metrics
from rlvlm.core.judging import Verdict
from rlvlm.core.steps import Pair, Trajectory
from rlvlm.envs.images import FrameStore
from rlvlm.preferences.answers.sessions import Session
from rlvlm.preferences.config import FeedbackConfig
from rlvlm.preferences.dataset import Examples, decided
from rlvlm.preferences.model.reward_model import RewardModel
from rlvlm.preferences.questions.queries import draw_pairs, draw_until, look_alike
from rlvlm.preferences.questions.sampling import choose
from rlvlm.preferences.records import QueryRecord, record_queries


class Comparing:
    """Draws pairs of which both sides look different; keeps the decided ones.

    Args:
        frames: tells which snapshots look alike; any size will do.
        model: says which candidates are worth asking about, where `config.sampling` wants that.
        config: how pairs are drawn and what becomes of ties.
    """

    count = metrics.COMPARISONS

    def __init__(self, frames: FrameStore, model: RewardModel, config: FeedbackConfig) -> None:
        self._frames = frames
        self._model = model
        self._config = config
        self.examples = Examples(num_sides=2)

    def draw(self, recent: Sequence[Trajectory], num: int, rng: np.random.Generator) -> tuple[list[Pair], int]:
        """Up to `num` pairs worth asking about, and how many were drawn that look alike."""
        config = self._config
        pairs, num_look_alike = draw_until(
            num * config.pool_factor(self._model.num_fits),
            lambda wanted: draw_pairs(recent, wanted, config.segment_steps, rng),
            lambda drawn: look_alike(drawn, self._frames),
        )
        if len(pairs) > num:
            sides = [(pair.left, pair.right) for pair in pairs]
            chosen = choose(sides, num, sampling=config.sampling, ensemble=self._model.ensemble, known=self.examples)
            pairs = [pairs[place] for place in chosen]
        return pairs, num_look_alike

    def add(self, questions: Sequence[Pair], answers: Sequence[Verdict]) -> int:
        """Takes the labels that train; returns how many these are."""
        return self.examples.add(decided(questions, answers, self._config.ties))

    def record(self, session: Session, answers: Sequence[Verdict], timestamp: float) -> list[QueryRecord]:
        """The records of a session, in order."""
        return record_queries(
            session.questions, answers, env_step=session.env_steps, session=session.number, timestamp=timestamp
        )

    def get_state(self) -> dict[str, Any]:
        return {"examples": self.examples.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.examples.set_state(state["examples"])
