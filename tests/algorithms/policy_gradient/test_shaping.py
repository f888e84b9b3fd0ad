"""Rewards by the change of a learned value: what they sum to, what they leave as it is, and where there are none."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlvlm.algorithms.policy_gradient.advantages import Trajectories, gae, rloo_turns
from rlvlm.algorithms.policy_gradient.config import AdvantageConfig
from rlvlm.algorithms.policy_gradient.critic import Critic, shaping_rewards
from rlvlm.algorithms.policy_gradient.rewards import RewardLabeller, drop_unlabelled
from rlvlm.core import metrics
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.judging import Score, Status
from rlvlm.core.steps import FloatArray
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.push_block import PushBlock
from rlvlm.envs.registry import make_env, task_env
from rlvlm.rewards.config import ChunkRewardConfig, MixtureConfig, TurnRewardConfig, ValueConfig
from rlvlm.rewards.scorers import SimulatedScorer, biased_scorer
from rlvlm.rewards.scoring_items import ScoringItem
from tests.algorithms.policy_gradient.by_hand import scored
from tests.algorithms.policy_gradient.test_rewards import play
from tests.algorithms.policy_gradient.tiny_runs import chunk_config

SMALL = ValueConfig(hidden=16, steps=60, batch_size=64, heads=2, lr=5e-3)


def push_critic(config: ValueConfig = SMALL) -> Critic:
    env = PushBlock(ChunkEnvConfig(episode_steps=32), 0)
    env.snapshot_size = 1
    env.landmarks = lambda snapshots: np.empty((len(snapshots), 0, 2), np.float32)
    return Critic(config, env, 0)


def known(critic: Critic) -> Critic:
    """It has met both outcomes: of few env steps in the first chunk a success, of many a failure."""
    for _ in range(3):
        critic.note([scored(1, (2, 2), success=True)] * 20 + [scored(0, (8, 8))] * 20, np.repeat([1.0, 0.0], 20))
        critic.shape([], 0.9, 1.0, (0.0, 0.0))
    return critic


def test_shaping_by_hand():
    values = np.array([0.5, 0.6, 0.9])
    np.testing.assert_allclose(shaping_rewards(values, True, 0.9), [0.9 * 0.6 - 0.5, -0.6])
    np.testing.assert_allclose(shaping_rewards(values, False, 0.9), [0.9 * 0.6 - 0.5, 0.9 * 0.9 - 0.6])


def chain_returns(policy: Sequence[int], potential: FloatArray | None, gamma: float, turns: int) -> list[float]:
    """Discounted returns from each state of a chain whose right end is a success and whose left end is none. A walk
    that goes nowhere is cut, and what comes after bootstrapped: it is what it was before, a potential less.
    """
    found = []
    for start in range(len(policy)):
        seen, reward, state = [start], [], start
        while len(reward) < turns and 0 <= state < len(policy):
            state += policy[state]
            seen.append(state)
            reward.append(float(state == len(policy)))
        is_end = not 0 <= state < len(policy)
        if potential is not None:
            values = np.append(potential, [0.0, 0.0])[seen]
            reward = np.add(reward, shaping_rewards(values, is_end, gamma)).tolist()
        rest = 0.0 if is_end or potential is None else -float(potential[state])
        found.append(sum(gamma**turn * paid for turn, paid in enumerate([*reward, rest])))
    return found


def test_the_best_policy_of_a_chain_stays_the_best_whatever_the_potential():
    policies = list(itertools.product((-1, 1), repeat=4))
    rng = np.random.default_rng(0)
    for potential in [np.array([1.0, 0.7, 0.2, 0.0]), *rng.random((5, 4))]:  # the first praises the wrong end
        plain, shaped = (
            np.array([chain_returns(policy, given, 0.9, 40) for policy in policies]) for given in (None, potential)
        )
        np.testing.assert_allclose(shaped, plain - potential, atol=1e-9)  # so it is the best from every state
        assert policies[int(shaped.sum(1).argmax())] == (1, 1, 1, 1)


def test_shaped_advantages_of_episodes_that_end_are_those_of_a_baseline():
    """Of GAE, a critic that subtracts the potential; of turns compared, what is shared at a turn is nobody's."""
    outcome, values = torch.tensor([[0.0, 0.0], [1.0, 0.0]]), np.array([[0.3, 0.3], [0.8, 0.4]])
    added = np.stack([shaping_rewards(np.append(column, 9.0), True, 0.9) for column in values.T], 1)
    potential = torch.tensor(values).float()

    def played(rewards: torch.Tensor, critic: torch.Tensor) -> Trajectories:
        following = torch.cat([critic[1:], torch.zeros_like(critic[:1])])
        return Trajectories(
            rewards=rewards, ends=torch.tensor([[False] * 2, [True] * 2]), is_live=torch.ones(2, 2, dtype=torch.bool),
            groups=torch.zeros(2, dtype=torch.int64), values=critic, next_values=following,
        )  # fmt: skip

    config, critic = AdvantageConfig(gamma=0.9, gae_lambda=0.8), torch.tensor([[0.5, 0.2], [0.6, 0.1]])
    shaped = outcome + torch.tensor(added).float()
    plain = gae(played(outcome, critic), config)
    torch.testing.assert_close(gae(played(shaped, critic - potential), config), plain)
    # at the first turn both had the same value, at the second the failure's was .4 lower
    turns = rloo_turns(played(shaped, torch.zeros(2, 2)), config)
    torch.testing.assert_close(turns, torch.tensor([[0.9, -0.9], [1 - 0.4, -1 + 0.4]]))


@pytest.mark.slow
def test_a_turn_that_decides_is_paid_for_it_and_nothing_is_before_outcomes_differ():
    critic = push_critic()
    alike = [scored(0, (8, 8))] * 4
    critic.note(alike, np.zeros(4))
    for _ in range(2):
        assert [episode.rewards.tolist() for episode in critic.shape(alike, 0.9, 1.0, (0.0, 0.0))] == [[0, 0]] * 4
    assert critic.report()[metrics.VALUE_IS_KNOWN] == 0
    known(critic)
    good = scored(1, (2, 2), success=True)
    over, cut = critic.shape([good, replace(good, terminated=False)], 1.0, 2.0, (0.0, 0.0))
    first, last = over.rewards - good.rewards
    assert first > -0.1 and last < -1.2, "a success is certain after the first chunk, and V is 0 where it is over"
    assert cut.rewards[1] - good.rewards[1] > last + 0.4, "a time limit cuts: there V stays what it is"
    assert metrics.VALUE_SHAPING in critic.report()


@pytest.mark.slow
def test_calibration_is_on_the_truth_and_the_spread_of_an_ensemble_is_told():
    critic = known(push_critic())
    critic.note([scored(1, (2, 2), success=False)] * 4, np.ones(4))  # called a success, and none
    critic.shape([], 0.9, 1.0, (0.0, 0.0))
    figures = critic.report()
    assert figures[metrics.VALUE_CALIBRATION] > 0.6 and 0 <= figures[metrics.VALUE_SPREAD] < 0.2


def test_pieces_of_an_episode_in_turns_are_shaped_as_the_whole():
    critic = Critic(SMALL, make_env("number_line", task_env("number_line"), 0), 0, episode_steps=10)
    rows, wholes = play([(1, 4)], 3)
    won, lost = play([(3, 5)], 2)[1], play([(3, 5)], 2, right=False)[1]
    critic.note([*won, *(replace(episode, is_over=True) for episode in lost)], np.array([1.0, 0.0]))
    critic.shape([], 0.9, 1.0, (0.0, 0.0))
    assert critic.tells_apart
    episodes = RewardLabeller(TurnRewardConfig(), None).label([*wholes, *(row[0] for row in rows)], 0)
    whole, *pieces = critic.shape(episodes, 0.9, 1.0, (0.0, 0.0))
    np.testing.assert_allclose(np.concatenate([piece.rewards for piece in pieces]), whole.rewards, atol=1e-6)
    assert np.ptp(whole.rewards - episodes[0].rewards) > 1e-3


class HalfSilent(SimulatedScorer):
    """Gives no answer about every second episode."""

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        missing = {"status": Status.INVALID, "value": None}
        return [replace(score, **missing) if index % 2 else score for index, score in enumerate(super().score(items))]


def shaping_labeller(scorer: SimulatedScorer, **settings: Any) -> RewardLabeller:
    config = ChunkRewardConfig(source="judged", teacher="biased", shaping="value", value=SMALL, **settings)
    return RewardLabeller(config, scorer, critic=push_critic())


def shown(labeller: RewardLabeller, count: int = 24) -> list[TokenEpisode]:
    """Labelled episodes, every third of which is a success."""
    episodes = [
        replace(scored(0, (2, 2) if index % 3 == 0 else (8, 8), success=index % 3 == 0), group=index)
        for index in range(count)
    ]
    labeller.show(episodes)
    return labeller.label(episodes, 0)


def test_episodes_without_an_answer_are_not_learned_from():
    labeller = shaping_labeller(HalfSilent(lambda item, _: float(bool(item.is_success)), 0, "half"))
    known_ones = drop_unlabelled(shown(labeller))
    assert len(known_ones) == 12 and len(labeller._critic._pending) == 12
    labeller.shape(known_ones, 0.9)
    assert labeller.report()[metrics.VALUE_IS_KNOWN] == 1


@pytest.mark.slow
def test_the_rates_of_a_biased_judge_correct_what_is_learned_from_it():
    values = {}
    for corrects_noise in (True, False):
        often = SimulatedScorer(lambda item, rng: float(bool(item.is_success) or rng.random() < 0.5), 0, "often")
        labeller = shaping_labeller(often, false_positives=0.5, corrects_noise=corrects_noise)
        for _ in range(4):
            labeller.shape(shown(labeller), 0.9)
        values[corrects_noise] = -labeller.shape([scored(0, (8, 8))], 0.0)[0].rewards[1]
    assert values[True] < 0.25 and values[False] > 0.35, "half of the failures were called successes"


def test_an_envs_own_reward_in_the_sum_may_shape_too(caplog):
    mixture = MixtureConfig(environment=1.0, judged=1.0)
    config = ChunkRewardConfig(source="mixture", mixture=mixture, teacher="biased", shaping="value")
    RewardLabeller(config, biased_scorer(0.2, 0), critic=push_critic())
    assert "if it shapes, both do" in caplog.text


@pytest.mark.parametrize(
    ("advantage", "is_fine"),
    [
        ({"estimator": "grpo"}, False), ({"estimator": "rloo"}, False), ({"estimator": "gigpo"}, False),
        ({"estimator": "gae", "values": "state"}, False), ({"estimator": "gae"}, True),
        ({"estimator": "rloo_turns"}, True),
    ],
)  # fmt: skip
def test_whole_episode_advantages_and_a_critic_of_the_state_take_no_shaping(advantage, is_fine):
    reward = ChunkRewardConfig(shaping="value", value=SMALL)
    config = chunk_config(advantage=AdvantageConfig(**advantage), reward=reward)
    if is_fine:
        config.validate()
    else:
        with pytest.raises(ValueError, match="reward.shaping value pays each turn for the change"):
            config.validate()
