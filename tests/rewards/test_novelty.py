import numpy as np
import pytest

from rlvlm.core.steps import Transitions
from rlvlm.rewards.novelty import NoveltyReward, RunningSpread, VisitedStates
from rlvlm.rewards.source import Labelling


def transitions_at(obs: np.ndarray) -> Transitions:
    num = len(obs)
    obs = obs.astype(np.float32)
    flat = np.zeros(num, np.float32)
    return Transitions(
        obs=obs,
        actions=np.zeros((num, 1), np.float32),
        next_obs=obs,
        terminated=flat,
        env_rewards=flat,
        success=flat,
        snapshots=np.zeros((num, 1), np.float32),
    )


def visited(*parts: np.ndarray) -> VisitedStates:
    states = VisitedStates(parts[0].shape[1])
    for part in parts:
        states.append(part)
    return states


def test_distances_by_hand():
    states = np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0], [6.0, 8.0]])
    points = states[[0, 3]]
    np.testing.assert_allclose(visited(states).distances(points, 1), [1.0, 5.0])
    np.testing.assert_allclose(visited(states).distances(points, 2), [5.0, np.hypot(6, 7)])
    np.testing.assert_allclose(visited(states).distances(points, 9), [10.0, 10.0])


@pytest.mark.parametrize("scale", [1.0, 1e-5])
def test_distances_agree_with_differences_taken_one_by_one_even_where_they_are_tiny(scale):
    states = 3 + scale * np.random.default_rng(0).normal(size=(3_000, 39))
    by_differences = np.sort(np.linalg.norm(states[:40, None] - states[None], axis=-1), axis=1)[:, 5]
    np.testing.assert_allclose(visited(states).distances(states[:40], 5), by_differences, rtol=1e-10)


def test_a_distance_does_not_hang_on_when_states_came():
    states = np.random.default_rng(0).normal(size=(3_000, 39))
    at_once = visited(states).distances(states[::50], 5)
    for cuts in ([2_900], [10, 600, 1_500, 1_501, 2_999], range(100, 3_000, 100)):  # older and recent ones in any share
        assert np.array_equal(visited(*np.split(states, cuts)).distances(states[::50], 5), at_once)


def test_the_spread_of_parts_is_the_spread_of_the_whole():
    values = np.random.default_rng(0).normal(5, 3, size=100)
    spread = RunningSpread()
    for part in np.split(values, [1, 10, 60]):
        spread.add(part)
    assert spread.std == pytest.approx(values.std(), rel=1e-12)


def test_a_reward_is_a_distance_over_the_spread_of_all_distances_so_far():
    novelty = NoveltyReward(k=1, obs_size=1)
    assert novelty.labelling is Labelling.ON_DRAW
    novelty.observe(np.array([[0.0], [1.0]], np.float32))
    novelty.observe(np.array([[4.0]], np.float32))
    first = novelty.label(transitions_at(np.array([[0.0], [4.0]])))  # distances 1, 3: std 1
    np.testing.assert_allclose(first, [1.0, 3.0])
    second = novelty.label(transitions_at(np.array([[1.0]])))  # distance 1; of 1, 3, 1 the std is sqrt(8) / 3
    np.testing.assert_allclose(second, [3 / np.sqrt(8)], rtol=1e-6)
    assert first.dtype == np.float32


def test_a_state_seen_again_and_again_is_not_novel():
    novelty = NoveltyReward(k=5, obs_size=3)
    novelty.observe(np.ones((2000, 3), np.float32))
    np.testing.assert_array_equal(novelty.label(transitions_at(np.ones((4, 3)))), np.zeros(4))


def test_missing_observations_are_an_error_with_a_fix():
    with pytest.raises(ValueError, match="call `observe` first"):
        NoveltyReward(k=5, obs_size=3).label(transitions_at(np.ones((1, 3))))
    with pytest.raises(ValueError, match="k must be >= 1"):
        NoveltyReward(k=0, obs_size=3)
