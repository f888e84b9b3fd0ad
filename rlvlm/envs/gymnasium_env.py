"""Any registered Gymnasium env with Box spaces and `rgb_array` rendering as an env, under the name `gym:ID`.

What it adds to the env, and its limits:

1. Actions come in [-1, 1] and are stretched to the env's own bounds; where these are integers, [-1, 1] is divided into
   equal parts, one for each. Observations are flattened to float32.
2. Success is `info["success"]` or `info["is_success"]`. Where the env gives neither, an episode succeeds that ends with
   a return of at least the env's registered `reward_threshold`, in as many steps as it was registered with or more.
   Where there is no threshold there is no success (`has_success`): returns tell how good a policy is. Progress is
   `info["progress"]`, else 0 until success and 1 from there on.
3. A state is the generator at the start of the episode and the actions since: restoring it plays them again. That is
   exact, for any physics, where an env draws its chances from `np_random` and a reset leaves nothing of the episode
   before. `rlvlm check-task` finds out.
4. Snapshots of MuJoCo envs hold positions, from which a second instance of the env draws the scene with its own camera.
   Of any other env the images are kept (`rlvlm.envs.pixels`), up to `GymnasiumConfig.view_px` wide and high.
5. What the env returns must follow Gymnasium's rules; what it raises is reported as the env's own fault, with its
   place.
6. `start="fixed"` begins every episode like the env's own with seed 0; `start="random"` leaves the start to the env.
"""
# pyright: reportAttributeAccessIssue=false
# mujoco ships no type stubs, and its names live in compiled modules

import inspect
import json
import math
import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium.error import DependencyNotInstalled
from gymnasium.utils import seeding
from numpy.typing import NDArray

from rlvlm.core.errors import NumericsError, UsageError, first_line
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.env import StepEnv, check_action, place_of
from rlvlm.envs.gymnasium_config import GymnasiumConfig
from rlvlm.envs.mujoco.renderer import close_at_exit
from rlvlm.envs.pixels import KeptPixels, resized
from rlvlm.envs.rendering import ensure_renderer

_KEY_GRAIN = 0.25e-3  # grain of the positions that images are drawn from, metres or radians
_FIXED_SEED = 0
_PROBE_STEPS = 1_000
"""Longest search for an env that reports success."""
_SUCCESS_KEYS = ("success", "is_success")
_RULES = "mend the env: docs/tasks.md and https://gymnasium.farama.org/api/env/ have the rules"
_LIBRARY = f"{os.sep}gymnasium{os.sep}"

Env = gym.Env[Any, Any]


class WrappedGymEnv(StepEnv):
    """One Gymnasium env.

    Args:
        config: start and episode length; `robot` has no effect, since it is unknown which part of the scene is the
            robot.
        seed: of everything random in this env, until `reset` is given another.
        env_id: as `gymnasium.make` takes it.

    Raises:
        UsageError: the env cannot be made here, or its spaces or its rendering do not fit.
        MachineError: no off-screen renderer works here.
    """

    metadata = {"render_modes": []}
    goal = ""

    @property
    def source_class(self) -> type:
        """Class of the wrapped env."""
        return type(self.inner.unwrapped)

    def __init__(self, config: GymnasiumConfig, seed: int, env_id: str) -> None:
        ensure_renderer()
        self.render_mode = None
        self._id = env_id
        # its own wrapper for time limits fails on what breaks a rule
        self.inner = _make(env_id, **{**config.keywords, "max_episode_steps": -1})
        self._episode_steps = config.episode_steps
        spec = gym.spec(env_id.rpartition(":")[2])
        is_long_enough = config.episode_steps >= (spec.max_episode_steps or 0)
        self._threshold = spec.reward_threshold if is_long_enough else None
        self._return = 0.0
        observed, acted = _checked_spaces(self.inner, env_id)
        # in float64: the width of a Box of int8 need not fit into int8
        self._low, self._high = (bound.ravel().astype(np.float64) for bound in (acted.low, acted.high))
        self._acted_shape, self._has_integers = acted.shape, acted.dtype.kind in "iub"
        low, high = (bound.ravel().astype(np.float32) for bound in (observed.low, observed.high))
        self.observation_space = gym.spaces.Box(low, high, dtype=np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (self._low.size,), np.float32)
        self._is_fixed = config.start == "fixed"
        self._start = ""  # the generator as the episode began, as JSON
        self._actions: list[FloatArray] = []
        physics = getattr(self.inner.unwrapped, "data", None)
        is_mujoco = hasattr(physics, "qpos") and hasattr(physics, "mocap_pos")
        images = (
            DrawnScene(env_id, physics, config.keywords)
            if is_mujoco
            else StoredImage(self.source_class, config.view_px)
        )
        self._images = images
        self.pixels = images.pixels if isinstance(images, StoredImage) else None
        self._odd_obs = ""  # how observations differ from the space, if they do
        self.has_success, self.has_progress = self._threshold is not None, False
        self.reset(seed=seed)
        for _ in range(min(self._episode_steps, _PROBE_STEPS)):  # some report success only at the end of an episode
            *_, is_terminated, is_truncated, info = self._act(np.zeros(self._low.size, np.float32))
            self._facts(info, False)
            if (self.has_success and self.has_progress) or is_terminated or is_truncated:
                break
        self.snapshot()  # an image from late in an episode must be of the same size
        self.reset(seed=seed)
        notes = [DrawnScene.note] if is_mujoco else []
        if self._has_integers:
            notes.append("its actions are integers: each has an equal part of [-1, 1]")
        if not self.has_success:
            notes.append("the env says nothing of success, so compare returns")
        if not self.has_progress:
            notes.append("it gives no info['progress'], so a judge's answers are held against true returns")
        if self._odd_obs:
            notes.append(f"its observations are {self._odd_obs}, its space says {observed.dtype}: they are converted")
        self.note = "; ".join(notes)
        self.snapshot_size = self.snapshot().size

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Returns the first observation [D] and info of a new episode; `options` is not used."""
        super().reset(seed=seed)
        chance = seeding.np_random(_FIXED_SEED)[0] if self._is_fixed else self.np_random
        obs, info = self._begin(chance, json.dumps(chance.bit_generator.state))
        return obs, self._info(info, False)

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Returns observation [D], the env's reward, terminated, truncated, info.

        Raises:
            NumericsError: the action is not finite.
        """
        check_action(action)
        obs, reward, is_terminated, is_truncated, info = self._act(action)
        is_over = is_terminated or is_truncated
        is_won = is_over and self._threshold is not None and self._return >= self._threshold
        return obs, reward, is_terminated, is_truncated, self._info(info, is_won)

    def scripted_action(self, obs: FloatArray) -> FloatArray | None:
        """Returns [A] in [-1, 1], the action of the env's own `scripted_action(observation)`; None if it has none."""
        script = getattr(self.inner.unwrapped, "scripted_action", None)
        if script is None:
            return None
        came = self._ask("scripted_action", lambda: script(obs.reshape(self.inner.observation_space.shape or ())))
        action = np.asarray(came, np.float64)
        if action.shape != self._acted_shape or not np.isfinite(action).all():
            self._refuse(f"scripted_action() must return an action of shape {self._acted_shape}", came, whose="of ours")
        if self._has_integers:  # the middle of the integer's part
            share = (action.ravel() - self._low + 0.5) / (self._high - self._low + 1)
        else:
            share = (action.ravel() - self._low) / np.where(self._high > self._low, self._high - self._low, 1.0)
        return (2 * share - 1).astype(np.float32)

    def snapshot(self) -> FloatArray:
        """Returns [S]: a MuJoCo env's positions, or a digest of the image."""
        return self._ask("render", lambda: self._images.take(self.inner))

    def draw(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Returns images [N, size_px, size_px, 3] of `snapshots` [N, S].

        Raises:
            ValueError: the snapshots are not [N, S].
        """
        if snapshots.ndim != 2 or snapshots.shape[1] != self.snapshot_size:
            raise ValueError(f"snapshots must have shape [N, {self.snapshot_size}], got {snapshots.shape}")
        return self._images.draw(snapshots, size_px)

    def image_key(self, snapshots: FloatArray) -> NDArray[np.int64]:
        """Returns [N, P]: rounded positions, or digests of the images."""
        return self._images.key(snapshots)

    def get_state(self) -> dict[str, Any]:
        """Returns the generator at the start of the episode, and the actions [T, A] since."""
        return {"generator": self._start, "actions": np.reshape(self._actions, (-1, self._low.size)).astype(np.float32)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned by replaying the episode up to that point."""
        self._begin(seeding.np_random(_FIXED_SEED)[0] if self._is_fixed else self.np_random, str(state["generator"]))
        for action in np.asarray(state["actions"]):
            self._act(action)

    def close(self) -> None:
        """Closes the env and its renderer."""
        self._images.close()
        self.inner.close()

    def _begin(self, chance: np.random.Generator, start: str) -> tuple[FloatArray, dict[str, Any]]:
        """Resets the env with random numbers from `chance` in state `start`; returns observation [D] and info."""
        chance.bit_generator.state = json.loads(start)
        self.inner.unwrapped.np_random = chance  # a reset with a seed would make a generator that is not saved
        self._start, self._actions, self._return = start, [], 0.0
        came = self._ask("reset", self.inner.reset)
        if not (isinstance(came, tuple) and len(came) == 2 and isinstance(came[1], dict)):
            self._refuse("reset() must return (observation, info), info being a dict", came)
        return self._checked("reset", came[0]), came[1]

    def _act(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Makes one step of the env, with `action` [A] stretched from [-1, 1] to its bounds."""
        self._actions.append(np.array(action, np.float32))  # the state consists of these
        # from [-1, 1] to the env's bounds: low + (a + 1) / 2 (high - low), in float64, because of wide bounds
        share, width = (np.clip(action, -1.0, 1.0).astype(np.float64) + 1) / 2, self._high - self._low
        # a cast alone would round towards 0, and a policy whose actions stay below 1 would never reach the highest
        above = np.minimum(np.floor(share * (width + 1)), width) if self._has_integers else share * width
        stretched = (self._low + above).reshape(self._acted_shape).astype(self.inner.action_space.dtype)
        came = self._ask("step", lambda: self.inner.step(stretched))
        if not (isinstance(came, tuple) and len(came) == 5):
            self._refuse("step() must return five: (observation, reward, terminated, truncated, info)", came)
        obs, reward, is_terminated, is_truncated, info = came
        flat = self._checked("step", obs)
        if not isinstance(info, dict):
            self._refuse("the info of step() must be a dict", info)
        if not all(isinstance(end, bool | np.bool_) for end in (is_terminated, is_truncated)):
            self._refuse("terminated and truncated of step() must be bools", (is_terminated, is_truncated))
        if np.size(reward) != 1 or np.asarray(reward).dtype.kind not in "biuf":
            self._refuse("the reward of step() must be one number", reward)
        number = float(np.asarray(reward).item())
        if not math.isfinite(number):
            what = f"gym:{self._id} gives the reward {number:g} in step {len(self._actions)} of an episode"
            raise NumericsError(f"{what}; it must be finite", f"mend the env: {place_of(self.source_class)}")
        self._return += number
        is_late = len(self._actions) >= self._episode_steps
        return flat, number, bool(is_terminated), bool(is_truncated) or is_late, info

    def _ask(self, name: str, method: Callable[[], Any]) -> Any:
        """Calls a method of the env and returns its result.

        Raises:
            UsageError: the method raised an error, which is the env's fault.
        """
        try:
            return method()
        except (UsageError, NumericsError):
            raise
        except (Exception, SystemExit) as error:  # a user's env may raise anything
            # name the innermost frame outside Gymnasium: a wrapper of Gymnasium's may be what finds the env's mistake
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _LIBRARY not in frame.filename]
            place = f"{frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name}"
            what = f"gym:{self._id} raised {type(error).__name__} in {name}(): {first_line(error)}"
            raise UsageError(what, f"mend the env: {place}") from error

    def _refuse(self, rule: str, came: object, whose: str = "of Gymnasium") -> NoReturn:
        what = f"gym:{self._id} breaks a rule {whose}: {rule}; got {_described(came)}"
        raise UsageError(what, f"{_RULES}; it is written in {place_of(self.source_class)}")

    def _checked(self, name: str, obs: object) -> FloatArray:
        """Returns the observation [D] of the method `name`; refuses one that contradicts the observation space."""
        wanted = self.inner.observation_space.shape
        try:
            array = np.asarray(obs, np.float64)
        except (TypeError, ValueError):
            self._refuse(f"the observation of {name}() must be an array of numbers", obs)
        if array.shape != wanted:
            self._refuse(f"the observation of {name}() must have the shape {wanted} of observation_space", obs)
        if not np.isfinite(array).all():
            what = f"gym:{self._id} gives the observation {obs} in {name}(), step {len(self._actions)} of an episode"
            raise NumericsError(f"{what}; it must be finite", f"mend the env: {place_of(self.source_class)}")
        if not isinstance(obs, np.ndarray | np.generic):
            self._odd_obs = f"a {type(obs).__name__}"
        elif obs.dtype != self.inner.observation_space.dtype:
            self._odd_obs = str(obs.dtype)
        return array.astype(np.float32).ravel()

    def _info(self, info: dict[str, Any], is_won: bool) -> dict[str, Any]:
        """Returns our info for the env's `info`; `is_won`: the episode ended in success."""
        return {"snapshot": self.snapshot()} | self._facts(info, is_won)

    def _facts(self, info: dict[str, Any], is_won: bool) -> dict[str, Any]:
        """Returns progress and success; arguments as in `_info`."""
        said = [key for key in _SUCCESS_KEYS if key in info]
        success = is_won
        if said:
            self.has_success = True
            success = bool(np.all(self._numbers(said[0], info[said[0]])))
        self.has_progress = self.has_progress or "progress" in info
        progress = self._numbers("progress", info["progress"]) if "progress" in info else np.array(float(success))
        if progress.size != 1:
            self._refuse("info['progress'] must be one number", info["progress"], whose="of ours")
        return {"progress": min(max(progress.item(), 0.0), 1.0), "success": success}

    def _numbers(self, key: str, came: object) -> NDArray[np.float64]:
        """Returns the value of `key` in the info: bools or finite numbers of any shape, but no string."""
        array = np.asarray(came)
        if array.size == 0 or array.dtype.kind not in "biuf" or not np.isfinite(array).all():
            self._refuse(f"info[{key!r}] must be a bool or a finite number", came, whose="of ours")
        return array.astype(np.float64)


class DrawnScene:
    """Snapshots of a MuJoCo env: the positions of its joints and mocap bodies. Velocities cannot be seen, so are not
    kept.

    Args:
        env_id: env of which further instances draw, one for each size of image.
        physics: the `mujoco.MjData` of the first instance, for the sizes of its arrays.
        keywords: further keywords of `gymnasium.make`.
    """

    note = "images are drawn from joint positions, by the env's own renderer and camera"

    def __init__(self, env_id: str, physics: mujoco.MjData, keywords: Mapping[str, Any]) -> None:
        self._env_id, self._keywords = env_id, keywords
        self._num_joints, self._num_mocaps = physics.qpos.size, len(physics.mocap_pos)
        self._renderers: dict[int, Env] = {}

    def take(self, env: Env) -> FloatArray:
        """Returns [S]: `qpos`, then positions and orientations of the mocap bodies."""
        physics: mujoco.MjData = getattr(env.unwrapped, "data")  # noqa: B009 - of MuJoCo envs alone, unknown to gym.Env
        parts = (physics.qpos, physics.mocap_pos.ravel(), physics.mocap_quat.ravel())
        return np.concatenate(parts, dtype=np.float32)

    def draw(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Returns images of `snapshots`, rounded to the grain of the keys, so that equal keys give identical images."""
        if size_px not in self._renderers:  # Gymnasium's renderer has a fixed size
            self._renderers[size_px] = self._make_renderer(size_px)
        renderer = self._renderers[size_px]
        frames = np.empty((len(snapshots), size_px, size_px, 3), np.uint8)
        for frame, row in zip(frames, np.rint(snapshots / _KEY_GRAIN) * _KEY_GRAIN, strict=True):
            scene: Any = renderer.unwrapped
            positions, turns = np.split(row[self._num_joints :], [3 * self._num_mocaps])
            scene.data.qpos[:], scene.data.qvel[:] = row[: self._num_joints], 0.0
            scene.data.mocap_pos[:], scene.data.mocap_quat[:] = positions.reshape(-1, 3), turns.reshape(-1, 4)
            mujoco.mj_forward(scene.model, scene.data)
            scene.mujoco_renderer.viewer.make_context_current()  # Gymnasium forgets this when several envs draw
            frame[:] = resized(_rendered(renderer), size_px, size_px)
        return frames

    def key(self, snapshots: FloatArray) -> NDArray[np.int64]:
        """Returns [N, S]: positions in steps of a quarter of a millimetre (or of a milliradian)."""
        return np.rint(snapshots / _KEY_GRAIN).astype(np.int64)

    def close(self) -> None:
        """Frees the renderers; the next image opens them again."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()

    def _make_renderer(self, size_px: int) -> Env:
        try:
            renderer = _make(self._env_id, **{**self._keywords, "width": size_px, "height": size_px})
        except TypeError:  # an env with a fixed image size
            renderer = _make(self._env_id, **self._keywords)
        scene: Any = renderer.unwrapped
        scene.model.vis.quality.offsamples = scene.model.vis.quality.shadowsize = 0  # the most costly effects on a CPU
        renderer.reset(seed=_FIXED_SEED)
        renderer.render()  # aims a camera without a position by the same scene in every instance
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            scene.mujoco_renderer.viewer.scn.flags[flag] = 0
        close_at_exit(self)
        return renderer


class StoredImage:
    """Snapshots of any other env: its rendered images, stored by `rlvlm.envs.pixels`.

    Args:
        source: the env's class.
        view_px: longest side of stored images; larger ones are scaled down.
    """

    def __init__(self, source: type, view_px: int) -> None:
        for device in ("VIDEO", "AUDIO"):  # otherwise pygame looks for a screen and loudspeakers, and logs it
            os.environ.setdefault(f"SDL_{device}DRIVER", "dummy")
        self.pixels, self._view_px = KeptPixels(source), view_px

    def take(self, env: Env) -> FloatArray:
        """Returns [S] the snapshot of the present image."""
        image = _rendered(env)
        return self.pixels.keep([resized(image, *(min(side, self._view_px) for side in image.shape[:2]))])

    def draw(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Returns the stored images, scaled to `size_px`."""
        return self.pixels.draw(snapshots, size_px, size_px)

    def key(self, snapshots: FloatArray) -> NDArray[np.int64]:
        """Returns [N, S]: the digests."""
        return snapshots.astype(np.int64)

    def close(self) -> None:
        """Does nothing: there is no renderer to free."""


def _make(env_id: str, **settings: Any) -> Env:
    try:
        return gym.make(env_id, render_mode="rgb_array", disable_env_checker=True, **settings)
    except (DependencyNotInstalled, ImportError) as error:  # DependencyNotInstalled is a `gym.error.Error` too
        raise UsageError(f"gym:{env_id} needs a package: {first_line(error)}", "install what it names") from error
    except TypeError as error:
        if set(settings) & {"width", "height"}:  # not every env takes these: the caller tries without
            raise
        raise UsageError(
            f"gym:{env_id} cannot be made with render_mode=rgb_array: {first_line(error)}",
            f"{_RULES}; its own keywords are given as --env.make NAME VALUE",
        ) from error
    except gym.error.Error as error:  # a rule that Gymnasium itself checks
        raise UsageError(f"gym:{env_id} cannot be made: {first_line(error)}", _RULES) from error


def _rendered(env: Env) -> Frames:
    """Returns the present image [H, W, 3].

    Raises:
        UsageError: the env does not render such an image.
    """
    image: Any = env.render()
    if not (isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3):
        name = env.spec.id if env.spec else type(env.unwrapped).__name__
        rule = "render() must return an image [H, W, 3] of uint8"
        raise UsageError(f"gym:{name} breaks a rule of Gymnasium: {rule}; got {_described(image)}", _RULES)
    return image


def _described(came: object) -> str:
    """Describes an unexpected value in a few words."""
    if isinstance(came, np.ndarray):
        return f"an array of {came.dtype} with shape {came.shape}"
    if isinstance(came, tuple | list):
        return f"{type(came).__name__} of {len(came)}: {', '.join(type(part).__name__ for part in came)}"
    return f"{type(came).__name__} {came!r:.60}"


def _checked_spaces(env: Env, env_id: str) -> tuple[gym.spaces.Box, gym.spaces.Box]:
    """Returns the spaces of observations and of actions.

    Raises:
        UsageError: one of them is not a Box, actions have no bounds, or the env cannot render images.
    """
    observed, acted = (getattr(env, f"{name}_space", None) for name in ("observation", "action"))
    if not (isinstance(observed, gym.spaces.Box) and isinstance(acted, gym.spaces.Box)):
        raise UsageError(
            f"gym:{env_id} must observe and act in Box spaces, got {type(observed).__name__} and "
            f"{type(acted).__name__}: {observed}, {acted}",
            "wrap it in an env of your own: docs/tasks.md",
        )
    if not (observed.low.size and acted.low.size):
        raise UsageError(f"gym:{env_id} has nothing to observe or to do: {observed}, {acted}", _RULES)
    if not (np.isfinite(acted.low).all() and np.isfinite(acted.high).all()):
        raise UsageError(f"the actions of gym:{env_id} must have bounds, got {acted}", "wrap it in gymnasium's Clip")
    # read the signature rather than try it: a reset that fails for another reason has another message
    takes = inspect.signature(env.unwrapped.reset).parameters.values()
    if not {"seed", "options"} <= {parameter.name for parameter in takes} and not any(
        parameter.kind == parameter.VAR_KEYWORD for parameter in takes
    ):
        raise UsageError(f"gym:{env_id} breaks a rule of Gymnasium: reset() must take seed and options", _RULES)
    if "rgb_array" not in ((env.metadata or {}).get("render_modes") or ()):
        raise UsageError(f"gym:{env_id} gives no images: it has no render mode rgb_array", "choose another env")
    return observed, acted
