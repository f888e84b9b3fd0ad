"""The truth beside what a judge said directly: records of `judged` rewards. Drained by the algorithm."""

from rlvlm.core.steps import Trajectory
from rlvlm.envs.images import FrameStore
from rlvlm.preferences.questions.queries import cut
from rlvlm.preferences.records import ScoreRecord, record_scores
from rlvlm.rewards.judged import JudgedReward, TimedScore


class ScoreLog:
    """Waits until an episode ends that shows an image which was judged: only then is its true progress known.

    Nothing of it is part of a checkpoint. A run that goes on has its images judged again, from the label store, and
    so recorded again.

    Args:
        source: judges.
        frames: names images.
    """

    def __init__(self, source: JudgedReward, frames: FrameStore) -> None:
        self._source = source
        self._frames = frames
        self._waiting: dict[bytes, TimedScore] = {}
        self._episodes: list[Trajectory] = []

    def add(self, episode: Trajectory) -> None:
        """Takes in a finished episode."""
        self._episodes.append(episode)

    def drain(self, env_steps: int) -> list[ScoreRecord]:
        """The records of answers whose image was shown in an episode since the last call."""
        self._waiting |= self._source.drain_answers()
        records: list[ScoreRecord] = []
        for episode in self._episodes:
            for step, key in enumerate(self._frames.keys(episode.snapshots)):
                if key in self._waiting:
                    said = self._waiting.pop(key)
                    records += record_scores(
                        [cut(episode, step, 1)],
                        [said.score],
                        env_step=env_steps,
                        session=0,
                        timestamp=said.timestamp,
                        first_index=len(records),
                    )
        self._episodes.clear()
        return records
