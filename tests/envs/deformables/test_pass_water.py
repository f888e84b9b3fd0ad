from typing import Any

import numpy as np
import pytest

from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.mujoco.env import SceneEnv
from rlvlm.envs.registry import make_env
from rlvlm.testing import check_step_env

BALLS = slice(1, None)
"""In a snapshot: the cup's x, then 64 places."""


def make(seed: int = 0, **fields: Any) -> SceneEnv:
    env = make_env("pass_water", StepEnvConfig(**({"episode_steps": 75} | fields)), seed)
    assert isinstance(env, SceneEnv)
    return env


def set_scene(env: SceneEnv, cup_x: float, num_spilled: int = 0) -> None:
    """Puts the cup with its balls at `cup_x` and then `num_spilled` of the 64 on the table 40 cm before it."""
    state = env.get_state()
    positions = state["physics"][1 : 1 + 193]  # the first number is the time
    balls = positions[BALLS].reshape(64, 3)
    balls[:, 0] += cup_x - positions[0]
    for index in range(num_spilled):
        balls[index] = cup_x, -0.4 - 0.1 * index, 0.0325
    positions[0] = cup_x
    env.set_state(state)


def test_reward_and_progress_by_hand():
    env = make()
    set_scene(env, cup_x=0.9, num_spilled=16)
    obs, reward, _, _, info = env.step(np.zeros(1, np.float32))
    # a quarter is spilled and 0.3 m are left: -10 / 4 - 0.3; three quarters kept on three quarters of the way
    assert reward == pytest.approx(-2.8, abs=1e-3)
    assert info["progress"] == pytest.approx(0.75 * 0.75, abs=1e-3) and not info["success"]
    np.testing.assert_allclose(obs[[0, 1, 2, 3, 5, 6]], [0.9, 0.28, 0.28, 0.24, 0.75, 0.25], atol=1e-3)
    env.reset()
    set_scene(env, cup_x=1.0)
    assert env.step(np.zeros(1, np.float32))[1] == pytest.approx(-0.2, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fixed", "random"])
def test_it_keeps_the_contract(start):
    env, different = make(start=start, episode_steps=20), []
    for cup_x, num_spilled in ((0.0, 0), (0.6, 0), (1.2, 0), (0.0, 5)):
        set_scene(env, cup_x, num_spilled)
        different.append(env.snapshot())
    check_step_env(env, make(start=start, episode_steps=20), np.stack(different))


@pytest.mark.slow
def test_a_fixed_start_is_one_of_a_thousand_and_a_random_one_is_new():
    known = np.array([np.random.default_rng(seed).uniform(-0.1, 0.1) for seed in range(1_000)])
    for start, is_known in (("fixed", True), ("random", False)):
        env = make(start=start)
        cups = np.array([env.reset()[1]["snapshot"].flat[0] for _ in range(3)])
        assert (np.abs(known - cups[:, None]).min(axis=1) < 2e-6).all() == is_known  # it is held while the water calms


def test_the_calm_cup_is_full_and_has_spilled_nothing():
    env = make(start="random")
    for _ in range(3):
        obs, info = env.reset()
        assert obs[5] == 1.0 and obs[6] == 0.0 and 0.15 < obs[4] < 0.3
        assert abs(obs[0]) <= 0.1 and info["progress"] < 0.1
        assert np.abs(env.get_state()["physics"][1 + 193 + 1 : 1 + 2 * 193]).max() < 0.5


def test_carefully_driven_it_succeeds_and_in_haste_it_spills():
    env, careful = make(), 0.0
    obs, info = env.reset()
    for _ in range(75):
        obs, reward, _, _, info = env.step(np.clip((1.2 - obs[:1]) / 0.088, -0.5, 0.5))
        careful += reward
    assert info["success"] and info["progress"] > 0.97 and obs[6] <= 1 / 64
    assert careful > -30
    start = env.reset()[0][0]
    assert env.step(np.ones(1, np.float32))[0][0] == pytest.approx(start + 0.088, abs=1e-4), "full speed: 88 mm a step"
    rng = np.random.default_rng(0)
    for _ in range(40):
        obs, _, _, _, info = env.step(rng.choice([-1, 1], 1).astype(np.float32))
    assert obs[6] > 0.1 and not info["success"]


def test_the_disc_is_where_the_paper_paints_it_and_never_covered():
    env = make()
    for cup_x in (0.0, 1.2):
        set_scene(env, cup_x)
        image = env.draw(env.snapshot()[None], 720)[0].astype(int)
        rows, columns = np.nonzero((image[..., 0] > 150) & (image[..., 1] < 60) & (image[..., 2] < 60))
        np.testing.assert_allclose([columns.mean(), rows.mean()], [632, 394], atol=1.5)
        assert np.ptp(columns) + 1 == pytest.approx(40, abs=4)
