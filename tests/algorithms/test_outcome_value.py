"""The probability of success that is learned from outcomes, on a chain whose exact values are known."""

import numpy as np
import pytest

from rlvlm.algorithms.outcome_value import OutcomeValue, td_targets
from rlvlm.core.steps import FloatArray
from rlvlm.rewards.config import ValueConfig
from tests.oracles.td_value import chain_values, fitted_values, lambda_return

STATES = 5
EXACT = np.arange(1, STATES + 1) / (STATES + 1)
"""Values of the symmetric walk without a discount."""


def walks(num: int, seed: int) -> tuple[list[list[int]], list[float]]:
    """Walks from the middle, and whether each ended on the right."""
    rng, episodes, outcomes = np.random.default_rng(seed), [], []
    for _ in range(num):
        state, seen = STATES // 2, []
        while 0 <= state < STATES:
            seen.append(state)
            state += 1 if rng.random() < 0.5 else -1
        episodes.append(seen)
        outcomes.append(float(state == STATES))
    return episodes, outcomes


def rows(episodes: list[list[int]]) -> list[FloatArray]:
    return [np.eye(STATES, dtype=np.float32)[states] for states in episodes]


def fitted(outcomes: FloatArray, episodes: list[list[int]], rates: tuple[float, float] = (0, 0)) -> FloatArray:
    config = ValueConfig(hidden=8, steps=40, lr=3e-2, td_lambda=0.8, monte_carlo=2)
    value = OutcomeValue(config, STATES, 0, num_flags=STATES)
    for first in range(4):
        value.learn(rows(episodes[first::4]), outcomes[first::4], rates)
    return value.predict(np.eye(STATES, dtype=np.float32)).mean(0)


def test_targets_by_hand():
    """Three turns, then one: half of what is next and half of the rest, at a discount of .9."""
    found = td_targets(np.array([1.0, 0.0]), np.array([3, 1]), np.array([[0.2, 0.4, 0.6, 0.8]]), 0.9, 0.5)
    second = 0.9 * (0.5 * 0.6 + 0.5 * 1.0)
    np.testing.assert_allclose(found, [[0.9 * (0.5 * 0.4 + 0.5 * second), second, 1.0, 0.0]])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.95, 0.7), (0.9, 0.0)])
def test_targets_and_a_table_of_values_are_those_of_the_oracle(gamma, lam):
    episodes, outcomes = walks(60, 1)
    lengths, states = np.array([len(seen) for seen in episodes]), np.concatenate(episodes)
    table = np.full(STATES, 0.5)
    for _ in range(30):
        (targets,) = td_targets(np.array(outcomes), lengths, table[states][None], gamma, lam)
        table = np.bincount(states, targets) / np.bincount(states)
    np.testing.assert_allclose(table, fitted_values(episodes, outcomes, STATES, gamma, lam, 30), atol=1e-6)
    (first,) = td_targets(np.array(outcomes[:1]), lengths[:1], EXACT[episodes[0]][None], gamma, lam)
    by_hand = [lambda_return(outcomes[0], EXACT[episodes[0]], step, gamma, lam) for step in range(lengths[0])]
    np.testing.assert_allclose(first, by_hand, atol=1e-6)


@pytest.mark.slow
def test_the_chains_exact_values_are_found_from_true_and_from_wrong_outcomes():
    np.testing.assert_allclose(chain_values(STATES, 0.5, 1.0), EXACT, atol=1e-6)
    episodes, outcomes = walks(1_200, 2)
    true, chance = np.array(outcomes), np.random.default_rng(3).random(len(outcomes))
    called = np.where(true == 1, chance > 0.1, chance < 0.3).astype(np.float32)  # 30 % and 10 % are wrong
    assert np.abs(fitted(true, episodes) - EXACT).max() < 0.06
    corrected, plain = fitted(called, episodes, (0.3, 0.1)), fitted(called, episodes)
    assert np.abs(corrected - EXACT).max() < 0.09
    assert plain[0] > 0.3 and corrected[0] < 0.25, "a state near failure looks better to a judge with false positives"


@pytest.mark.slow
def test_rates_that_leave_nothing_to_tell_correct_nothing():
    episodes, outcomes = walks(40, 4)
    np.testing.assert_array_equal(
        fitted(np.array(outcomes), episodes, (0.6, 0.4)), fitted(np.array(outcomes), episodes)
    )


def test_alike_outcomes_teach_no_value():
    value = OutcomeValue(ValueConfig(hidden=4, steps=1), STATES, 0)
    assert not value.is_fitted and not value.tells_apart
    value.learn(rows([[0, 1], [2]]), np.ones(2))
    assert value.is_fitted and not value.tells_apart
    value.learn(rows([[3]]), np.zeros(1))
    assert value.tells_apart


def test_a_head_does_not_know_how_its_own_episodes_ended():
    """Two episodes, one for each head to leave out, whose states appear nowhere else."""
    config = ValueConfig(hidden=16, steps=100, lr=1e-2, heads=2)
    told = {}
    for leaves_out in (True, False):
        value = OutcomeValue(config, 2, 0, num_flags=2, leaves_out=leaves_out)
        value.learn([np.eye(2, dtype=np.float32)[[0]], np.eye(2, dtype=np.float32)[[1]]], np.array([1.0, 0.0]))
        told[leaves_out] = value.predict(np.eye(2, dtype=np.float32))
    assert told[False][0, 0] > 0.8 and told[True][0, 0] < 0.5, "its head has met the failure alone"
    assert told[False][1, 1] < 0.2 and told[True][1, 1] > 0.5


@pytest.mark.slow
def test_an_expectile_above_a_half_leans_towards_the_better_outcomes():
    values = []
    for expectile in (0.2, 0.5, 0.8):
        value = OutcomeValue(ValueConfig(hidden=8, steps=200, lr=1e-2), 1, 0, expectile=expectile)
        value.learn([np.zeros((1, 1), np.float32)] * 10, np.arange(10) % 2)
        values.append(float(value.predict(np.zeros((1, 1), np.float32))[0, 0]))
    # tau (1 - v) = (1 - tau) v for outcomes 0 and 1 alike, so v is tau itself
    np.testing.assert_allclose(values, [0.2, 0.5, 0.8], atol=0.03)
