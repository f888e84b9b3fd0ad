import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlvlm.core.errors import NumericsError, UsageError
from rlvlm.envs.check import check_step_env
from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.gymnasium_env import WrappedGymEnv
from rlvlm.envs.pixels import SNAPSHOT_SIZE
from rlvlm.envs.registry import make_env, task_env, task_goal
from rlvlm.reports.check_task import different_looks, players


class Slider(gym.Env):
    """A point on a line from 0 to 10, pushed by up to 2; the reward is 1 at the end and -1 where it falls off."""

    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode: str = "rgb_array", says: str = "nothing") -> None:
        self.render_mode, self.says = render_mode, says
        self.observation_space = gym.spaces.Box(-20.0, 20.0, (1, 1), np.float64)
        self.action_space = gym.spaces.Box(np.array([-1.0, 0.0]), np.array([2.0, 0.5]), (2,), np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform(1, 3)
        return np.array([[self.place]]), {}

    def step(self, action):
        self.acted = action
        self.place += action[0] + self.np_random.normal() * 0.01
        is_over = not 0 < self.place < 10
        info = {"success": {"is_success": self.place > 4, "progress": self.place / 10}} if self.says == "all" else {}
        return np.array([[self.place]]), 1.0 if self.place >= 10 else -1.0, is_over, False, info.get("success", {})

    def render(self):
        image = np.zeros((30, 60, 3), np.uint8)
        image[:, : int(np.clip(self.place, 0, 10) * 6)] = (250, 120, 7)
        return image


@pytest.fixture(autouse=True, scope="module")
def registered():
    gym.register("SliderTest-v0", entry_point=Slider, max_episode_steps=30)
    gym.register("SliderSaysTest-v0", entry_point=Slider, kwargs={"says": "all"})
    gym.register("NoImagesTest-v0", entry_point=NoImages)
    gym.register("SliderGoalTest-v0", entry_point=Slider, max_episode_steps=30, reward_threshold=-8.0)
    yield
    for name in ("SliderTest-v0", "SliderGoalTest-v0", "SliderSaysTest-v0", "NoImagesTest-v0"):
        del gym.registry[name]


class NoImages(Slider):
    metadata = {"render_modes": []}


def make(env_id: str, **settings: object) -> WrappedGymEnv:
    name = f"gym:{env_id}"
    return make_env(name, replace(task_env(name), **settings), 0)


def test_actions_are_stretched_to_the_bounds_of_the_env():
    env = make("SliderTest-v0")
    env.reset(seed=1)
    bounds = {(-1, -1): [-1.0, 0.0], (1, 1): [2.0, 0.5], (0, 0): [0.5, 0.25], (9, 0): [2.0, 0.25]}
    for given, expected in bounds.items():
        env.reset()
        env.step(np.array(given, np.float32))
        np.testing.assert_allclose(env.inner.unwrapped.acted, expected)
    with pytest.raises(NumericsError, match="finite"):
        env.step(np.array([np.nan, 0], np.float32))


class Dial(Slider):
    """Shows the whole number that it was last turned to; its script turns to each in its order."""

    def __init__(self, low: int, high: int, render_mode: str = "rgb_array") -> None:
        super().__init__(render_mode)
        self.action_space = gym.spaces.Box(low, high, (1,), np.int8)
        self.got: list[int] = []

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.got.clear()
        return obs, info

    def step(self, action):
        assert action.dtype == np.int8
        self.got.append(int(action[0]))
        return np.array([[5.0]]), 0.0, False, False, {}

    def scripted_action(self, obs):
        return self.action_space.low.astype(int) + len(self.got)

    def render(self):
        return np.full((16, 16, 3), self.got[-1] % 256 if self.got else 99, np.uint8)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-1, 1), (-128, 127)])
def test_each_whole_number_of_an_env_s_actions_is_reached_as_often_and_by_its_script(low, high):
    gym.register("DialTest-v0", entry_point=Dial, kwargs={"low": low, "high": high}, max_episode_steps=10_000)
    try:
        env = make("DialTest-v0")
    finally:
        del gym.registry["DialTest-v0"]
    got, numbers = env.inner.unwrapped.got, list(range(low, high + 1))
    env.reset(seed=0)
    # a tanh policy comes near to 1 and never there
    for action in np.linspace(-0.99999, 0.99999, 10 * len(numbers)):
        env.step(np.array([action], np.float32))
    counts = [got.count(number) for number in numbers]
    assert min(counts) >= 9 and max(counts) <= 11, counts
    env.reset(seed=0)
    for action in (-1.0, 1.0):
        env.step(np.array([action], np.float32))
    assert got == [low, high]
    obs, _ = env.reset(seed=0)
    for _ in numbers:
        obs, *_ = env.step(env.scripted_action(obs))
    assert got == numbers


def test_an_end_with_a_positive_reward_is_no_success_but_the_registered_return_is():
    for env_id, push, is_won in (("SliderTest-v0", 1, False), ("SliderGoalTest-v0", 1, True)):
        env = make(env_id)
        assert env.has_success == (env_id == "SliderGoalTest-v0") and ("says nothing" in env.note) != env.has_success
        infos, is_over = [], False
        while not is_over:
            *_, is_over, _, info = env.step(np.array([push, 0], np.float32))
            infos.append((info["success"], info["progress"]))
        assert infos[-1] == (is_won, float(is_won)) and set(infos[:-1]) == {(False, 0.0)}
    short = make("SliderGoalTest-v0", episode_steps=1)
    assert not short.has_success, "a threshold is for episodes of the registered length: costs would be few enough"
    assert task_goal("gym:Reacher-v5") == "", "only the user knows the goal"


Parts = dict[str, Any]
WIDTHS = count(60)


def begun(change: Callable[..., Any]) -> Parts:
    """A reset that returns what `change` makes of observation and info."""
    return {"reset": lambda self, *, seed=None, options=None: change(*Slider.reset(self, seed=seed))}


def stepped(change: Callable[..., Any]) -> Parts:
    """A step that returns what `change` makes of its five answers."""
    return {"step": lambda self, action: change(*Slider.step(self, action))}


def saying(info: object) -> Parts:
    return stepped(lambda obs, reward, is_over, is_late, _: (obs, reward, is_over, is_late, info))


def nothing_to_do(self: Slider, render_mode: Any = None) -> None:
    Slider.__init__(self, render_mode)
    self.action_space = gym.spaces.Box(-1.0, 1.0, (0,))


@pytest.mark.parametrize(
    ("parts", "rule"),
    [
        (begun(lambda obs, info: obs), r"reset\(\) must return \(observation, info\)"),
        ({"reset": lambda self: Slider.reset(self)}, r"reset\(\) must take seed and options"),
        (begun(lambda obs, info: (obs * np.nan, info)), r"gives the observation \[\[nan\]\] in reset\(\)"),
        ({"reset": lambda self, **_: sys.exit("no display")}, r"raised SystemExit in reset\(\): no display"),
        (stepped(lambda obs, reward, is_over, _, info: (obs, reward, is_over, info)),
         r"step\(\) must return five.*got tuple of 4"),
        (saying(None), r"the info of step\(\) must be a dict; got NoneType"),
        (stepped(lambda obs, _, *rest: (obs, "much", *rest)), "reward of step.* one number; got str 'much'"),
        (stepped(lambda obs, _, *rest: (obs, np.nan, *rest)), "gives the reward nan"),
        (stepped(lambda obs, reward, *_: (obs, reward, 0, 0, {})), "terminated and truncated"),
        (stepped(lambda obs, *rest: (obs[0], *rest)), r"observation of step\(\) must have the shape \(1, 1\)"),
        ({"step": lambda self, action: 1 / 0}, r"raised ZeroDivisionError in step\(\)"),
        ({"render": lambda self: None}, r"render\(\) must return an image .* got NoneType"),
        ({"render": lambda self: Slider.render(self) / 255}, r"render\(\) .* got an array of float64"),
        ({"render": lambda self: np.zeros((30, next(WIDTHS), 3), np.uint8)},
         "images must keep their size; got 61 x 30 pixels after 60 x 30"),
        ({"__init__": lambda self: Slider.__init__(self)}, "cannot be made with render_mode"),
        ({"metadata": None}, "cannot be made: Expect the environment metadata"),
        ({"__init__": nothing_to_do}, "nothing to observe or to do"),
        (saying({"success": "False"}), r"info\['success'\] must be a bool or a finite number; got str 'False'"),
        (saying({"is_success": None}), r"info\['is_success'\] must be .* got NoneType"),
        (saying({"success": np.nan}), r"info\['success'\] must be .* got float nan"),
        (saying({"progress": "half"}), r"info\['progress'\] must be .* got str 'half'"),
        (saying({"progress": np.array([0.1, 0.2])}), r"info\['progress'\] must be one number"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_broken_rule_of_gymnasium_is_named(parts, rule):
    gym.register("BrokenTest-v0", entry_point=type("Broken", (Slider,), parts), max_episode_steps=5)
    try:
        with pytest.raises((UsageError, NumericsError), match=rule) as caught:
            make("BrokenTest-v0")
    finally:
        del gym.registry["BrokenTest-v0"]
    assert "Zero" not in rule or f"{__file__}, line" in caught.value.fix


def test_an_env_that_tells_its_success_and_progress_is_believed():
    env = make("SliderSaysTest-v0")
    place = env.reset(seed=1)[0][0]
    while place < 4.5:
        obs, _, _, _, info = env.step(np.array([1, 0], np.float32))
        place = obs[0]
        assert info["success"] == (place > 4) and info["progress"] == pytest.approx(place / 10, abs=1e-6)


class SaysAtTheEnd(Slider):
    def step(self, action):
        obs, reward, is_over, is_late, info = super().step([0.5, 0.0])
        return [obs[0]], reward, is_over, is_late, {"is_success": self.place >= 10} if is_over else info


def test_an_env_that_says_its_success_at_the_end_alone_is_believed_and_odd_types_are_noted():
    gym.register("SaysAtTheEndTest-v0", entry_point=SaysAtTheEnd, max_episode_steps=30)
    try:
        env = make("SaysAtTheEndTest-v0")
    finally:
        del gym.registry["SaysAtTheEndTest-v0"]
    assert env.has_success and "its observations are a list, its space says float64" in env.note
    env.reset(seed=1)
    while not (answer := env.step(np.zeros(2, np.float32)))[2]:
        assert not answer[-1]["success"]
    assert answer[-1]["success"]
    assert "its observations" not in make("SliderTest-v0").note


def test_time_is_up_after_the_steps_asked_for():
    assert task_env("gym:SliderTest-v0").episode_steps == 30, "the env's own, unless told otherwise"
    env = make("SliderTest-v0", episode_steps=3)
    ends = [env.step(np.array([-1 / 3, 0], np.float32))[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]


def test_images_are_kept_at_the_size_that_is_asked_for():
    for view_px, shape, column in ((300, (30, 60), 20), (32, (30, 32), 5)):
        env = make("SliderTest-v0", view_px=view_px)
        env.reset(seed=1)
        env.inner.unwrapped.place = 3.6  # bright up to column 21 of 60
        snapshot = env.snapshot()[None]
        assert f"so {shape[1]} x {shape[0]} pixels of each are kept" in env.pixels.note
        frames = env.pixels.draw(snapshot, *shape)
        assert frames.shape == (1, *shape, 3)
        np.testing.assert_array_equal(frames[0, 10, column], [250, 120, 7])
        np.testing.assert_array_equal(frames[0, 10, -1], [0, 0, 0])
        assert env.draw(snapshot, 100).shape == (1, 100, 100, 3)
        assert env.draw(np.empty((0, env.snapshot_size), np.float32), 48).shape == (0, 48, 48, 3)
    assert env.snapshot_size == SNAPSHOT_SIZE
    with pytest.raises(ValueError, match=r"env.view_px must be in \[32, 1024\], got 16"):
        make("SliderTest-v0", view_px=16)
    # settings that all envs in steps have are enough
    assert make_env("gym:SliderTest-v0", StepEnvConfig(episode_steps=3), 0).step(np.zeros(2, np.float32))[0].shape == (
        1,
    )


@pytest.mark.parametrize("start", ["fixed", "random"])
@pytest.mark.parametrize(
    "env_id", ["SliderTest-v0", "Reacher-v5", pytest.param("MountainCarContinuous-v0", marks=pytest.mark.slow)]
)
def test_the_contract_holds(env_id, start):
    env, twin = (make(env_id, start=start, episode_steps=15) for _ in range(2))
    scenes = different_looks(env, np.concatenate([players(env)["random play"](seed).snapshots for seed in range(3)]), 4)
    check_step_env(env, twin, scenes)
    env.close()
    twin.close()


def test_a_fixed_start_is_the_same_in_every_episode_and_a_random_one_is_not():
    fixed, random = (make("Reacher-v5", start=start) for start in ("fixed", "random"))
    np.testing.assert_array_equal(fixed.reset(seed=1)[0], fixed.reset()[0])
    assert not np.array_equal(random.reset(seed=1)[0], random.reset()[0])


def test_mujoco_scenes_are_drawn_again_from_positions():
    env = make("Reacher-v5")
    assert env.snapshot_size == 4 and "drawn from joint positions" in env.note
    snapshot = env.reset(seed=3)[1]["snapshot"]
    moved = snapshot.copy()
    moved[2:] += 0.1  # the target
    there, elsewhere = env.draw(np.stack([snapshot, moved]), 200)
    assert (there != elsewhere).any(axis=-1).sum() > 10, "it is small in this env's images"
    env.close()


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("MountainCarContinuos-v0", "MountainCarContinuous"),
        ("no_such_module_here:Env-v0", "no_such_module_here"),
        ("", "cannot find"),
        ("CartPole-v1", "Box spaces, got Box and Discrete"),
        ("NoImagesTest-v0", "gives no images"),
    ],
)
def test_an_env_that_is_not_there_or_does_not_fit_is_a_usage_error(env_id, words):
    with pytest.raises(UsageError, match=words):
        make(env_id)
