from typing import Any

import numpy as np
import pytest

from rlvlm.core.steps import FloatArray
from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.deformables.straighten_rope import draw_curve
from rlvlm.envs.mujoco.env import SceneEnv
from rlvlm.envs.registry import make_env
from rlvlm.testing import check_step_env


def make(seed: int = 0, **fields: Any) -> SceneEnv:
    env = make_env("straighten_rope", StepEnvConfig(**({"episode_steps": 40} | fields)), seed)
    assert isinstance(env, SceneEnv)
    return env


def laid_straight(angle: float) -> FloatArray:
    """A snapshot [123] of a straight rope through the middle of the table, at `angle` to the x axis, radians."""
    along = np.linspace(-0.25, 0.25, 41)
    return np.stack([along * np.cos(angle), along * np.sin(angle), np.full(41, 0.00625)], axis=1).ravel()


def pull(env: SceneEnv, obs: FloatArray) -> tuple[list[float], dict[str, Any]]:
    """Rewards of an episode in which both pickers go straight away from each other, and its last info."""
    rewards, info = [], {}
    for _ in range(40):
        direction = (obs[33:36] - obs[30:33]) / np.linalg.norm(obs[33:36] - obs[30:33])
        obs, reward, _, _, info = env.step(np.concatenate([-direction, [0], direction, [0]]).astype(np.float32))
        rewards.append(reward)
    return rewards, info


def test_a_straight_rope_by_hand():
    env = make()
    state = env.get_state()
    state["physics"][1:124] = laid_straight(0.0)  # the first number is the time
    env.set_state(state)
    obs, reward, _, _, info = env.step(np.zeros(8, np.float32))
    np.testing.assert_allclose(obs[:3], [-0.25, 0.0, 0.00625], atol=1e-3)
    np.testing.assert_allclose(obs[12:15], [-0.25 + 18 * 0.0125, 0.0, 0.00625], atol=1e-3)  # the fifth of ten points
    np.testing.assert_allclose(obs[30:], [-0.25, 0.0, 0.00625, 0.25, 0.0, 0.00625], atol=1e-3)
    assert reward == pytest.approx(0.5, abs=1e-3)
    assert info["progress"] == pytest.approx(1.0, abs=1e-3) and info["success"]


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fixed", "random"])
def test_it_keeps_the_contract(start):
    different = np.stack([laid_straight(angle) for angle in (0.0, 0.5, 1.0)]).astype(np.float32)
    check_step_env(make(start=start), make(start=start), different)


def test_pulling_the_ends_apart_straightens_it_and_the_reward_is_capped():
    for seed in range(3):
        env = make(seed)
        obs, info = env.reset()
        assert 0.1 <= info["progress"] <= 0.6
        rewards, info = pull(env, obs)
        assert info["success"] and info["progress"] > 0.95
        assert max(rewards) <= 0.55 and sum(rewards) > 17


def test_a_move_out_of_the_window_is_not_made():
    env = make()
    before, _ = env.reset()
    for _ in range(20):
        obs, *_ = env.step(np.array([1, 0, 0, 0, 0, 0, -1, 0], np.float32))
    assert obs[30] == pytest.approx(0.325, abs=0.011) and obs[30] <= 0.325
    np.testing.assert_allclose(obs[33:36], before[33:36], atol=1e-3)  # downwards into the table


def test_the_flags_change_nothing():
    one, other = make(), make()
    for _ in range(3):
        np.testing.assert_array_equal(
            one.step(np.array([1, 0, 1, -1, 0, 1, 0, 1], np.float32))[0],
            other.step(np.array([1, 0, 1, 1, 0, 1, 0, -1], np.float32))[0],
        )


@pytest.mark.slow
def test_a_fixed_start_is_one_of_a_thousand_and_a_random_one_is_new():
    known = {draw_curve(np.random.default_rng(seed)).astype(np.float32).tobytes() for seed in range(1_000)}
    for start, is_known in (("fixed", True), ("random", False)):
        env = make(start=start)
        for _ in range(3):
            curve = env.reset()[1]["snapshot"].reshape(41, 3)[:, :2]
            assert (curve.tobytes() in known) is is_known
