"""Source of an update's episodes: rolls them out, has them labelled, and drops groups that teach nothing."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from rlvlm.algorithms.policy_gradient.config import AdvantageConfig, PolicyGradientConfig
from rlvlm.algorithms.policy_gradient.images import StoredImages
from rlvlm.algorithms.policy_gradient.rewards import RewardLabeller, drop_unlabelled
from rlvlm.algorithms.training_stats import TrainingStats
from rlvlm.core import metrics
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.steps import FloatArray

Weights = Any
"""Weights for a rollout: as packed for an engine, or a version and the vector for env runners."""
Rollout = tuple[list[TokenEpisode], list[StoredImages]]
"""Episodes, grouped, and the images seen by their policy if it played in another process than the learner, which would
otherwise have to draw them again."""
Play = Callable[[Weights], Rollout]
"""Function that rolls out a policy with these weights and shows all turns to the labeller."""


class EpisodeSource:
    """Rolls out, has episodes labelled, and keeps useful ones.

    With a staleness of s, s rollouts are always running or waiting while the learner learns from the one before them:
    rollout k is played with the weights of update k - s, whichever is faster, so runs at a fixed seed repeat. Rollouts
    by engines or env runners continue in a thread meanwhile; those of this process are played at once, and only their
    scores are waited for later.

    Args:
        algo: how many groups an update needs, how often it may roll out for them, their maximum age, and which groups
            are useful.
        play: plays a rollout.
        pack: returns the weights for the next rollout; called by the training thread.
        labeller: rewards turns.
        is_compared: whether episodes are compared within groups.
        stats: counts steps and episodes, and stores metrics.
        plays_elsewhere: whether `play` does not use the policy of this process, so that it may be trained meanwhile.
    """

    def __init__(
        self,
        algo: PolicyGradientConfig,
        play: Play,
        pack: Callable[[], Weights],
        labeller: RewardLabeller,
        is_compared: bool,
        stats: TrainingStats,
        plays_elsewhere: bool,
    ) -> None:
        self._algo, self._play, self._pack = algo, play, pack
        self._labeller, self._is_compared, self._stats = labeller, is_compared, stats
        self._pool = ThreadPoolExecutor(1, "rollouts") if algo.staleness and plays_elsewhere else None
        self._under_way: deque[Future[tuple[Rollout, float]]] = deque()
        noise = algo.advantage.scorer_noise
        self.scorer_noise = 0.0 if noise == "measured" else noise
        """Standard deviation of an episode's score when the scorer is asked twice."""
        self.rollout_s = self.wait_s = 0.0
        """Seconds taken by the newest update's rollouts, and spent waiting for them."""
        self.images: list[StoredImages] = []
        """Images seen by policies elsewhere in the newest update's rollouts."""
        self.newest: list[TokenEpisode] = []
        """Episodes labelled last, before filtering."""

    def next(self) -> list[TokenEpisode]:
        """Returns episodes for the next update.

        Without staleness they are played by the present policy, and groups are rolled out until enough of them are
        useful, or `rounds` times.
        """
        self.rollout_s, self.wait_s, self.images = 0.0, 0.0, []
        if self._algo.staleness:
            # s more than the one that is taken now: the first call starts s + 1, later calls one for each that is taken
            while len(self._under_way) <= self._algo.staleness:
                self.begin()  # with the present weights, which will be `staleness` updates old
            return self._filtered(self.labelled(self.ended()))
        episodes: list[TokenEpisode] = []
        kept: list[TokenEpisode] = []
        for _ in range(self._algo.rounds if self._is_compared and not self._algo.rollout_turns else 1):
            self.begin()
            episodes += self.labelled(self.ended())
            # groups kept from earlier rounds stay: thresholds apply to single groups
            kept = self._filtered(episodes)
            if len(kept) >= self._algo.groups * self._algo.group_size:
                break
        return kept

    def rest(self) -> Iterator[list[TokenEpisode]]:
        """Yields the episodes of each rollout that is running or waits for its scores; afterwards none is left."""
        while self._under_way:
            self.images = []
            yield self._filtered(self.labelled(self.ended()))

    def forget(self) -> None:
        """Drops running rollouts, after they have ended: the player must not be in the middle of one."""
        while self._under_way:
            if not (rollout := self._under_way.popleft()).cancel():
                rollout.exception()

    def close(self) -> None:
        """Starts no more rollouts."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def begin(self) -> None:
        """Starts a rollout with the present weights: in the pool, or at once and in this thread."""
        weights = self._pack()  # here rather than in the pool, because the learner may change them next

        def played() -> tuple[Rollout, float]:
            began = time.monotonic()
            return self._play(weights), time.monotonic() - began

        if self._pool is not None:
            self._under_way.append(self._pool.submit(played))
        else:
            here: Future[tuple[Rollout, float]] = Future()
            here.set_result(played())  # at once, because the policy of this process may be trained next
            self._under_way.append(here)

    def ended(self) -> list[TokenEpisode]:
        """Returns the episodes of the oldest running rollout; they are counted from now on."""
        began = time.monotonic()
        (episodes, images), seconds = self._under_way.popleft().result()
        self.rollout_s += seconds
        self.wait_s += time.monotonic() - began if self._pool is not None else seconds
        self.images += images
        ended = [(episode.env_return, episode.is_success) for episode in episodes if episode.is_over]
        self._stats.record(sum(int(episode.steps.sum()) for episode in episodes), ended)
        return episodes

    def labelled(self, episodes: list[TokenEpisode]) -> list[TokenEpisode]:
        """Returns the episodes with their rewards; warns if these are all equal."""
        self.newest = self._labeller.label(episodes, self._stats.env_steps) if episodes else []
        # only whole episodes: pieces of an unfinished one would count its steps but not its return
        if over := [episode for episode in self.newest if episode.is_over]:
            given = {
                "step": [episode.rewards.ravel() for episode in over],
                "episode": [[episode.rewards.sum()] for episode in over],
            }
            together = {what: np.concatenate(rewards) for what, rewards in given.items()}
            self._stats.signal.check(together, len(over))
        return list(self.newest)

    def _filtered(self, episodes: list[TokenEpisode]) -> list[TokenEpisode]:
        """Returns the useful episodes; for a critic, those with known rewards. Metrics cover all of them."""
        if not episodes:
            return []
        known = drop_unlabelled(episodes)
        if not self._is_compared or self._algo.rollout_turns:
            kept = known
        else:
            kept = informative_groups(known, self._algo.advantage, self.scorer_noise)
        if not self._algo.rollout_turns:
            scores = np.array([episode.rewards.sum() for episode in episodes])
            over = [episode for episode in episodes if episode.is_over]
            num_groups, num_kept = (len({episode.group for episode in some}) for some in (episodes, kept))
            self._stats.note(
                {
                    metrics.GROUP_KEPT: num_kept / num_groups,
                    metrics.GROUP_SCORE: float(np.nanmean(scores)) if np.isfinite(scores).any() else 0.0,
                    metrics.TRAIN_EPISODE_RETURN: float(np.mean([episode.env_return for episode in over])),
                    metrics.TRAIN_EPISODE_SUCCESS: float(np.mean([episode.is_success for episode in over])),
                    metrics.TRAIN_SUCCESS_AT_END: float(
                        np.mean([episode.is_success and not episode.success_lost for episode in over])
                    ),
                }
            )
        return kept


def join(rollouts: Sequence[Rollout]) -> Rollout:
    """Joins the rollouts of several runners into one, in order."""
    episodes = [episode for episodes, _ in rollouts for episode in episodes]
    return episodes, [each for _, images in rollouts for each in images]


def informative_groups(
    episodes: Sequence[TokenEpisode], config: AdvantageConfig, scorer_noise: float
) -> list[TokenEpisode]:
    """Returns episodes of the useful groups: with a spread above `min_spread`, and above the scorer's noise.

    Departure: fixed bounds on the group's mean (RLinf, SimpleVLA-RL: success in [0.1, 0.9]) keep a group of failures
    that a continuous scorer rates 8, 10, 10 and 12 percent; division by its standard deviation would then train on
    noise at full strength.
    """
    scores: dict[int, list[float]] = {}
    for episode in episodes:
        scores.setdefault(episode.group, []).append(float(episode.rewards.sum(dtype=np.float64)))
    kept = {group for group, own in scores.items() if is_informative(np.array(own, np.float32), config, scorer_noise)}
    return [episode for episode in sorted(episodes, key=lambda episode: episode.group) if episode.group in kept]


def is_informative(scores: FloatArray, config: AdvantageConfig, scorer_noise: float) -> bool:
    """Returns whether episodes with `scores` [G] are useful, see `informative_groups`."""
    spread: np.floating = scores.max() - scores.min()
    std = scores.astype(np.float64).std(ddof=1) if len(scores) > 1 else 0.0  # of a sample, as noise is measured
    return bool(spread >= config.min_spread and std > config.noise_factor * scorer_noise)
