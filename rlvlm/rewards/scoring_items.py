"""Items that a judge scores, with the truth beside them for logs and monitors, and their scores."""

import hashlib
from dataclasses import dataclass, field

import numpy as np

from rlvlm.core.judging import Score
from rlvlm.core.steps import FloatArray

NO_PATH: FloatArray = np.empty((0, 0), np.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringItem:
    """One turn, one episode, or one segment whose progress is scored."""

    goal: str
    """Goal that the judge is asked about, e.g. `reach the green goal square`; empty where the run has one for all."""
    snapshots: FloatArray
    """[L, S] moments in order of time; the env draws them."""
    path: FloatArray = field(default_factory=lambda: NO_PATH)
    """[P, S] moments up to the last along which the path of the hand is drawn on its image; P is 0 where none is."""
    action: str = ""
    """Action between the first and the last moment, of a turn; empty where it could not be read, and of
    episodes."""
    is_success: bool | None
    """Whether the env's own test holds at the last moment, or held at one before it; None of a segment, where it is not
    used. The judge never sees it."""
    success_lost: bool = False
    """Whether it held before and no longer does: then neither answer of a judge is an error."""
    progress: float
    """The simulator's at the last moment, in [0, 1]. The judge never sees it."""

    @property
    def key(self) -> bytes:
        """Equal for questions about the same moments in the same words."""
        # goal and action are what the judge reads: other words about the same moments are another question
        about = repr((self.goal, self.action, self.snapshots.shape)).encode()
        # and a path is another image
        moments = (np.ascontiguousarray(rows).tobytes() for rows in (self.snapshots, self.path))
        return hashlib.sha256(about + b"".join(moments)).digest()


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredItem:
    """An item and what was said of it: a row of the score log."""

    item: ScoringItem
    score: Score
    env_step: int
    """Env steps done when it was asked for."""
    timestamp: float
    """Unix time of the answer, seconds."""
    truth: float
    """The true score by the simulator, on the scale of the score."""
    success_threshold: float | None = None
    """Scores from here on say that it is a success; None where progress is scored and nothing claimed."""
    group: int = 0
    """Group of episodes that are compared with each other; a turn's is 0, a segment's the session that asked about
    it."""
    index: int | None = None
    """Index of a segment in its session, from 0; None of a turn or an episode."""
    env_return: float = 0.0
    """True reward of the turn, or true return of the episode or segment."""
    used_step: int | None = None
    """Env steps done when the score of a segment began to train."""
