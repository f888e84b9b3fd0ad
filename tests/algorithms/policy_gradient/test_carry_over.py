"""Asynchronous rollouts that carry over what is unfinished, with a run's schedule and an engine that answers late."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Condition
from typing import Any

import numpy as np
import pytest

from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradientAlgorithmConfig, check_versions
from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig
from rlvlm.algorithms.policy_gradient.rewards import RewardLabeller
from rlvlm.algorithms.policy_gradient.source import EpisodeSource
from rlvlm.algorithms.policy_gradient.turns import Actor, TurnRunner
from rlvlm.algorithms.training_stats import TrainingStats
from rlvlm.core.episodes import SampledReply, TokenEpisode
from rlvlm.envs.registry import task_env
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.rewards.config import TurnRewardConfig

ENVS, TURNS, GROUP_SIZE = 6, 3, 2


class LateEngine:
    """Answers `+` after up to 4 ms; a reply's only token is its number, and its log-prob follows from both.

    The second half of a rollout's replies waits for weights newer than those that it began with, or .3 s where none can
    come: so updates end in the middle of rollouts, however busy the machine is.
    """

    def __init__(self, staleness: int) -> None:
        self._staleness = staleness
        self.version = self.newest = 0
        self._updated = Condition()
        self.asked: list[int] = []
        """Version of the weights that were to give each reply."""
        self.begin_rollout(0)
        self._rng, self._pool = np.random.default_rng(0), ThreadPoolExecutor(ENVS)

    def begin_rollout(self, version: int) -> None:
        """The next replies are of a rollout that begins with weights `version`."""
        self.version = self._begun = version
        self._first, self._is_alone = len(self.asked), not self._staleness

    def missing(self, images: Any) -> list[int]:
        return []

    def begin(self, obs: Any, seeds: Any, sampling: Any) -> list[Future[SampledReply]]:
        number = len(self.asked)
        self.asked.append(self.version)
        reply = SampledReply(
            image=obs.images[0], answer={"ids": np.array([number])}, text='{"action": "+"}',
            log_probs=np.array([-number - self.version / 8], np.float32), version=self.version,
        )  # fmt: skip
        is_late, seconds = number - self._first > ENVS * TURNS // 2, self._rng.uniform(0, 0.004)

        def answer() -> SampledReply:
            time.sleep(seconds)
            with self._updated:
                if is_late and not self._updated.wait_for(lambda: self.newest > self._begun or self._is_alone, 0.3):
                    self._is_alone = True
            return reply

        return [self._pool.submit(answer)]

    def update(self) -> None:
        """There are newer weights."""
        with self._updated:
            self.newest += 1
            self._updated.notify_all()

    def end(self, asked: list[Future[SampledReply]]) -> list[SampledReply]:
        return [future.result() for future in asked]


def use_newest(engine: LateEngine) -> None:
    engine.version = engine.newest


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("is_compared", [False, True])
def test_every_reply_is_learned_from_once_and_in_time(staleness, is_compared, caplog):
    algo = PolicyGradientConfig(
        rollout="asynchronous", staleness=staleness, num_envs=ENVS, group_size=GROUP_SIZE, rounds=1,
        rollout_turns=0 if is_compared else ENVS * TURNS,
    )  # fmt: skip
    config = PolicyGradientAlgorithmConfig().settings(task="number_line", env_settings=task_env("number_line"))
    engine: Any = LateEngine(staleness)
    runner, resumed = (TurnRunner(config=config.settings(algo=algo).debugging(seed=0)) for _ in range(2))
    for each in (runner, resumed):
        each.actor, each.use_newest = Actor(engine, ReplySampling(max_new_tokens=48)), partial(use_newest, engine)
    carried: list[dict[str, Any]] = []

    def play(version: int) -> Any:
        engine.begin_rollout(version)
        episodes = runner.sample_groups(group_size=GROUP_SIZE) if is_compared else runner.sample(num_turns=TURNS)
        if runner._asked:
            carried.append(runner.save_tree())
        return episodes, []

    labeller = RewardLabeller(TurnRewardConfig(), None)
    source = EpisodeSource(algo, play, lambda: engine.newest, labeller, False, TrainingStats(), True)
    learned: list[TokenEpisode] = []
    for update in range(12):
        # an evaluation or a checkpoint comes between: nothing is under way but what was carried over
        rollouts = list(source.rest()) if update in (6, 11) else [source.next()]
        for episodes in rollouts:
            check_versions(episodes, engine.newest, staleness)
            if is_compared:
                groups = [[*episodes[begin : begin + GROUP_SIZE]] for begin in range(0, ENVS, GROUP_SIZE)]
                assert len(episodes) == ENVS and all(episode.is_over for episode in episodes)
                assert all(len({(episode.group, episode.seed) for episode in group}) == 1 for group in groups)
                assert len({group[0].group for group in groups}) == len(groups)
            else:
                assert sum(map(len, episodes)) == ENVS * TURNS
            learned += episodes
            engine.update()
    ids = [int(answer["ids"][0]) for episode in learned for answer in episode.answers]
    versions = [int(version) for episode in learned for version in episode.versions]
    # what is not learned from is still under way, or of groups that are
    rest = [int(reply.result().ids[0]) for reply in runner._asked]
    if is_compared:
        running = [answer for slot in runner.slots if slot.index not in runner._free for answer in slot.answers]
        rest += [int(answer.ids[0]) for answer in running]
        ended = [episode for group in runner._groups.values() for episode in group.episodes]
        rest += [int(answer["ids"][0]) for episode in ended for answer in episode.answers]
    assert sorted(ids + rest) == list(range(len(engine.asked))), "lost or counted twice"
    assert versions == [engine.asked[number] for number in ids]
    assert [float(log_probs[0]) for episode in learned for log_probs in episode.log_probs] == [
        -number - version / 8 for number, version in zip(ids, versions, strict=True)
    ], "the odds of another engine's reply"
    assert any(len(set(episode.versions)) > 1 for episode in learned) == bool(staleness)
    assert bool(carried) == bool(staleness)
    # a checkpoint has none of it
    resumed.load_tree(carried[-1] if carried else runner.save_tree())
    assert ("it is sampled anew" in caplog.text) == bool(staleness)
    again = resumed.sample_groups(group_size=GROUP_SIZE) if is_compared else resumed.sample(num_turns=TURNS)
    assert min(int(answer["ids"][0]) for episode in again for answer in episode.answers) > max(ids + rest)
