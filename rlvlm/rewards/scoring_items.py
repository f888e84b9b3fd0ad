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
    """Goal in the question, e.g. `reach the green goal square`; empty if the run has one for all."""
    snapshots: FloatArray
    """[L, S] moments in order of time; the env draws them."""
    path: FloatArray = field(default_factory=lambda: NO_PATH)
    """[P, S] moments up to the last, along which the hand's path is drawn on its image; P = 0 for no path."""
    action: str = ""
    """For a turn, the action between the first and the last moment; empty if unreadable, and for episodes."""
    is_success: bool | None
    """Whether the env's own test holds at the last moment, or held before; None for a segment, which does not use
    it. The judge never sees it."""
    success_lost: bool = False
    """Whether the test held before and no longer does: then neither answer of a judge is an error."""
    progress: float
    """Simulator's progress at the last moment, in [0, 1]. The judge never sees it."""

    @property
    def key(self) -> bytes:
        """Key that is equal for the same moments with the same texts."""
        # the judge reads goal and action: other texts about the same moments are another question
        about = repr((self.goal, self.action, self.snapshots.shape)).encode()
        # and a path is another image
        moments = (np.ascontiguousarray(rows).tobytes() for rows in (self.snapshots, self.path))
        return hashlib.sha256(about + b"".join(moments)).digest()


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredItem:
    """An item and its score: a row of the score log."""

    item: ScoringItem
    score: Score
    env_step: int
    """Env steps done when the score was asked for."""
    timestamp: float
    """Unix time of the answer, seconds."""
    truth: float
    """True score by the simulator, on the scale of the score."""
    success_threshold: float | None = None
    """Score from which the judge is taken to call it a success; None if progress is scored and no success claimed."""
    group: int = 0
    """Group of episodes that are compared with each other; 0 for a turn, the session of the question for a segment."""
    index: int | None = None
    """Index of a segment in its session, from 0; None for a turn or an episode."""
    env_return: float = 0.0
    """True reward of the turn, or true return of the episode or segment."""
    used_step: int | None = None
    """Env steps done when the score of a segment was first trained on."""
