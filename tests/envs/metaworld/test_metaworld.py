"""MetaWorld's tasks: the reference method's three scenes by hand and by eye, and every stock task by its name."""

from typing import Any

import numpy as np
import pytest
from metaworld.env_dict import ALL_V3_ENVIRONMENTS
from metaworld.policies import SawyerDrawerOpenV3Policy

from rlvlm.core.errors import NumericsError
from rlvlm.core.steps import FloatArray
from rlvlm.envs.images import FrameStore
from rlvlm.envs.metaworld.config import MetaWorldConfig
from rlvlm.envs.metaworld.env import MetaWorldEnv
from rlvlm.envs.metaworld.goals import STOCK_GOALS
from rlvlm.envs.registry import find_task, make_env, task_goal
from rlvlm.testing import check_step_env

DRAWER_JOINT, DRAWER_X = 9, 10
"""Places in drawer_open's snapshots: seven arm joints, two fingers, the drawer, then the drawer's body position."""
OBJECT_XY, GOAL_X = slice(9, 11), 16
"""In those of soccer and sweep_into: the free joint of ball or cube; soccer's goal comes after its seven numbers."""


def make(task: str = "drawer_open", seed: int = 0, **fields: Any) -> MetaWorldEnv:
    stock = {"episode_steps": 25, "robot": "visible"} if task.startswith("metaworld/") else {}
    env = make_env(task, MetaWorldConfig(**(stock | fields)), seed)
    assert isinstance(env, MetaWorldEnv)
    return env


@pytest.fixture(scope="module")
def env():
    """One env for all tests that only draw, because opening a renderer takes half a second."""
    return make()


@pytest.fixture(scope="module")
def soccer():
    """Likewise; who plays it begins with a reset."""
    return make("soccer")


@pytest.fixture(scope="module")
def sweep_into():
    """Likewise."""
    return make("sweep_into")


def with_values(env: MetaWorldEnv, place: int | slice, *values: Any) -> FloatArray:
    """Snapshots [N, S] of the present state with each of `values`, metres, at `place`."""
    snapshots = np.repeat(env.snapshot()[None], len(values), axis=0)
    snapshots[:, place] = values
    return snapshots


def drawn_out(env: MetaWorldEnv, *extensions: float) -> FloatArray:
    """With the drawer drawn out by `extensions`, metres."""
    return with_values(env, DRAWER_JOINT, *(-extension for extension in extensions))


def test_the_drawers_start_by_hand():
    obs, info = make().reset()
    # the drawer stands at (0, 0.9, 0); its handle is 0.17 in front and 0.09 above
    np.testing.assert_allclose(obs[4:7], [0.0, 0.73, 0.09], atol=1e-3)
    np.testing.assert_allclose(obs[:3], [0.0, 0.75, 0.15], atol=0.02)
    np.testing.assert_array_equal(obs[36:], 0.0)
    np.testing.assert_array_equal(obs[18:36], obs[:18])
    np.testing.assert_allclose(info["snapshot"][DRAWER_JOINT:], [0.0, 0.0, 0.9, 0.0], atol=1e-3)
    assert info["snapshot"].shape == (13,)
    assert info["progress"] < 1e-3 and not info["success"]


def test_the_other_starts_by_hand(soccer, sweep_into):
    obs, info = soccer.reset()
    np.testing.assert_allclose(obs[:3], [0.0, 0.56, 0.05], atol=0.03)
    np.testing.assert_allclose(obs[4:7], [0.0, 0.65, 0.03], atol=1e-3)
    np.testing.assert_allclose(info["snapshot"][GOAL_X:], [0.0, 0.85, 0.0], atol=1e-6)
    assert info["progress"] == 0.0 and not info["success"]
    obs, info = sweep_into.reset()
    np.testing.assert_allclose(obs[:3], [0.0, 0.53, 0.05], atol=0.05)  # the table stops the fingers
    np.testing.assert_allclose(obs[4:7], [0.0, 0.65, 0.07], atol=1e-3)  # on the table, whose top is 5 cm above the hole
    assert info["progress"] == 0.0 and not info["success"]


def drawers(env: MetaWorldEnv) -> FloatArray:
    return drawn_out(env, 0.0, 0.02, 0.08, 0.16)


def objects(env: MetaWorldEnv) -> FloatArray:
    return with_values(env, OBJECT_XY, (0.0, 0.65), (0.0, 0.75), (0.05, 0.75), (0.0, 0.85))


def anything(env: MetaWorldEnv) -> FloatArray:
    scenes = np.repeat(env.snapshot()[None], 3, axis=0)
    scenes[1, 1] += 0.3
    scenes[2, -1] += 0.1
    return scenes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "different", "fields"),
    [
        *((task, drawers if task == "drawer_open" else objects, fields)
          for task in ("drawer_open", "soccer", "sweep_into")
          for fields in ({}, {"start": "near"}, {"start": "random", "robot": "visible"})),
        ("metaworld/hammer-v3", anything, {}),  # with two objects, and without a measured distance
        ("metaworld/bin-picking-v3", anything, {"start": "random"}),  # it notes its first step
    ],
)  # fmt: skip
def test_they_keep_the_contract(task, different, fields):
    env, twin = (make(task, episode_steps=25, **fields) for _ in range(2))
    check_step_env(env, twin, different(env))


def actions(num_steps: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).uniform(-1, 1, (num_steps, 4)).astype(np.float32)


@pytest.mark.parametrize(
    ("task", "start", "steps"),
    [
        *(("drawer_open", start, 60) for start in ("fixed", "near", "random")),
        *(pytest.param(task, "random", 60, marks=pytest.mark.slow) for task in ("soccer", "sweep_into")),
        *(pytest.param(f"metaworld/{name}-v3", "random", 20, marks=pytest.mark.slow)
          for name in ("door-open", "stick-push", "bin-picking")),
    ],
)  # fmt: skip
def test_physics_and_reward_are_the_stock_ones(task, start, steps):
    """Observations, rewards and success of an episode agree to the bit with those of a stock env of the same start."""
    env = make(task, start=start, seed=3)
    env.reset()
    stock = ALL_V3_ENVIRONMENTS[env._scene.env_name]()
    stock._set_task_called, stock._last_rand_vec = True, env.get_state()["stock._last_rand_vec"]
    if start != "random":
        stock.hand_init_pos = env.get_state()["stock.hand_init_pos"]
    if start == "fixed":
        np.testing.assert_array_equal(stock.hand_init_pos, [0.0, 0.75, 0.15])
    stock.reset()
    if start == "near":
        stock.reset()  # the hand moves before things are placed: the first time among those of the model's file
    for index, action in enumerate(actions(steps)):
        obs, reward, _, _, info = env.step(action)
        stock_obs, stock_reward, _, _, stock_info = stock.step(action)
        # the stock env's first observation is of the previous placement, and it is stacked once more
        known = slice(None) if index else slice(18)
        np.testing.assert_array_equal(obs[known], stock_obs.astype(np.float32)[known])
        assert reward == stock_reward
        assert info["success"] == bool(stock_info["success"])


@pytest.mark.filterwarnings("ignore:Constant")
@pytest.mark.parametrize(("start", "steps"), [("fixed", 60), ("random", 120)])
def test_the_scripted_policy_opens_the_drawer(start, steps):
    env = make(start=start)
    policy = SawyerDrawerOpenV3Policy()
    obs, info = env.reset()
    infos = [info]
    for _ in range(steps):
        action = np.clip(policy.get_action(obs.astype(float)), -1, 1).astype(np.float32)
        obs, _, _, _, info = env.step(action)
        infos.append(info)
    progress = np.array([info["progress"] for info in infos])
    success = np.array([info["success"] for info in infos])
    assert progress[0] < 0.01 and progress[-1] == 1.0
    assert success[-1] and not success[progress < 0.95].any()
    first, _ = FrameStore(env, 8).distinct(np.stack([info["snapshot"] for info in infos]))
    assert len(first) < len(infos)  # while the arm approaches, the image stands still


@pytest.mark.parametrize("task", ["soccer", "sweep_into"])
def test_progress_rises_to_success_under_metaworlds_own_script(task, request):
    env = request.getfixturevalue(task)
    obs, info = env.reset()
    infos = [info]
    while not infos[-1]["success"]:
        obs, _, _, is_late, info = env.step(np.clip(env.scripted_action(obs), -1, 1))
        infos.append(info)
        assert not is_late
    progress = np.array([info["progress"] for info in infos])
    assert progress[0] == 0.0 and progress[-1] == progress.max()
    # success is 7 cm from the goal's middle or 5 cm from the hole's, of about 20 cm at the start
    assert 0.6 < progress[-1] < 0.9 and progress[-2] < 0.8


def test_random_starts_cover_the_stock_range():
    env = make(start="random")
    xs = np.array([env.reset()[1]["snapshot"][DRAWER_X] for _ in range(30)])
    assert (np.abs(xs) <= 0.1).all()
    assert xs.min() < -0.05 and xs.max() > 0.05
    obs, info = env.reset()
    np.testing.assert_allclose(obs[4], info["snapshot"][DRAWER_X], atol=1e-3)
    soccer = make("soccer", start="random")
    snapshots = np.stack([soccer.reset()[1]["snapshot"] for _ in range(12)])
    assert np.ptp(snapshots[:, OBJECT_XY.start]) > 0.08 and np.ptp(snapshots[:, GOAL_X]) > 0.08


@pytest.mark.slow
@pytest.mark.parametrize("task", ["drawer_open", "soccer", "sweep_into"])
def test_near_starts_vary_as_random_ones_and_the_hand_is_where_the_paper_has_it(task):
    fixed, near = make(task, start="fixed").reset()[0], make(task, start="near")
    starts = np.stack([near.reset()[0] for _ in range(12)])
    assert np.ptp(starts[:, 4]) > 0.08  # metres, of the object along the table
    np.testing.assert_allclose(starts[:, :3] - starts[:, 4:7], np.tile(fixed[:3] - fixed[4:7], (12, 1)), atol=0.01)
    same = make(task, start="random")
    np.testing.assert_allclose(starts[:, 4:6], np.stack([same.reset()[0][4:6] for _ in range(12)]), atol=1e-3)


def test_the_time_limit_is_ours_and_may_exceed_the_stock_500():
    env = make(episode_steps=501)
    ends = [env.step(action)[2:4] for action in actions(501)]
    assert ends == [(False, False)] * 500 + [(False, True)]
    with pytest.raises(NumericsError, match="finite"):
        env.step(np.array([0.0, np.nan, 0.0, 0.0], np.float32))


def test_every_stock_task_has_a_goal_in_words():
    assert STOCK_GOALS.keys() == ALL_V3_ENVIRONMENTS.keys()
    assert task_goal("metaworld/door-open-v3") == "open the door"
    assert find_task("metaworld/door-open-v3").goal_state == "the door is open"


@pytest.mark.slow
def test_the_fixed_start_is_one_of_the_stock_ones_and_the_same_in_every_run():
    starts = [make("metaworld/box-close-v3", seed=seed).snapshot() for seed in (0, 1)]
    np.testing.assert_array_equal(*starts)
    random = [make("metaworld/box-close-v3", seed=seed, start="random").snapshot() for seed in (0, 1)]
    assert not np.array_equal(*random)


def test_a_state_at_the_start_is_restored_in_the_middle_of_an_episode():
    # bin-picking notes the first step's distance in what is None at a start
    env, other = (make("metaworld/bin-picking-v3", start="random", seed=seed) for seed in (0, 1))
    env.reset()
    state = env.get_state()
    future = [env.step(action)[:2] for action in actions(20)]
    for action in actions(5, seed=1):
        other.step(action)
    other.set_state(state)
    for (obs, reward), action in zip(future, actions(20), strict=True):
        again, other_reward, *_ = other.step(action)
        np.testing.assert_array_equal(again, obs)
        assert other_reward == reward


def test_progress_without_a_measured_distance_follows_the_door():
    env = make("metaworld/door-open-v3")
    assert env.reset()[1]["progress"] == 0.0
    progress = []
    for angle in (0.0, -0.5, -1.0, -1.5):
        env._stock.data.joint("doorjoint").qpos = angle
        progress.append(env.step(np.zeros(4, np.float32))[4]["progress"])
    assert progress == sorted(progress) and progress[-1] > 0.8


def test_the_drawer_is_well_visible_at_64_pixels(env):
    closed, half, opened = env.draw(drawn_out(env, 0.0, 0.08, 0.16), 64).astype(int)
    is_green = closed[..., 1] > closed[..., 0] + 30
    assert 0.1 < is_green.mean() < 0.5
    rows, columns = np.nonzero(is_green)
    assert rows.min() > 10 and rows.max() < 60  # upright and in the frame: sky above, table below
    assert closed[:10].std() < 10
    for one, other in ((closed, half), (half, opened)):
        assert (np.abs(one - other).max(-1) > 20).mean() > 0.05
    to_the_right = np.nonzero((opened[..., 1] > opened[..., 0] + 30).any(0))[0].max()
    assert to_the_right > columns.max() + 5  # not mirrored: the drawer opens to the right


def test_a_hidden_robot_changes_neither_image_nor_key_and_a_visible_one_both(env):
    visible = make(robot="visible")
    moved = np.repeat(env.snapshot()[None], 2, axis=0)
    moved[1, :9] += 0.1
    one, other = env.draw(moved, 64)
    np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(*env.image_key(moved))
    one, other = visible.draw(moved, 64)
    assert (one != other).mean() > 0.01
    assert (visible.image_key(moved)[0] != visible.image_key(moved)[1]).any()
    assert (env.draw(moved[:1], 64) != visible.draw(moved[:1], 64)).mean() > 0.01


def test_bodies_that_a_reset_moves_are_drawn_where_the_snapshot_says(env, soccer):
    snapshots = drawn_out(env, 0.0, 0.0)
    snapshots[1, DRAWER_X] = 0.1
    left, right = (centre(image, image[..., 1] > image[..., 0] + 30) for image in env.draw(snapshots, 64).astype(int))
    assert right[1] > left[1] + 5 / 64
    soccer.reset()
    snapshots = with_values(soccer, OBJECT_XY, (5.0, 5.0), (5.0, 5.0))
    snapshots[1, GOAL_X] = 0.1
    one, other = (centre(image, image[..., 2] > image[..., 0] + 30) for image in soccer.draw(snapshots, 64).astype(int))
    assert np.linalg.norm(one - other) > 0.05


def centre(image: FloatArray, is_it: FloatArray) -> FloatArray:
    """(row, column) of the middle of the pixels that are it, in [0, 1]."""
    return np.array([places.mean() for places in np.nonzero(is_it)]) / len(image)


def test_the_ball_is_well_visible_and_the_image_upright(soccer):
    soccer.reset()
    snapshots = with_values(soccer, OBJECT_XY, (0.0, 0.65), (0.0, 0.75), (0.1, 0.65), (5.0, 5.0))
    near, far, right, empty = soccer.draw(snapshots, 64).astype(int)
    places = [centre(image, np.abs(image - empty).max(-1) > 25) for image in (near, far, right)]
    net = centre(empty, (empty[..., 2] > empty[..., 0] + 30))
    assert all(0.1 < value < 0.9 for place in places for value in place)
    # the camera looks from the right over the table: the goal is up and to the right, and so the ball goes
    assert net[0] < places[0][0] and net[1] > places[0][1]
    assert np.linalg.norm(places[1] - net) < np.linalg.norm(places[0] - net)
    assert places[2][0] > places[0][0]  # nearer to the camera is lower: not upside down


def test_the_cube_is_flat_green_and_moves_down_the_image_to_the_hole(sweep_into):
    sweep_into.reset()
    snapshots = with_values(sweep_into, OBJECT_XY, (0.0, 0.65), (0.0, 0.84), (0.1, 0.65))
    start, inside, right = sweep_into.draw(snapshots, 64).astype(int)
    places = []
    for image in (start, inside, right):
        is_green = (image[..., 1] > 150) & (image[..., 0] < 30) & (image[..., 2] < 30)
        assert 0.005 < is_green.mean() < 0.05
        places.append(centre(image, is_green))
    assert places[1][0] > places[0][0] + 0.2  # the camera stands behind the hole: what comes nearer is lower
    assert places[2][1] < places[0][1] - 0.1  # ... and the robot's right is its left: not mirrored
