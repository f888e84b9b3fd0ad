"""Where an update's episodes come from: they are rolled out, labelled, and filtered for groups that teach something."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.algorithms.base import TrainingStats
from rlvlm.algorithms.policy_gradient.config import AdvantageConfig, PolicyGradientConfig
from rlvlm.algorithms.policy_gradient.rewards import RewardLabeller, known_episodes_of
from rlvlm.algorithms.policy_gradient.runner import TurnRunner
from rlvlm.algorithms.runner_group import LocalRunnerGroup, RemoteRunnerGroup
from rlvlm.core import metrics
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.steps import FloatArray
from rlvlm.policies.protocol import TokenPolicy
from rlvlm.policies.vla.tokens import ActionScale
from rlvlm.rewards.config import TurnRewardConfig

Play = Callable[[], list[TokenEpisode]]


class EpisodeSource:
    """Rolls out, has episodes labelled, and keeps those that teach something.

    Args:
        algo: how much an update wants, how often it is rolled out for it, and which groups teach something.
        reward: whether scores are waited for one update later.
        play: a rollout, all of whose turns the labeller was shown.
        labeller: says what turns are worth.
        is_compared: whether episodes are compared within groups.
        stats: counts steps and episodes, and takes the figures.
    """

    def __init__(
        self,
        algo: PolicyGradientConfig,
        reward: TurnRewardConfig,
        play: Play,
        labeller: RewardLabeller,
        is_compared: bool,
        stats: TrainingStats,
    ) -> None:
        self._algo, self._reward, self._play = algo, reward, play
        self._labeller, self._is_compared, self._stats = labeller, is_compared, stats
        self._waiting: list[TokenEpisode] = []
        self._waiting_step = 0
        noise = algo.advantage.scorer_noise
        self.scorer_noise = 0.0 if noise == "measured" else noise
        """Standard deviation of an episode's score by a scorer that is asked twice."""
        self.rollout_s = 0.0
        """Seconds that the newest update's rollouts took."""
        self.newest: list[TokenEpisode] = []
        """What was labelled last, whatever it teaches."""

    def next(self) -> list[TokenEpisode]:
        """Episodes for the next update, played by the policy as it is now.

        Groups are rolled out until there are as many as wanted that teach something, or `rounds` times. With
        `reward.ahead` they are those of the call before, and what is played now is scored meanwhile.
        """
        self.rollout_s = 0.0
        if self._reward.ahead:
            waiting, step = self._waiting, self._waiting_step
            self._waiting, self._waiting_step = self._played(), self._stats.env_steps
            return self._filtered(self._labelled(waiting, step))
        episodes: list[TokenEpisode] = []
        kept: list[TokenEpisode] = []
        for _ in range(self._algo.rounds if self._is_compared and not self._algo.rollout_turns else 1):
            played = self._played()
            episodes += self._labelled(played, self._stats.env_steps)
            kept = self._filtered(episodes)
            if len(kept) >= self._algo.groups * self._algo.group_size:
                break
        return kept

    def rest(self) -> list[TokenEpisode]:
        """Of what was played and is still being scored; afterwards nothing is on its way."""
        waiting, self._waiting = self._waiting, []
        return self._filtered(self._labelled(waiting, self._waiting_step))

    def forget(self) -> None:
        """Forgets what is on its way."""
        self._waiting = []

    def _played(self) -> list[TokenEpisode]:
        began = time.monotonic()
        episodes = self._play()
        self.rollout_s += time.monotonic() - began
        ended = [(one.env_return, one.is_success) for one in episodes if one.is_over]
        self._stats.record(sum(int(one.steps.sum()) for one in episodes), ended)
        return episodes

    def _labelled(self, episodes: list[TokenEpisode], env_step: int) -> list[TokenEpisode]:
        if not episodes:
            return []
        self.newest = self._labeller.label(episodes, env_step)
        return self.newest

    def _filtered(self, episodes: list[TokenEpisode]) -> list[TokenEpisode]:
        """Those that teach something; to a critic, all whose rewards are known. The figures are of all of them."""
        if not episodes:
            return []
        known = known_episodes_of(episodes)
        if not self._is_compared or self._algo.rollout_turns:
            kept = known
        else:
            kept = informative_groups(known, self._algo.advantage, self.scorer_noise)
        if not self._algo.rollout_turns:
            scores = np.array([one.rewards.sum() for one in episodes])
            over = [one for one in episodes if one.is_over]
            num_groups, num_kept = (len({one.group for one in some}) for some in (episodes, kept))
            self._stats.note(
                {
                    metrics.GROUP_KEPT: num_kept / num_groups,
                    metrics.GROUP_SCORE: float(np.nanmean(scores)) if np.isfinite(scores).any() else 0.0,
                    metrics.TRAIN_EPISODE_RETURN: float(np.mean([one.env_return for one in over])),
                    metrics.TRAIN_EPISODE_SUCCESS: float(np.mean([one.is_success for one in over])),
                    metrics.TRAIN_SUCCESS_AT_END: float(
                        np.mean([one.is_success and not one.is_undone for one in over])
                    ),
                }
            )
        return kept


def play_turns_of(runner: TurnRunner, labeller: RewardLabeller, algo: PolicyGradientConfig, is_compared: bool) -> Play:
    """Plays envs that are talked to; the runner shows each row of turns to the labeller."""
    if labeller.asks:
        runner.show = labeller.show

    def play() -> list[TokenEpisode]:
        if algo.rollout_turns and not is_compared:
            return runner.sample(num_turns=algo.rollout_turns // algo.num_envs)
        return runner.sample_groups(group_size=algo.group_size if is_compared else 1)

    return play


def play_chunks_of(
    runners: LocalRunnerGroup[Any] | RemoteRunnerGroup[Any],
    policy: TokenPolicy,
    labeller: RewardLabeller,
    algo: PolicyGradientConfig,
    reward: TurnRewardConfig,
    scale: Callable[[], ActionScale],
) -> Play:
    """Plays groups of envs in chunks, part by part; groups of a runner that is lost are played by the others.

    One part where nobody has to look, and some for each env runner.
    """
    most = max(1, algo.groups // max(1, algo.env_runners))
    num_parts = min(reward.parts, most) if reward.scores else 1
    parts = [len(part) for part in np.array_split(np.arange(algo.groups), num_parts)]

    def play() -> list[TokenEpisode]:
        episodes: list[TokenEpisode] = []
        for num_missing in parts:
            while num_missing > 0:
                runners.start({"num_groups": num_missing, "scale": scale(), "players": runners.alive()})
                played, images = runners.collect()
                policy.show(list(images), np.array(list(images.values()))) if images else None
                labeller.show(played)
                episodes += played
                num_missing -= len(played) // algo.group_size
        return episodes

    return play


def informative_groups(
    episodes: Sequence[TokenEpisode], config: AdvantageConfig, scorer_noise: float
) -> list[TokenEpisode]:
    """Episodes of those groups that teach something: a spread above `min_spread`, and above what noise explains.

    Departure: fixed bounds on the group's mean (RLinf, SimpleVLA-RL: success in [0.1, 0.9]) keep a group of failures
    that a continuous scorer calls 8, 10, 10 and 12 percent; division by its standard deviation would then train on
    noise at full strength.
    """
    scores: dict[int, list[float]] = {}
    for one in episodes:
        scores.setdefault(one.group, []).append(float(one.rewards.sum(dtype=np.float64)))
    kept = {group for group, own in scores.items() if is_informative(np.array(own, np.float32), config, scorer_noise)}
    return [one for one in sorted(episodes, key=lambda one: one.group) if one.group in kept]


def is_informative(scores: FloatArray, config: AdvantageConfig, scorer_noise: float) -> bool:
    """Whether episodes with `scores` [G] teach something, see `informative_groups`."""
    spread: NDArray[np.floating[Any]] = scores.max() - scores.min()
    std = scores.astype(np.float64).std(ddof=1) if len(scores) > 1 else 0.0
    return bool(spread >= config.min_spread and std > config.noise_factor * scorer_noise)
