"""A whole Env in numpy: a point pushes a block to a line. Fast tests use it instead of a simulator."""

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.env import StepEnv
from rlvlm.envs.metaworld.config import MetaWorldConfig
from rlvlm.envs.registry import Task

_GRAIN = 1e-3
_HALF = 0.1
_START, _GOAL = 0.4, 0.8
_LANE = 0.5
_SPEED = 0.1
_TINY_STEPS = 20


class TinyEnv(StepEnv):
    """A point pushes a block to the right on the unit square: a whole Env in numpy, for fast tests.

    Observations [4] are the point (x, y), the block's x and its distance to the goal; actions [2] move the point by up
    to 0.1 per axis. The block is on the lane y = 0.5 and moves when the point reaches its left side there. It succeeds
    at x >= 0.8; going right at full speed from the fixed start takes five steps. The reward is the progress. Episodes
    last at most 20 steps. Images show the block (red), the goal line (green) and, with `robot="visible"`, the point
    (blue).

    Args:
        config: `start="random"` draws the point's start from the left third; `episode_steps` above 20 counts as 20.
        seed: seed of the random start.
    """

    goal = "push the red block to the green line"
    snapshot_size = 3

    def __init__(self, config: StepEnvConfig | None = None, seed: int = 0) -> None:
        self._config = config or MetaWorldConfig()
        self._shows_robot = isinstance(self._config, MetaWorldConfig) and self._config.robot == "visible"
        self._episode_steps = min(self._config.episode_steps, _TINY_STEPS)
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self._point = np.zeros(2)
        self._block = _START
        self._steps = 0
        super().reset(seed=seed)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Returns the first observation and info of a new episode; `options` is not used."""
        super().reset(seed=seed, options=options)
        is_random = self._config.start != "fixed"
        self._point = self.np_random.uniform((0.0, 0.3), (0.3, 0.7)) if is_random else np.array([0.2, _LANE])
        self._block = _START
        self._steps = 0
        return self._observe(), self._info()

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Returns observation, reward (the progress), False (never terminated), whether truncated, and info."""
        left_side = self._block - _HALF + 1e-9  # touching is not yet pushing
        was_left = self._point[0] <= left_side
        self._point = np.clip(self._point + _SPEED * np.clip(action, -1, 1).astype(float), 0.0, 1.0)
        on_lane = abs(self._point[1] - _LANE) <= _HALF
        if was_left and on_lane and self._point[0] > left_side:
            self._block = float(min(self._point[0] + _HALF, 1.0 - _HALF))
        self._steps += 1
        info = self._info()
        return self._observe(), info["progress"], False, self._steps >= self._episode_steps, info

    def snapshot(self) -> FloatArray:
        """Returns [3]: the point (x, y) and the block's x."""
        return np.array([*self._point, self._block], np.float32)

    def draw(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Returns images [N, size_px, size_px, 3] of `snapshots` [N, 3]."""
        frames = np.full((len(snapshots), size_px, size_px, 3), 200, np.uint8)
        for frame, (x, y, block) in zip(frames, np.rint(snapshots / _GRAIN) * _GRAIN, strict=True):
            _paint(frame, (_GOAL + _HALF, 0.5), (0.02, 0.5), (0, 160, 0))
            _paint(frame, (block, _LANE), (_HALF, _HALF), (200, 0, 0))
            if self._shows_robot:
                _paint(frame, (x, y), (0.04, 0.04), (0, 0, 200))
        return frames

    def image_key(self, snapshots: FloatArray) -> NDArray[np.int64]:
        """Returns [N, 1] for the block alone, or [N, 3] with the point if it is visible."""
        first = 0 if self._shows_robot else 2
        return np.rint(snapshots[:, first:] / _GRAIN).astype(np.int64)

    def hand_path(self, snapshots: FloatArray, camera: str = "") -> FloatArray:
        """Returns [N, 2] positions of the point, whether it is visible or not."""
        return snapshots[:, :2] * np.array([1, -1], np.float32) + np.array([0, 1], np.float32)

    def get_state(self) -> dict[str, Any]:
        """Returns point, block, step count and generator."""
        generator = self.generator_text()
        return {"point": self._point.copy(), "block": self._block, "steps": self._steps, "generator": generator}

    def set_state(self, state: dict[str, Any]) -> None:
        self._point = np.array(state["point"])
        self._block, self._steps = float(state["block"]), int(state["steps"])
        self.set_generator(state["generator"])

    def _observe(self) -> FloatArray:
        return np.array([*self._point, self._block, _GOAL - self._block], np.float32)

    def _info(self) -> dict[str, Any]:
        progress = min(max((self._block - _START) / (_GOAL - _START), 0.0), 1.0)
        return {"snapshot": self.snapshot(), "progress": progress, "success": self._block >= _GOAL - 1e-9}


def _paint(
    frame: NDArray[np.uint8], centre: tuple[float, float], half: tuple[float, float], colour: tuple[int, int, int]
) -> None:
    """Fills a rectangle of the unit square (y upwards) in `frame` [H, W, 3]."""
    size_px = len(frame)
    left, right = (int((centre[0] + sign * half[0]) * size_px + 0.5) for sign in (-1, 1))
    top, bottom = (int((1 - centre[1] + sign * half[1]) * size_px + 0.5) for sign in (-1, 1))
    frame[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)] = colour


TINY = Task(name="tiny", goal=TinyEnv.goal, maker="rlvlm.testing.tiny_env:TinyEnv", env=MetaWorldConfig())
"""Task for `make_env("rlvlm.testing:TINY", config, seed)`, which needs no registration, in any process."""
