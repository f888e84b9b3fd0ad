"""What an episode is worth: the env's own success, or what a judge says of its video, once per episode.

The algorithm hands episodes over as they are rolled out and asks for their scores afterwards: a judge looks at one part
of a rollout while the next is played. A score that a judge could not give is never replaced by the truth.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import numpy as np

from rlvlm.algorithms.grpo.config import ScoreConfig
from rlvlm.core import metrics
from rlvlm.core.chunks import ChunkEpisode
from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Score
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.rewards.monitor import JudgeMonitor, Preflight, check_judge
from rlvlm.rewards.scorers import Scorer
from rlvlm.rewards.scoring_items import ScoredItem, ScoringItem, spread

_HALF = 0.5
"""Scores from here on say that an episode is a success, where there is no threshold."""
_MOMENTS = 12
"""Of an episode at which a judge is asked how it stands, for a film."""


class EpisodeScorer(Protocol):
    """Gives the scores that groups are compared by."""

    def begin(self, episodes: Sequence[ChunkEpisode]) -> None:
        """Takes in some episodes of a rollout; whoever has to look may begin."""
        ...

    def collect(self, num_episodes: int, env_step: int) -> FloatArray:
        """[B] scores of the episodes that were taken in first and not collected; NaN where there is none, so that its
        group is dropped.

        Args:
            num_episodes: B, of whole calls of `begin`.
            env_step: env steps done when their rollout had been played.
        """
        ...

    def report(self) -> dict[str, float]:
        """The newest figures by their names in `rlvlm.core.metrics`."""
        ...

    def drain_records(self) -> list[ScoredItem]:
        """What was said since the last call."""
        ...

    def save_tree(self) -> dict[str, Any]:
        """Everything that an exact continuation needs."""
        ...

    def load_tree(self, tree: dict[str, Any]) -> None:
        """Restores what `save_tree` returned."""
        ...


class SuccessScorer:
    """1 for a success, else 0: the env's own test."""

    def __init__(self) -> None:
        self._waiting: list[bool] = []

    def begin(self, episodes: Sequence[ChunkEpisode]) -> None:
        """See `EpisodeScorer`."""
        self._waiting += [episode.success for episode in episodes]

    def collect(self, num_episodes: int, env_step: int) -> FloatArray:
        """[B]."""
        scores, self._waiting = np.array(self._waiting[:num_episodes], np.float32), self._waiting[num_episodes:]
        return scores

    def report(self) -> dict[str, float]:
        """The truth needs no watching."""
        return {}

    def drain_records(self) -> list[ScoredItem]:
        """Nobody is asked."""
        return []

    def save_tree(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_tree(self, tree: dict[str, Any]) -> None:
        """Nothing."""


class VideoScorer:
    """Has somebody score frames of each episode, from its first moment to its last, and is watched meanwhile.

    One thread asks, in the order in which it is told to: episodes as they come, and behind a rollout's episodes what
    the monitor has shown again, which nobody waits for before the next rollout has its scores.

    Args:
        scorer: a judge, or a control.
        config: how many frames, threshold, and what to do without an answer.
    """

    def __init__(self, scorer: Scorer, config: ScoreConfig) -> None:
        self._scorer = scorer
        self._config = config
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="episode-scores")
        self._waiting: deque[tuple[Sequence[ChunkEpisode], list[ScoringItem], Future[list[Score]]]] = deque()
        self._controls: Future[list[list[float]]] | None = None
        self._records: list[ScoredItem] = []
        self._facts: dict[str, float] = {}
        self._threshold = None if config.threshold == "calibrated" else config.threshold
        self.monitor = JudgeMonitor(config.monitor, _HALF if self._threshold is None else self._threshold)

    def begin(self, episodes: Sequence[ChunkEpisode]) -> None:
        """See `EpisodeScorer`."""
        items = [item_of(episode, self._config.num_frames) for episode in episodes]
        self._waiting.append((episodes, items, self._pool.submit(self._scorer.score, items)))

    def collect(self, num_episodes: int, env_step: int) -> FloatArray:
        """[B] in [0, 1], or 0 and 1 where there is a threshold.

        Raises:
            JudgeUnavailable: there is no answer about an episode, and the config says to stop then.
            RewardHacked: the judge is being fooled, and the config says to stop then.
        """
        began = time.monotonic()
        records: list[ScoredItem] = []
        while len(records) < num_episodes:
            episodes, items, answers = self._waiting.popleft()
            records += [
                ScoredItem(
                    item=item,
                    score=score,
                    env_step=env_step,
                    timestamp=time.time(),
                    truth=episode.progress,
                    claim=self.monitor.claim,
                    group=episode.group,
                    env_return=float(episode.env_rewards.sum()),
                )
                for episode, item, score in zip(episodes, items, answers.result(), strict=True)
            ]
        self._note_controls()
        self._facts = {metrics.REWARD_WAIT_S: time.monotonic() - began}
        self._records += records
        weight = self._config.success_weight
        scores = np.array([self._value(one.score) + weight * one.item.is_success for one in records], np.float32)
        scores /= 1.0 + weight
        told = [one.item for one in records], [one.score for one in records]
        self._controls = self._pool.submit(self.monitor.show_controls, self._scorer, *told)
        known = [(one.score.value, one.item) for one in records if one.score.value is not None]
        self.monitor.note(
            [value for value, _ in known], [None if shown.is_undone else shown.is_success for _, shown in known]
        )
        return scores

    def preflight_on(self, known: Sequence[ScoringItem]) -> Preflight:
        """How the judge tells episodes apart whose outcome is known; that calibrates the threshold where it is to be.

        Raises:
            JudgeUnavailable: it cannot tell them apart.
        """
        preflight = check_judge(self._scorer, known, self._config.monitor)
        if self._config.threshold == "calibrated":
            self._threshold = self.monitor.claim = preflight.threshold
        return preflight

    def measure_noise(self, known: Sequence[ScoringItem], scorer: Scorer) -> float:
        """Standard deviation of what an episode is worth by a judge's word, when it is asked again.

        Args:
            known: all of which are scored twice; those without an answer are left out. Scores that are cut to 0 or 1
                differ by less than others would.
            scorer: the judge, without a memory: an answer that it remembers tells nothing of its noise.

        Raises:
            JudgeUnavailable: there is no answer about an episode, and the config says to stop then.
        """
        first, again = (np.array([self._value(score) for score in scorer.score(known)]) for _ in range(2))
        return float(np.sqrt(np.nanmean((first - again) ** 2) / 2)) / (1.0 + self._config.success_weight)

    def follow(self, episode: ChunkEpisode) -> FloatArray:
        """[T] what is said of an episode that was played to its end, as it stood after each step: asked `_MOMENTS`
        times at most, evenly spread, and held in between. NaN where there is no answer.

        Raises:
            JudgeUnavailable: the judge does not answer.
        """
        steps = len(episode)
        moments = np.unique(np.linspace(1, steps, min(_MOMENTS, steps)).round().astype(int))
        items = [
            ScoringItem(
                goal=episode.instruction,
                snapshots=spread(episode.snapshots[: moment + 1], self._config.num_frames),
                is_success=episode.success and moment == steps,
                progress=episode.progress,
            )
            for moment in moments
        ]
        scores = self._pool.submit(self._scorer.score, items).result()
        values = np.array([math.nan if score.value is None else score.value for score in scores], np.float32)
        return values.repeat(np.diff(moments, append=steps + 1))

    def report(self) -> dict[str, float]:
        """How long the last rollout waited for its scores, and the monitor's figures."""
        return self._facts | self.monitor.report()

    def drain_records(self) -> list[ScoredItem]:
        """The answers since the last call."""
        records, self._records = self._records, []
        return records

    def save_tree(self) -> dict[str, Any]:
        """The monitor, and where a control's chance is; between rounds only controls may be under way."""
        self._note_controls()
        return {
            "monitor": self.monitor.save_tree(),
            "scorer": self._scorer.get_state(),
            "threshold": self._threshold,
            "claim": self.monitor.claim,
        }

    def load_tree(self, tree: dict[str, Any]) -> None:
        """Restores what `save_tree` returned; what is being asked is forgotten."""
        wait([answers for *_, answers in self._waiting])
        self._note_controls()
        self._waiting.clear()
        self._records = []
        self.monitor.load_tree(tree["monitor"])
        self._threshold, self.monitor.claim = tree["threshold"], float(tree["claim"])
        self._scorer.set_state(tree["scorer"])

    def _note_controls(self) -> None:
        """Has the monitor take in the controls that were shown last, once there are answers."""
        shown, self._controls = self._controls, None
        if shown is not None:
            self.monitor.note_controls(shown.result())

    def _value(self, score: Score) -> float:
        config = self._config
        if score.value is not None:
            return score.value if self._threshold is None else float(score.value >= self._threshold)
        if config.without_answer == "stop":
            raise JudgeUnavailable(
                f"the judge gave no score for an episode: {score.status}",
                "look at the judge, then `rlvlm resume`; or choose --reward.without-answer drop_group",
            )
        return math.nan if config.without_answer == "drop_group" else config.neutral


def shown_frames(frames: Frames, config: ScoreConfig) -> Frames:
    """What a judge sees of `frames` [N, H, W, 3] that an env drew: these, or flipped left to right."""
    return np.ascontiguousarray(frames[:, :, ::-1]) if config.flip_images else frames


def item_of(episode: ChunkEpisode, num_frames: int) -> ScoringItem:
    """What is shown of an episode: `num_frames` moments, the first and the last among them; fewer of a shorter one."""
    return ScoringItem(
        goal=episode.instruction,
        snapshots=spread(episode.snapshots, num_frames),
        is_success=episode.success,
        is_undone=episode.success and not episode.success_at_end,
        progress=episode.progress,
    )
