from typing import Any

import numpy as np
import pytest

from rlvlm.envs.config import EnvConfig
from rlvlm.envs.mujoco.scene import SceneWorld
from rlvlm.envs.registry import make_world
from rlvlm.testing import check_world
from rlvlm.types.steps import FloatArray

BALLS = slice(1, None)
"""In a snapshot: the cup's x, then 64 places."""


def make(seed: int = 0, **fields: Any) -> SceneWorld:
    world = make_world("pass_water", EnvConfig(**({"episode_steps": 75} | fields)), seed)
    assert isinstance(world, SceneWorld)
    return world


def set_scene(world: SceneWorld, cup_x: float, num_spilled: int = 0) -> None:
    """Puts the cup with its balls at `cup_x` and then `num_spilled` of the 64 on the table 40 cm before it."""
    state = world.get_state()
    positions = state["physics"][1 : 1 + 193]  # the first number is the time
    balls = positions[BALLS].reshape(64, 3)
    balls[:, 0] += cup_x - positions[0]
    for index in range(num_spilled):
        balls[index] = cup_x, -0.4 - 0.1 * index, 0.0325
    positions[0] = cup_x
    world.set_state(state)


def drive(world: SceneWorld, top_speed: float) -> tuple[float, FloatArray, dict[str, Any]]:
    """Return, last observation and info of an episode that goes to the goal at `top_speed` of the largest action."""
    obs, info = world.reset()
    total = 0.0
    for _ in range(75):
        action = np.clip((1.2 - obs[:1]) / 0.088, -top_speed, top_speed)
        obs, reward, _, _, info = world.step(action)
        total += reward
    return total, obs, info


def test_reward_and_progress_by_hand() -> None:
    world = make()
    set_scene(world, cup_x=0.9, num_spilled=16)
    obs, reward, _, _, info = world.step(np.zeros(1, np.float32))
    # a quarter is spilled and 0.3 m are left: -10 / 4 - 0.3; three quarters kept on three quarters of the way
    assert reward == pytest.approx(-2.8, abs=1e-3)
    assert info["progress"] == pytest.approx(0.75 * 0.75, abs=1e-3) and not info["success"]
    np.testing.assert_allclose(obs[[0, 1, 2, 3, 5, 6]], [0.9, 0.28, 0.28, 0.24, 0.75, 0.25], atol=1e-3)
    world.reset()
    set_scene(world, cup_x=1.0)
    assert world.step(np.zeros(1, np.float32))[1] == pytest.approx(-0.2, abs=1e-3)


def test_a_step_at_full_speed_moves_the_cup_by_88_mm() -> None:
    world = make()
    start = world.reset()[0][0]
    assert world.step(np.ones(1, np.float32))[0][0] == pytest.approx(start + 0.088, abs=1e-4)
    assert world.step(-np.ones(1, np.float32))[0][0] == pytest.approx(start, abs=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fixed", "random"])
def test_it_is_a_world(start: str) -> None:
    world, different = make(start=start, episode_steps=20), []
    for cup_x, num_spilled in ((0.0, 0), (0.6, 0), (1.2, 0), (0.0, 5)):
        set_scene(world, cup_x, num_spilled)
        different.append(world.snapshot())
    check_world(world, make(start=start, episode_steps=20), np.stack(different))


def test_the_calm_cup_is_full_and_has_spilled_nothing() -> None:
    world = make(start="random")
    for _ in range(3):
        obs, info = world.reset()
        assert obs[5] == 1.0 and obs[6] == 0.0 and 0.15 < obs[4] < 0.3
        assert abs(obs[0]) <= 0.1 and info["progress"] < 0.1
        assert np.abs(world.get_state()["physics"][1 + 193 + 1 : 1 + 2 * 193]).max() < 0.5


def test_carefully_driven_it_succeeds_and_in_haste_it_spills() -> None:
    careful, obs, info = drive(make(), 0.5)
    assert info["success"] and info["progress"] > 0.97 and obs[6] <= 1 / 64
    assert careful > -30
    world = make()
    rng = np.random.default_rng(0)
    for _ in range(40):
        obs, _, _, _, info = world.step(rng.choice([-1, 1], 1).astype(np.float32))
    assert obs[6] > 0.1 and not info["success"]


def test_spilled_water_comes_to_rest() -> None:
    world = make()
    set_scene(world, cup_x=0.0, num_spilled=4)
    for _ in range(10):
        world.step(np.zeros(1, np.float32))
    before = world.snapshot()[BALLS][:12]
    world.step(np.zeros(1, np.float32))
    np.testing.assert_allclose(world.snapshot()[BALLS][:12], before, atol=1e-3)


def test_the_disc_is_where_the_paper_paints_it_and_never_covered() -> None:
    world = make()
    for cup_x in (0.0, 1.2):
        set_scene(world, cup_x)
        picture = world.draw(world.snapshot()[None], 720)[0].astype(int)
        rows, columns = np.nonzero((picture[..., 0] > 150) & (picture[..., 1] < 60) & (picture[..., 2] < 60))
        np.testing.assert_allclose([columns.mean(), rows.mean()], [632, 394], atol=1.5)
        assert np.ptp(columns) + 1 == pytest.approx(40, abs=4)


def test_water_is_blue_and_moves_through_the_picture_at_64_pixels() -> None:
    world, middles = make(), []
    for cup_x in (0.0, 0.6, 1.2):
        set_scene(world, cup_x)
        picture = world.draw(world.snapshot()[None], 64)[0].astype(int)
        is_blue = picture[..., 2] > picture[..., 0] + 60
        assert 15 < is_blue.sum() < 300
        middles.append(np.nonzero(is_blue)[1].mean())
    assert middles[0] + 10 < middles[1] < middles[2] - 10
