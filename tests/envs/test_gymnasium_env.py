import logging
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest

from rlvlm.core.errors import NumericsError, UsageError
from rlvlm.envs.check import check_step_env
from rlvlm.envs.gymnasium_env import STORED_PX, StoredImage, WrappedGymEnv
from rlvlm.envs.registry import make_env, task_env, task_goal, warn_once
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


def test_actions_are_stretched_to_the_bounds_of_the_env() -> None:
    env = make("SliderTest-v0")
    env.reset(seed=1)
    for given, expected in (
        ([-1, -1], [-1.0, 0.0]),
        ([1, 1], [2.0, 0.5]),
        ([0, 0], [0.5, 0.25]),
        ([9, 0], [2.0, 0.25]),
    ):
        env.reset()
        env.step(np.array(given, np.float32))
        np.testing.assert_allclose(env._env.unwrapped.acted, expected)
    with pytest.raises(NumericsError, match="finite"):
        env.step(np.array([np.nan, 0], np.float32))


def test_an_end_with_a_positive_reward_is_no_success_but_the_registered_return_is() -> None:
    for env_id, push, is_won in (("SliderTest-v0", 1, False), ("SliderGoalTest-v0", 1, True)):
        env = make(env_id)
        assert env.has_success == (env_id == "SliderGoalTest-v0") and ("says nothing" in env.note) != env.has_success
        infos, is_over = [], False
        while not is_over:
            *_, is_over, _, info = env.step(np.array([push, 0], np.float32))
            infos.append((info["success"], info["progress"]))
        assert infos[-1] == (is_won, float(is_won)) and set(infos[:-1]) == {(False, 0.0)}
    short = make("SliderGoalTest-v0", episode_steps=1)
    assert not short.has_success, (
        "a threshold is for episodes of the registered length: costs would be few enough at once"
    )


def test_a_fall_is_no_success() -> None:
    env = make("InvertedPendulum-v4")
    for seed in range(3):
        env.reset(seed=seed)
        is_over = False
        while not is_over:
            *_, is_over, _, info = env.step(np.ones(1, np.float32))
        assert not info["success"]
    env.close()


class OldReset(Slider):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class NoSeed(Slider):
    def reset(self):
        return super().reset()


class OldStep(Slider):
    def step(self, action):
        obs, reward, is_over, _, info = super().step(action)
        return obs, reward, is_over, info


class NoInfo(Slider):
    def step(self, action):
        return *super().step(action)[:4], None


class TextReward(Slider):
    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, "much", *rest


class Numbers(Slider):
    def step(self, action):
        obs, reward, *_ = super().step(action)
        return obs, reward, 0, 0, {}


class OtherShape(Slider):
    def step(self, action):
        obs, *rest = super().step(action)
        return obs[0], *rest


class Lost(Slider):
    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, np.nan, *rest


class Raises(Slider):
    def step(self, action):
        return 1 / 0


class NoImage(Slider):
    def render(self):
        return None


class Floats(Slider):
    def render(self):
        return super().render() / 255


class OldMake(Slider):
    def __init__(self):
        super().__init__()


class NoMetadata(Slider):
    metadata = None  # type: ignore[assignment]


class NothingToDo(Slider):
    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (0,))


class LostAtFirst(Slider):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0] * np.nan, {}


class Leaves(Slider):
    def reset(self, *, seed=None, options=None):
        raise SystemExit("no display")


class Says(Slider):
    info = {}

    def step(self, action):
        return *super().step(action)[:4], self.info


class TextSuccess(Says):
    info = {"success": "False"}


class NoSuccessYet(Says):
    info = {"is_success": None}


class LostSuccess(Says):
    info = {"success": np.nan}


class TextProgress(Says):
    info = {"progress": "half"}


class TwoProgresses(Says):
    info = {"progress": np.array([0.1, 0.2])}


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (OldReset, r"reset\(\) must return \(observation, info\)"),
        (NoSeed, r"reset\(\) must take seed and options"),
        (OldStep, r"step\(\) must return five.*got tuple of 4"),
        (NoInfo, r"the info of step\(\) must be a dict; got NoneType"),
        (TextReward, "reward of step.* one number; got str 'much'"),
        (Numbers, "terminated and truncated"),
        (OtherShape, r"observation of step\(\) must have the shape \(1, 1\)"),
        (Lost, "gives the reward nan"),
        (Raises, r"raised ZeroDivisionError in step\(\)"),
        (NoImage, r"render\(\) must return an image .* got NoneType"),
        (Floats, r"render\(\) .* got an array of float64"),
        (OldMake, "cannot be made with render_mode"),
        (NoMetadata, "cannot be made: Expect the environment metadata"),
        (NothingToDo, "nothing to observe or to do"),
        (LostAtFirst, r"gives the observation \[\[nan\]\] in reset\(\)"),
        (Leaves, r"raised SystemExit in reset\(\): no display"),
        (TextSuccess, r"info\['success'\] must be a bool or a finite number; got str 'False'"),
        (NoSuccessYet, r"info\['is_success'\] must be .* got NoneType"),
        (LostSuccess, r"info\['success'\] must be .* got float nan"),
        (TextProgress, r"info\['progress'\] must be .* got str 'half'"),
        (TwoProgresses, r"info\['progress'\] must be one number"),
    ],
)
def test_a_broken_rule_of_gymnasium_is_named(broken: type[Slider], rule: str) -> None:
    gym.register("BrokenTest-v0", entry_point=broken, max_episode_steps=5)
    try:
        with pytest.raises((UsageError, NumericsError), match=rule) as caught:
            make("BrokenTest-v0")
    finally:
        del gym.registry["BrokenTest-v0"]
    assert broken is not Raises or f"{__file__}, line" in caught.value.fix


def test_an_env_that_tells_its_success_and_progress_is_believed() -> None:
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


def test_an_env_that_says_its_success_at_the_end_alone_is_believed_and_odd_types_are_noted() -> None:
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


def test_time_is_up_after_the_steps_asked_for() -> None:
    assert task_env("gym:SliderTest-v0").episode_steps == 30, "the env's own, unless told otherwise"
    env = make("SliderTest-v0", episode_steps=3)
    ends = [env.step(np.array([-1 / 3, 0], np.float32))[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]


def test_a_pixel_goes_through_one_number_and_comes_back() -> None:
    env = make("SliderTest-v0")
    frames = env.draw(env.snapshot()[None], STORED_PX)
    np.testing.assert_array_equal(frames[0, 10, 1], [250, 120, 7])
    np.testing.assert_array_equal(frames[0, 10, -1], [0, 0, 0])
    assert env.draw(env.snapshot()[None], 100).shape == (1, 100, 100, 3)
    assert env.draw(np.empty((0, env.snapshot_size), np.float32), 48).shape[0] == 0


def test_stored_images_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        StoredImage("Some-v0")
        StoredImage("Some-v0")
    assert [record.message for record in caplog.records] == [
        "Some-v0 cannot draw a scene again: images are images of 64 pixels taken at each step, 16 KB each"
    ]


@pytest.mark.parametrize("start", ["fixed", "random"])
@pytest.mark.parametrize(
    "env_id", ["SliderTest-v0", "Reacher-v5", pytest.param("MountainCarContinuous-v0", marks=pytest.mark.slow)]
)
def test_the_contract_holds(env_id: str, start: str) -> None:
    env, twin = (make(env_id, start=start, episode_steps=15) for _ in range(2))
    scenes = different_looks(env, np.concatenate([players(env)["random play"](seed).snapshots for seed in range(3)]), 4)
    check_step_env(env, twin, scenes)
    env.close()
    twin.close()


def test_a_fixed_start_is_the_same_in_every_episode_and_a_random_one_is_not() -> None:
    fixed, random = (make("Reacher-v5", start=start) for start in ("fixed", "random"))
    np.testing.assert_array_equal(fixed.reset(seed=1)[0], fixed.reset()[0])
    assert not np.array_equal(random.reset(seed=1)[0], random.reset()[0])


def test_mujoco_scenes_are_drawn_again_from_positions() -> None:
    env = make("Reacher-v5")
    assert env.snapshot_size == 4 and "drawn from joint positions" in env.note
    snapshot = env.reset(seed=3)[1]["snapshot"]
    moved = snapshot.copy()
    moved[2:] += 0.1  # the target
    there, elsewhere = env.draw(np.stack([snapshot, moved]), 200)
    assert (there != elsewhere).any(axis=-1).sum() > 10, "it is small in this env's images"
    env.close()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gym:MountainCarContinuos-v0", "MountainCarContinuous"),
        ("gym:no_such_module_here:Env-v0", "no_such_module_here"),
        ("gym:", "cannot find"),
    ],
)
def test_an_env_that_is_not_there_is_a_usage_error(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        task_env(name)


@pytest.mark.parametrize(
    ("env_id", "words"), [("CartPole-v1", "Box spaces, got Box and Discrete"), ("NoImagesTest-v0", "gives no images")]
)
def test_an_env_that_does_not_fit_is_a_usage_error(env_id: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make(env_id)


def test_only_the_user_knows_the_goal() -> None:
    assert task_goal("gym:Reacher-v5") == ""
