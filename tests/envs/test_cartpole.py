import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlvlm.envs.cartpole import CartPole
from rlvlm.envs.config import StepEnvConfig
from rlvlm.testing import check_step_env

LEFT, RIGHT = np.array([-1.0], np.float32), np.array([1.0], np.float32)


def make(seed: int = 0, **fields: Any) -> CartPole:
    return CartPole(StepEnvConfig(**{"episode_steps": 100, **fields}), seed)


def angles(*degrees: float) -> np.ndarray:
    return np.radians(np.array(degrees, np.float32))[:, None]


@pytest.mark.parametrize("fields", [{}, {"start": "random", "episode_steps": 25}], ids=["paper", "random"])
def test_it_keeps_the_contract(fields):
    check_step_env(make(**fields), make(**fields), angles(-30.0, -1.0, 0.0, 1.0, 30.0))


def test_one_step_by_hand():
    env = make()
    env.reset()
    env.set_state(env.get_state() | {"state": np.zeros(4)})
    obs, reward, terminated, truncated, info = env.step(RIGHT)
    # 10 N on 1.1 kg push 9.0909 m/s2; the pole turns back by 9.0909 / (0.5 (4/3 - 0.1/1.1)) = 14.634 rad/s2
    # and its share 0.1 0.5 14.634 / 1.1 = 0.6652 adds to the cart's 9.0909; positions follow a step later
    np.testing.assert_allclose(obs, [0.0, 0.02 * 9.7561, 0.0, -0.02 * 14.634], atol=1e-4)
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info["progress"] == 1.0 and not info["success"]
    obs, reward, _, _, _ = env.step(RIGHT)
    assert obs[2] == pytest.approx(-0.02 * 0.29268, abs=1e-5)
    assert reward == pytest.approx(-math.degrees(0.02 * 0.29268), abs=1e-3)


def test_the_equations_are_those_of_gymnasium():
    ours, theirs = make(), gym.make("CartPole-v1").unwrapped
    obs, _ = ours.reset(seed=4)
    theirs.reset(seed=4)
    theirs.state = tuple(ours.get_state()["state"])
    for is_right in (1, 0, 0, 1, 0, 1, 1):
        obs = ours.step(RIGHT if is_right else LEFT)[0]
        np.testing.assert_allclose(obs, theirs.step(is_right)[0], rtol=1e-5)


def test_nothing_ends_an_episode_but_time_and_the_pole_stops_at_30_degrees():
    env = make(episode_steps=90)
    env.reset()
    steps = [env.step(RIGHT) for _ in range(90)]
    assert [step[2] for step in steps] == [False] * 90
    assert [step[3] for step in steps] == [False] * 89 + [True]
    obs, reward, _, _, info = steps[-1]
    assert obs[0] == pytest.approx(1.92) and reward == pytest.approx(-30.0)
    assert info["progress"] == 0.0 and not info["success"]


def test_success_is_a_second_upright():
    env = make()
    obs, _ = env.reset(seed=0)
    infos = []
    for _ in range(100):
        obs, _, _, _, info = env.step(env.scripted_action(obs))
        infos.append(info)
    assert [info["success"] for info in infos] == [False] * 49 + [True] * 51
    env.step(RIGHT)
    for _ in range(99):
        info = env.step(RIGHT)[4]
    assert not info["success"]


def test_starts():
    fixed, random = (
        np.abs([make(start=start).reset(seed=s)[0] for s in range(40)]).max(0) for start in ("fixed", "random")
    )
    assert (fixed <= 0.05).all() and (fixed > 0.03).all()
    assert math.radians(10) < random[2] <= math.radians(20)


def test_the_image_by_hand():
    upright, left, right = make().draw(angles(0.0, -30.0, 30.0), 200)
    assert tuple(upright[90, 100]) == (202, 152, 101) and tuple(upright[90, 80]) == (255, 255, 255)
    assert tuple(upright[160, 80]) == (0, 0, 0) and tuple(upright[150, 20]) != (255, 255, 255)
    is_brown = (np.abs(upright.astype(int) - (202, 152, 101)).max(-1) < 10).sum()
    assert is_brown == pytest.approx(10 * 125 - math.pi * 5**2, rel=0.05)  # less the axle
    # 90 above the axle of a pole that leans 30 degrees: 52 to the right at 52.5
    assert tuple(right[52, 152]) == (202, 152, 101) and tuple(left[52, 47]) == (202, 152, 101)
    np.testing.assert_array_equal(left, right[:, ::-1])
