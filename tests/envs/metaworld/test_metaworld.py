import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from metaworld.policies import SawyerDrawerOpenV3Policy
from stock_steps import actions, assert_steps_are_the_stock_ones

from rlvlm.core.errors import NumericsError
from rlvlm.core.steps import FloatArray
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.images import FrameStore
from rlvlm.envs.metaworld.env import MetaWorldEnv
from rlvlm.envs.registry import make_env
from rlvlm.testing import check_step_env

DRAWER_JOINT, DRAWER_X = 9, 10
"""Places in a snapshot: seven arm joints, two fingers, the drawer, then the drawer's body position."""


def make(seed: int = 0, **fields: Any) -> MetaWorldEnv:
    world = make_env("drawer_open", EnvConfig(**fields), seed)
    assert isinstance(world, MetaWorldEnv)
    return world


@pytest.fixture(scope="module")
def world() -> MetaWorldEnv:
    """One env for all tests that only draw, because opening a renderer takes half a second."""
    return make()


def drawn_out(world: MetaWorldEnv, *extensions: float) -> FloatArray:
    """Snapshots [N, S] of the present state with the drawer drawn out by `extensions`, metres."""
    snapshots = np.repeat(world.snapshot()[None], len(extensions), axis=0)
    snapshots[:, DRAWER_JOINT] = -np.array(extensions)
    return snapshots


def test_the_papers_start_by_hand() -> None:
    obs, info = make().reset()
    # the drawer stands at (0, 0.9, 0); its handle is 0.17 in front and 0.09 above
    np.testing.assert_allclose(obs[4:7], [0.0, 0.73, 0.09], atol=1e-3)
    np.testing.assert_allclose(obs[:3], [0.0, 0.75, 0.15], atol=0.02)
    np.testing.assert_array_equal(obs[36:], 0.0)
    np.testing.assert_array_equal(obs[18:36], obs[:18])
    np.testing.assert_allclose(info["snapshot"][DRAWER_JOINT:], [0.0, 0.0, 0.9, 0.0], atol=1e-3)
    assert info["snapshot"].shape == (13,)
    assert info["progress"] < 1e-3 and not info["success"]


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"start": "random", "robot": "visible"}], ids=["paper", "random"])
def test_it_is_a_env(fields: dict[str, Any]) -> None:
    world = make(episode_steps=25, **fields)
    check_step_env(world, make(episode_steps=25, **fields), drawn_out(world, 0.0, 0.02, 0.08, 0.16))


@pytest.mark.parametrize("start", ["fixed", "random"])
def test_physics_and_reward_are_the_stock_ones(start: str) -> None:
    hand_start = (0.0, 0.75, 0.15) if start == "fixed" else None
    assert_steps_are_the_stock_ones(make(start=start, seed=3), "drawer-open-v3", 60, hand_start)


@pytest.mark.filterwarnings("ignore:Constant")
@pytest.mark.parametrize(("start", "steps"), [("fixed", 60), ("random", 120)])
def test_the_scripted_policy_opens_the_drawer(start: str, steps: int) -> None:
    world = make(start=start)
    policy = SawyerDrawerOpenV3Policy()
    obs, info = world.reset()
    infos = [info]
    for _ in range(steps):
        action = np.clip(policy.get_action(obs.astype(float)), -1, 1).astype(np.float32)
        obs, _, _, _, info = world.step(action)
        infos.append(info)
    progress = np.array([info["progress"] for info in infos])
    success = np.array([info["success"] for info in infos])
    assert progress[0] < 0.01 and progress[-1] == 1.0
    assert success[-1] and not success[progress < 0.95].any()
    first, _ = FrameStore(world, 8).distinct(np.stack([info["snapshot"] for info in infos]))
    assert len(first) < len(infos)  # while the arm approaches, the image stands still


def test_random_starts_cover_the_stock_range() -> None:
    world = make(start="random")
    xs = np.array([world.reset()[1]["snapshot"][DRAWER_X] for _ in range(30)])
    assert (np.abs(xs) <= 0.1).all()
    assert xs.min() < -0.05 and xs.max() > 0.05
    obs, info = world.reset()
    np.testing.assert_allclose(obs[4], info["snapshot"][DRAWER_X], atol=1e-3)


def test_the_time_limit_is_ours_and_may_exceed_the_stock_500() -> None:
    world = make(episode_steps=3)
    assert [world.step(action)[2:4] for action in actions(3)] == [(False, False), (False, False), (False, True)]
    world = make(episode_steps=600)
    assert [world.step(action)[3] for action in actions(600)] == [False] * 599 + [True]


def test_an_action_that_is_not_finite_is_refused() -> None:
    with pytest.raises(NumericsError, match="finite"):
        make().step(np.array([0.0, np.nan, 0.0, 0.0], np.float32))


def test_the_drawer_is_well_visible_at_64_pixels(world: MetaWorldEnv) -> None:
    closed, half, opened = world.draw(drawn_out(world, 0.0, 0.08, 0.16), 64).astype(int)
    is_green = closed[..., 1] > closed[..., 0] + 30
    assert 0.1 < is_green.mean() < 0.5
    rows, columns = np.nonzero(is_green)
    assert rows.min() > 10 and rows.max() < 60  # upright and in the frame: sky above, table below
    assert closed[:10].std() < 10
    for one, other in ((closed, half), (half, opened)):
        assert (np.abs(one - other).max(-1) > 20).mean() > 0.05
    to_the_right = np.nonzero((opened[..., 1] > opened[..., 0] + 30).any(0))[0].max()
    assert to_the_right > columns.max() + 5  # not mirrored: the drawer opens to the right


def test_a_hidden_robot_changes_neither_image_nor_key_and_a_visible_one_both(world: MetaWorldEnv) -> None:
    visible = make(robot="visible")
    moved = np.repeat(world.snapshot()[None], 2, axis=0)
    moved[1, :9] += 0.1
    one, other = world.draw(moved, 64)
    np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(*world.image_key(moved))
    one, other = visible.draw(moved, 64)
    assert (one != other).mean() > 0.01
    assert (visible.image_key(moved)[0] != visible.image_key(moved)[1]).any()
    assert (world.draw(moved[:1], 64) != visible.draw(moved[:1], 64)).mean() > 0.01


def test_a_moved_drawer_is_drawn_where_the_snapshot_says(world: MetaWorldEnv) -> None:
    snapshots = drawn_out(world, 0.0, 0.0)
    snapshots[1, DRAWER_X] = 0.1
    left, right = world.draw(snapshots, 64).astype(int)
    centre = [np.nonzero(image[..., 1] > image[..., 0] + 30)[1].mean() for image in (left, right)]
    assert centre[1] > centre[0] + 5


def test_a_state_survives_a_file(tmp_path: Path) -> None:
    world = make(start="random")
    for action in actions(5):
        world.step(action)
    state = world.get_state()
    words = {name: value for name, value in state.items() if not isinstance(value, np.ndarray)}
    (tmp_path / "state.json").write_text(json.dumps(words))
    np.savez(tmp_path / "state.npz", **{name: value for name, value in state.items() if name not in words})
    future = [world.step(action)[:2] for action in actions(20, seed=1)] + [world.reset()]
    with np.load(tmp_path / "state.npz") as arrays:
        stored = dict(arrays) | json.loads((tmp_path / "state.json").read_text())
    twin = make(start="random", seed=1)
    twin.set_state(stored)
    again = [twin.step(action)[:2] for action in actions(20, seed=1)] + [twin.reset()]
    for (obs, rest), (other_obs, other_rest) in zip(future[:-1], again[:-1], strict=True):
        np.testing.assert_array_equal(obs, other_obs)
        assert rest == other_rest
    np.testing.assert_array_equal(future[-1][0], again[-1][0])


def test_snapshots_of_another_shape_are_refused(world: MetaWorldEnv) -> None:
    with pytest.raises(ValueError, match=r"\[N, 13\]"):
        world.draw(world.snapshot(), 64)
