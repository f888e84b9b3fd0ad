from typing import Any

import numpy as np
import pytest

from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.mujoco.env import SceneEnv
from rlvlm.envs.registry import make_env
from rlvlm.testing import check_step_env

CORNER_TO_CORNER = (0.125, -0.125)


def make(seed: int = 0, **fields: Any) -> SceneEnv:
    env = make_env("fold_cloth", StepEnvConfig(**({"episode_steps": 1} | fields)), seed)
    assert isinstance(env, SceneEnv)
    return env


def fold(env: SceneEnv, x: float, y: float) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
    """A new episode's only step: the corner is carried to (x, y), metres."""
    env.reset()
    return env.step(np.array([x, y], np.float32) / 0.15)


def yellow_and_blue(image: Frames) -> tuple[float, float]:
    """Shares of an image [H, W, 3] that show the cloth's front and its back."""
    red, _, blue = np.moveaxis(image.astype(int), -1, 0)
    return float((red > blue + 60).mean()), float((blue > red + 60).mean())


@pytest.fixture(scope="module")
def env():
    return make()


def test_the_flat_cloth_by_hand(env):
    obs, info = env.reset()
    points = obs[:108].reshape(6, 6, 3)
    np.testing.assert_allclose(points[0, 0], [-0.125, 0.125, 0.004], atol=1e-6)
    np.testing.assert_allclose(points[1, 5], [0.125, 0.075, 0.004], atol=1e-6)
    np.testing.assert_array_equal(obs[108:], obs[:3])  # the picker holds the upper left corner
    assert info["progress"] == 0.0 and not info["success"]


def test_corner_to_corner_lays_one_half_on_the_other(env):
    obs, reward, terminated, truncated, info = fold(env, *CORNER_TO_CORNER)
    assert terminated and not truncated
    assert reward == pytest.approx(0.0, abs=1e-3) and info["success"] and info["progress"] > 0.99
    points = obs[:108].reshape(6, 6, 3)
    rows, columns = np.nonzero(np.add.outer(np.arange(6), np.arange(6)) < 5)  # the half that was carried over
    np.testing.assert_allclose(points[rows, columns, :2], points[5 - columns, 5 - rows, :2], atol=0.008)


def test_the_nearer_to_the_corner_the_better(env):
    rewards = [fold(env, reach, -reach)[1] for reach in (-0.05, 0.05, 0.1, 0.115)]
    assert rewards == sorted(rewards)
    assert -0.7 < rewards[0] < -0.5 and -0.12 < rewards[3] < -0.02
    sideways = fold(env, 0.125, 0.05)
    assert sideways[1] < rewards[2] and not sideways[4]["success"]


@pytest.mark.slow
def test_it_keeps_the_contract(env):
    different = np.stack([fold(env, *target)[4]["snapshot"] for target in ((0.0, 0.0), (0.1, -0.1), (0.1, 0.0))])
    check_step_env(make(start="random"), make(start="random"), different)


def test_a_turned_cloth_has_its_goal_turned_with_it():
    env = make(start="random")
    corners = []
    for _ in range(3):
        obs, info = env.reset()
        corners.append(obs[105:107])
        assert info["progress"] == pytest.approx(0.0, abs=1e-6)
        assert np.abs(corners[-1]).max() <= 0.15  # the opposite corner stays within reach
        _, reward, _, _, info = env.step((corners[-1] / 0.15).astype(np.float32))
        assert reward > -0.05 and info["success"]
    assert len(np.unique(np.round(corners, 3), axis=0)) == 3


@pytest.mark.parametrize("size_px", [64, 300])
def test_a_fold_shows_the_back_above_the_front(env, size_px):
    flat = env.reset()[1]["snapshot"]
    half, whole = (fold(env, x, -x)[4]["snapshot"] for x in (0.05, 0.125))
    shares = [yellow_and_blue(image) for image in env.draw(np.stack([flat, half, whole]), size_px)]
    cloth = (0.25 / (2 * (0.42 - 0.005) * np.tan(np.radians(22.5)))) ** 2  # of the image, seen from 42 cm above
    assert shares[0][0] == pytest.approx(cloth, abs=0.03) and shares[0][1] < 0.001
    assert shares[1][0] > 0.15 and 0.05 < shares[1][1] < 0.25
    assert shares[2][0] < 0.02 and shares[2][1] == pytest.approx(cloth / 2, abs=0.04)
