"""Source of an update's episodes: they are rolled out, labelled, and filtered for groups that teach something."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.algorithms.policy_gradient.config import AdvantageConfig, PolicyGradientConfig
from rlvlm.algorithms.policy_gradient.images import StoredImages
from rlvlm.algorithms.policy_gradient.rewards import RewardLabeller, drop_unlabelled
from rlvlm.algorithms.training_stats import TrainingStats
from rlvlm.core import metrics
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.steps import FloatArray

Weights = Any
"""Weights that a rollout is played with: as an engine packs them, or a version and the vector for env runners."""
Rollout = tuple[list[TokenEpisode], list[StoredImages]]
"""Episodes, those of a group being neighbours, and the images that their policy looked at, where it played in another
process than the learner, who would have to draw them again."""
Play = Callable[[Weights], Rollout]
"""A rollout by a policy of these weights, all of whose turns the labeller was shown."""


class EpisodeSource:
    """Rolls out, has episodes labelled, and keeps those that teach something.

    With a staleness of s, s rollouts are always under way or waiting while the learner learns from the one before them:
    rollout k is played with the weights of update k - s, whichever is faster, so runs at a fixed seed repeat. Rollouts
    that engines or env runners play go on in a thread meanwhile; those of this process are played at once, and only
    their scores are waited for later.

    Args:
        algo: how much an update wants, how often it is rolled out for it, how old it may be, and which groups teach
            something.
        play: plays a rollout.
        pack: the weights that the next rollout is to be played with; called by the thread that trains.
        labeller: says what turns are worth.
        is_compared: whether episodes are compared within groups.
        stats: counts steps and episodes, and takes the figures.
        plays_elsewhere: whether `play` leaves the policy of this process alone, so that it may be trained meanwhile.
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
        """Standard deviation of an episode's score by a scorer that is asked twice."""
        self.rollout_s = self.wait_s = 0.0
        """Seconds that the newest update's rollouts took, and that the learner waited for them."""
        self.images: list[StoredImages] = []
        """What a policy elsewhere has looked at in the newest update's rollouts."""
        self.newest: list[TokenEpisode] = []
        """The episodes that were labelled last, before filtering."""

    def next(self) -> list[TokenEpisode]:
        """Episodes for the next update.

        Without staleness they are played by the policy as it is now, and groups are rolled out until there are as many
        as wanted that teach something, or `rounds` times.
        """
        self.rollout_s, self.wait_s, self.images = 0.0, 0.0, []
        if self._algo.staleness:
            # s more than the one that is taken now: at the first call s + 1 are begun, then one for each that is taken
            while len(self._under_way) <= self._algo.staleness:
                self.begin()  # with the weights as they are now, which will be `staleness` updates old
            return self._filtered(self.labelled(self.ended()))
        episodes: list[TokenEpisode] = []
        kept: list[TokenEpisode] = []
        for _ in range(self._algo.rounds if self._is_compared and not self._algo.rollout_turns else 1):
            self.begin()
            episodes += self.labelled(self.ended())
            # groups that earlier rounds kept stay: thresholds look at one group at a time
            kept = self._filtered(episodes)
            if len(kept) >= self._algo.groups * self._algo.group_size:
                break
        return kept

    def rest(self) -> Iterator[list[TokenEpisode]]:
        """The episodes of each rollout that is under way or waits for its scores; afterwards none is left."""
        while self._under_way:
            self.images = []
            yield self._filtered(self.labelled(self.ended()))

    def forget(self) -> None:
        """Forgets what is on its way, once it has come to its end: the player must not be in the middle of it."""
        while self._under_way:
            if not (rollout := self._under_way.popleft()).cancel():
                rollout.exception()

    def close(self) -> None:
        """Begins nothing any more."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def begin(self) -> None:
        """Begins a rollout with the weights as they are now: in the pool, or at once and in this thread."""
        weights = self._pack()  # here and not in the pool: the learner may change them next

        def played() -> tuple[Rollout, float]:
            began = time.monotonic()
            return self._play(weights), time.monotonic() - began

        if self._pool is not None:
            self._under_way.append(self._pool.submit(played))
        else:
            here: Future[tuple[Rollout, float]] = Future()
            here.set_result(played())  # at once, as the policy of this process may be trained next
            self._under_way.append(here)

    def ended(self) -> list[TokenEpisode]:
        """The episodes of the oldest rollout under way; they count from now on."""
        began = time.monotonic()
        (episodes, images), seconds = self._under_way.popleft().result()
        self.rollout_s += seconds
        self.wait_s += time.monotonic() - began if self._pool is not None else seconds
        self.images += images
        ended = [(episode.env_return, episode.is_success) for episode in episodes if episode.is_over]
        self._stats.record(sum(int(episode.steps.sum()) for episode in episodes), ended)
        return episodes

    def labelled(self, episodes: list[TokenEpisode]) -> list[TokenEpisode]:
        """The episodes with their rewards; warns where these are all the same."""
        self.newest = self._labeller.label(episodes, self._stats.env_steps) if episodes else []
        # whole episodes alone: pieces of one that goes on would count its steps, but not its return
        if over := [episode for episode in self.newest if episode.is_over]:
            given = {
                "step": [episode.rewards.ravel() for episode in over],
                "episode": [[episode.rewards.sum()] for episode in over],
            }
            together = {what: np.concatenate(rewards) for what, rewards in given.items()}
            self._stats.signal.check(together, len(over))
        return list(self.newest)

    def _filtered(self, episodes: list[TokenEpisode]) -> list[TokenEpisode]:
        """Those that teach something; to a critic, all whose rewards are known. The figures are of all of them."""
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
    """One rollout of those of several runners, in their order."""
    episodes = [episode for episodes, _ in rollouts for episode in episodes]
    return episodes, [each for _, images in rollouts for each in images]


def informative_groups(
    episodes: Sequence[TokenEpisode], config: AdvantageConfig, scorer_noise: float
) -> list[TokenEpisode]:
    """Episodes of those groups that teach something: a spread above `min_spread`, and above what noise explains.

    Departure: fixed bounds on the group's mean (RLinf, SimpleVLA-RL: success in [0.1, 0.9]) keep a group of failures
    that a continuous scorer calls 8, 10, 10 and 12 percent; division by its standard deviation would then train on
    noise at full strength.
    """
    scores: dict[int, list[float]] = {}
    for episode in episodes:
        scores.setdefault(episode.group, []).append(float(episode.rewards.sum(dtype=np.float64)))
    kept = {group for group, own in scores.items() if is_informative(np.array(own, np.float32), config, scorer_noise)}
    return [episode for episode in sorted(episodes, key=lambda episode: episode.group) if episode.group in kept]


def is_informative(scores: FloatArray, config: AdvantageConfig, scorer_noise: float) -> bool:
    """Whether episodes with `scores` [G] teach something, see `informative_groups`."""
    spread: NDArray[np.floating[Any]] = scores.max() - scores.min()
    std = scores.astype(np.float64).std(ddof=1) if len(scores) > 1 else 0.0  # of a sample, as noise is measured
    return bool(spread >= config.min_spread and std > config.noise_factor * scorer_noise)
