"""What an episode is worth: the env's own success, or what a judge says of its video, once per episode.

A score that a judge could not give is never replaced by the truth.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlvlm.algorithms.grpo.config import ScoreConfig
from rlvlm.errors import JudgeUnavailable
from rlvlm.judges.judge import Judge
from rlvlm.types.chunks import ChunkEpisode
from rlvlm.types.judging import Clip, Score, Status
from rlvlm.types.steps import FloatArray, Frames


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedEpisode:
    """A judge's answer about one episode, with the truth beside it, for the run's log."""

    episode: ChunkEpisode
    score: Score
    env_step: int
    """Env steps done when it was asked for."""
    timestamp: float
    """Unix time of the answer, seconds."""


class Scorer(Protocol):
    """Gives the scores that groups are compared by."""

    def score(self, episodes: Sequence[ChunkEpisode], env_step: int) -> FloatArray:
        """[B] one score for each episode; NaN where there is none, so that its group is dropped."""
        ...

    def drain_records(self) -> list[JudgedEpisode]:
        """The judge's answers since the last call."""
        ...


class SuccessScorer:
    """1 for a success, else 0: the env's own test."""

    def score(self, episodes: Sequence[ChunkEpisode], env_step: int) -> FloatArray:
        """[B]."""
        return np.array([episode.success for episode in episodes], np.float32)

    def drain_records(self) -> list[JudgedEpisode]:
        """Nobody is asked."""
        return []


class VideoScorer:
    """Has a judge look at frames of each episode, from its first moment to its last.

    Args:
        judge: asked once per episode, all episodes of a call together.
        draw: makes the frames of snapshots.
        config: how many frames, threshold, and what to do without an answer.
    """

    def __init__(self, judge: Judge, draw: Callable[[FloatArray, int], Frames], config: ScoreConfig) -> None:
        self._judge = judge
        self._draw = draw
        self._config = config
        self._records: list[JudgedEpisode] = []

    def score(self, episodes: Sequence[ChunkEpisode], env_step: int) -> FloatArray:
        """[B] in [0, 1], or 0 and 1 where there is a threshold.

        Raises:
            JudgeUnavailable: there is no answer about an episode, and the config says to stop then.
        """
        clips = [Clip(goal=episode.instruction, frames=self._frames(episode)) for episode in episodes]
        scores = self._judge.score(clips)
        self._records += [
            JudgedEpisode(episode=episode, score=score, env_step=env_step, timestamp=time.time())
            for episode, score in zip(episodes, scores, strict=True)
        ]
        return np.array([self._value(score) for score in scores], np.float32)

    def drain_records(self) -> list[JudgedEpisode]:
        """The answers since the last call."""
        records, self._records = self._records, []
        return records

    def _frames(self, episode: ChunkEpisode) -> Frames:
        """`num_frames` moments, evenly spread, the first and the last among them; fewer of a shorter episode."""
        count = min(self._config.num_frames, len(episode.snapshots))
        moments = np.linspace(0, len(episode.snapshots) - 1, count).round().astype(int)
        return self._draw(episode.snapshots[moments], self._config.frame_px)

    def _value(self, score: Score) -> float:
        config = self._config
        if score.status is Status.OK and score.value is not None:
            return score.value if config.threshold is None else float(score.value >= config.threshold)
        if config.without_answer == "stop":
            raise JudgeUnavailable(
                f"the judge gave no score for an episode: {score.status}",
                "look at the judge, then `rlvlm resume`; or choose --reward.without-answer drop_group",
            )
        return float("nan") if config.without_answer == "drop_group" else config.neutral
