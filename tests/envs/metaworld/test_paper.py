from typing import Any

import numpy as np
import pytest
from stock_steps import assert_steps_are_the_stock_ones

from rlvlm.core.steps import FloatArray
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.metaworld.env import SOCCER, SWEEP_INTO, MetaWorldEnv, MetaWorldTask
from rlvlm.testing import check_step_env

OBJECT_XY = slice(9, 11)
"""Places in a snapshot: seven arm joints, two fingers, then the free joint of ball or cube."""
GOAL_X = 16
"""Soccer: after the ball's position and turn comes the goal's position."""
SCENES = pytest.mark.parametrize("scene", [SOCCER, SWEEP_INTO], ids=lambda scene: scene.env_name)


def make(scene: MetaWorldTask, seed: int = 0, **fields: Any) -> MetaWorldEnv:
    return MetaWorldEnv(scene, EnvConfig(**fields), seed)


def with_object_at(world: MetaWorldEnv, *places: tuple[float, float]) -> FloatArray:
    """Snapshots [N, S] of the present state with the object at `places`, metres."""
    snapshots = np.repeat(world.snapshot()[None], len(places), axis=0)
    snapshots[:, OBJECT_XY] = places
    return snapshots


def test_the_papers_starts_by_hand() -> None:
    obs, info = make(SOCCER).reset()
    np.testing.assert_allclose(obs[:3], [0.0, 0.56, 0.05], atol=0.03)
    np.testing.assert_allclose(obs[4:7], [0.0, 0.65, 0.03], atol=1e-3)
    np.testing.assert_allclose(info["snapshot"][GOAL_X:], [0.0, 0.85, 0.0], atol=1e-6)
    assert info["progress"] == 0.0 and not info["success"]
    obs, info = make(SWEEP_INTO).reset()
    np.testing.assert_allclose(obs[:3], [0.0, 0.53, 0.05], atol=0.05)  # the table stops the fingers
    np.testing.assert_allclose(obs[4:7], [0.0, 0.65, 0.07], atol=1e-3)  # on the table, whose top is 5 cm above the hole
    assert info["progress"] == 0.0 and not info["success"]


@pytest.mark.slow
@SCENES
@pytest.mark.parametrize("fields", [{}, {"start": "random", "robot": "visible"}], ids=["paper", "random"])
def test_they_are_envs(scene: MetaWorldTask, fields: dict[str, Any]) -> None:
    world = make(scene, episode_steps=25, **fields)
    places = with_object_at(world, (0.0, 0.65), (0.0, 0.75), (0.05, 0.75), (0.0, 0.85))
    check_step_env(world, make(scene, episode_steps=25, **fields), places)


@pytest.mark.slow
@SCENES
def test_physics_and_reward_are_the_stock_ones(scene: MetaWorldTask) -> None:
    assert_steps_are_the_stock_ones(make(scene, start="random", seed=3), scene.env_name, 60)


@SCENES
def test_progress_rises_to_success_under_metaenvs_own_script(scene: MetaWorldTask) -> None:
    world = make(scene)
    obs, info = world.reset()
    infos = [info]
    while not infos[-1]["success"]:
        obs, _, _, is_late, info = world.step(np.clip(world.scripted_action(obs), -1, 1))
        infos.append(info)
        assert not is_late
    progress = np.array([info["progress"] for info in infos])
    assert progress[0] == 0.0 and progress[-1] == progress.max()
    # success is 7 cm from the goal's middle or 5 cm from the hole's, of about 20 cm at the start
    assert 0.6 < progress[-1] < 0.9 and progress[-2] < 0.8


def centre(image: FloatArray, is_it: FloatArray) -> FloatArray:
    """(row, column) of the middle of the pixels that are it, in [0, 1]."""
    return np.array([places.mean() for places in np.nonzero(is_it)]) / len(image)


def test_the_ball_is_well_visible_and_the_image_upright() -> None:
    world = make(SOCCER)
    near, far, right = world.draw(with_object_at(world, (0.0, 0.65), (0.0, 0.75), (0.1, 0.65)), 64).astype(int)
    empty = world.draw(with_object_at(world, (5.0, 5.0)), 64)[0].astype(int)
    places = [centre(image, np.abs(image - empty).max(-1) > 25) for image in (near, far, right)]
    net = centre(empty, (empty[..., 2] > empty[..., 0] + 30))
    assert all(0.1 < value < 0.9 for place in places for value in place)
    # the camera looks from the right over the table: the goal is up and to the right, and so the ball goes
    assert net[0] < places[0][0] and net[1] > places[0][1]
    assert np.linalg.norm(places[1] - net) < np.linalg.norm(places[0] - net)
    assert places[2][0] > places[0][0]  # nearer to the camera is lower: not upside down


def test_the_cube_is_flat_green_and_moves_down_the_image_to_the_hole() -> None:
    world = make(SWEEP_INTO)
    start, inside, right = world.draw(with_object_at(world, (0.0, 0.65), (0.0, 0.84), (0.1, 0.65)), 64).astype(int)
    places = []
    for image in (start, inside, right):
        is_green = (image[..., 1] > 150) & (image[..., 0] < 30) & (image[..., 2] < 30)
        assert 0.005 < is_green.mean() < 0.05
        places.append(centre(image, is_green))
    assert places[1][0] > places[0][0] + 0.2  # the camera stands behind the hole: what comes nearer is lower
    assert places[2][1] < places[0][1] - 0.1  # ... and the robot's right is its left: not mirrored


def test_a_moved_goal_is_drawn_where_the_snapshot_says() -> None:
    world = make(SOCCER)
    snapshots = with_object_at(world, (5.0, 5.0), (5.0, 5.0))
    snapshots[1, GOAL_X] = 0.1
    one, other = (centre(p, p[..., 2] > p[..., 0] + 30) for p in world.draw(snapshots, 64).astype(int))
    assert np.linalg.norm(one - other) > 0.05


def test_random_starts_cover_the_stock_range() -> None:
    world = make(SOCCER, start="random")
    snapshots = np.stack([world.reset()[1]["snapshot"] for _ in range(12)])
    assert np.ptp(snapshots[:, 9]) > 0.08 and np.ptp(snapshots[:, GOAL_X]) > 0.08
