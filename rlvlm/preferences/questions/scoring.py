"""Single frames that a judge scores: a subject of the feedback loop."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlvlm.core import metrics
from rlvlm.core.judging import Score, Status
from rlvlm.core.steps import Segment, Trajectory
from rlvlm.envs.images import FrameStore
from rlvlm.preferences.answers.sessions import Session
from rlvlm.preferences.config import FeedbackConfig
from rlvlm.preferences.dataset import Examples, scored
from rlvlm.preferences.model.reward_model import RewardModel
from rlvlm.preferences.questions.queries import cut
from rlvlm.preferences.questions.sampling import choose
from rlvlm.preferences.records import ScoreRecord, record_scores


class Scoring:
    """Draws frames whose image was not scored before; keeps those with a score.

    Source: the VLM Score baseline of Wang et al. 2024 (RL-VLM-F), arXiv:2402.03681. Departures: frames are drawn one by
    one, and not as pairs of which one side is thrown away; no image is scored twice, since a judge would say the
    same again, and each new image is as likely as any other, however often it was met.

    Args:
        frames: tells which snapshots look alike; any size will do.
        model: says which candidates are worth asking about, where `config.sampling` wants that.
        config: how frames are drawn.
    """

    count = metrics.SCORES

    def __init__(self, frames: FrameStore, model: RewardModel, config: FeedbackConfig) -> None:
        self._frames = frames
        self._model = model
        self._config = config
        self._asked: set[bytes] = set()
        self.examples = Examples(num_sides=1)

    def draw(self, recent: Sequence[Trajectory], num: int, rng: np.random.Generator) -> tuple[list[Segment], int]:
        """Up to `num` frames whose images are new, each image equally likely; nothing is drawn in vain (0)."""
        snapshots = np.concatenate([trajectory.snapshots for trajectory in recent])
        first, _ = self._frames.distinct(snapshots)
        names = self._frames.keys(snapshots[first])
        new = [row for row, name in zip(first, names, strict=True) if name not in self._asked]
        rows = rng.permutation(new)[: num * self._config.pool_factor(self._model.num_fits)].astype(np.int64)
        ends = np.cumsum([len(trajectory) for trajectory in recent])
        episodes = ends.searchsorted(rows, side="right")
        steps = rows - (ends - [len(trajectory) for trajectory in recent])[episodes]
        frames = [cut(recent[episode], int(step), 1) for episode, step in zip(episodes, steps, strict=True)]
        if len(frames) > num:
            sides = [(frame,) for frame in frames]
            chosen = choose(
                sides, num, sampling=self._config.sampling, ensemble=self._model.ensemble, known=self.examples
            )
            frames = [frames[place] for place in chosen]
        self._asked.update(self._keys(frames))
        return frames, 0

    def add(self, questions: Sequence[Segment], answers: Sequence[Score]) -> int:
        """Takes the scores that train, and returns how many these are; what was not answered may be asked again."""
        failed = [frame for frame, score in zip(questions, answers, strict=True) if score.status is Status.FAILED]
        self._asked.difference_update(self._keys(failed))
        return self.examples.add(scored(questions, answers))

    def record(self, session: Session, answers: Sequence[Score], timestamp: float) -> list[ScoreRecord]:
        """The records of a session, in order."""
        return record_scores(
            session.questions, answers, env_step=session.env_steps, session=session.number, timestamp=timestamp
        )

    def get_state(self) -> dict[str, Any]:
        asked = np.frombuffer(b"".join(sorted(self._asked)), np.uint8)
        asked = asked.reshape(len(self._asked), len(asked) // max(len(self._asked), 1))
        return {"examples": self.examples.get_state(), "asked": asked}

    def set_state(self, state: dict[str, Any]) -> None:
        self.examples.set_state(state["examples"])
        self._asked = {row.tobytes() for row in state["asked"]}

    def _keys(self, frames: Sequence[Segment]) -> list[bytes]:
        return self._frames.keys(np.concatenate([frame.snapshots for frame in frames])) if frames else []
