"""The task `cartpole`: a pole on a cart, balanced by a continuous force, judged by its image. Made by the registry.

Source: Wang et al. 2024 (RL-VLM-F), arXiv:2402.03681: its continuous CartPole, with the equations of Barto, Sutton and
Anderson 1983 as Gym has them. An episode never ends early: the angle stops at 30 degrees and the cart at 1.92 m, with
their speeds kept. Images always show the cart in the middle. Scene and sizes are the paper's. Two departures: edges
are smooth, and success is a second upright; in the paper's code it is one step within 5 degrees, as every start is.

`start="fixed"` is the paper's start, all four numbers within 0.05; `start="random"` leans up to 20 degrees.
"""

import math
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.env import StepEnv

_GRAVITY, _FORCE, _STEP_S = 9.8, 10.0, 0.02
_CART_KG, _POLE_KG, _HALF_POLE_M = 1.0, 0.1, 0.5
_MAX_ANGLE, _MAX_X = math.radians(30), 1.92
_SUCCESS_DEG, _SUCCESS_STEPS = 5.0, 50
_FIXED_START = np.array([0.05, 0.05, 0.05, 0.05])
_RANDOM_START = np.array([0.5, 0.5, math.radians(20), 0.5])
# force, in units of 10 N, per cart position, its speed, pole angle and its speed
_BALANCE = np.array([0.1, 0.2, 8.0, 2.0], np.float32)

_SCENE_PX = 200
# scene of 200 pixels, y downwards: height of the rail, width and height of the cart, where the pole turns
_RAIL_Y, _CART, _AXLE = 150.0, (50.0, 30.0), (100.0, 142.5)
_POLE_LENGTH, _POLE_WIDTH = 125.0, 10.0
_BLACK, _BROWN, _PURPLE = (0, 0, 0), (202, 152, 101), (129, 132, 203)


class CartPole(StepEnv):
    """A pole on a cart.

    Observations [4] are the cart's position and speed, the pole's angle and its speed (m, m/s, rad, rad/s); the action
    [1] is the force in units of 10 N; the reward is minus the angle in degrees. A snapshot [1] is the angle.

    Args:
        config: start and episode length; there is no robot to show.
        seed: of the starts, until `reset` is given another seed.
    """

    goal = "balance the brown pole on the black cart to be upright"
    is_symmetric = True
    snapshot_size = 1
    grain = 0.25e-3  # radians: 0.03 of a pixel at the pole's tip at 200 pixels

    def __init__(self, config: StepEnvConfig, seed: int) -> None:
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self._spread = _FIXED_START if config.start == "fixed" else _RANDOM_START
        self._episode_steps = config.episode_steps
        self._backgrounds: dict[int, FloatArray] = {}  # by size in pixels: the still background is painted once
        self.reset(seed=seed)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Returns the first observation [4] and info of a new episode; `options` is not used."""
        super().reset(seed=seed, options=options)
        self._state = self.np_random.uniform(-self._spread, self._spread)
        self._steps = self._upright_steps = 0
        return self._state.astype(np.float32), self._info()

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Returns observation [4], minus the angle in degrees, never terminated, truncated at the time limit, info."""
        self._state = _moved(self._state, _FORCE * min(max(float(action[0]), -1.0), 1.0))
        self._steps += 1
        reward = -abs(math.degrees(self._state[2]))
        self._upright_steps = self._upright_steps + 1 if -reward < _SUCCESS_DEG else 0
        return self._state.astype(np.float32), reward, False, self._steps >= self._episode_steps, self._info()

    def snapshot(self) -> FloatArray:
        """Returns [1], the pole's angle, radians, clockwise from upright."""
        return self._state[2:3].astype(np.float32)

    def draw(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Returns images [N, size_px, size_px, 3] of `snapshots` [N, 1]."""
        if size_px not in self._backgrounds:
            self._backgrounds[size_px] = _background(size_px)
        frames = np.empty((len(snapshots), size_px, size_px, 3), np.uint8)
        for frame, angle in zip(frames, np.rint(snapshots[:, 0] / self.grain) * self.grain, strict=True):
            image = self._backgrounds[size_px].copy()
            _paint_pole(image, float(angle))
            np.rint(image, out=frame, casting="unsafe")
        return frames

    def scripted_action(self, obs: FloatArray) -> FloatArray:
        """Returns [1], a force that keeps the pole upright: a linear function of `obs`."""
        return np.array([obs @ _BALANCE], np.float32)

    def get_state(self) -> dict[str, Any]:
        """Returns position, angle and their speeds, generator and step counts."""
        counts = {"steps": self._steps, "upright_steps": self._upright_steps}
        return {"state": self._state.copy(), "generator": self.generator_text()} | counts

    def set_state(self, state: dict[str, Any]) -> None:
        self._state = np.array(state["state"])
        self._steps, self._upright_steps = int(state["steps"]), int(state["upright_steps"])
        self.set_generator(state["generator"])

    def _info(self) -> dict[str, Any]:
        lean = abs(float(self._state[2]))
        return {
            "snapshot": self.snapshot(),
            "progress": max(1.0 - lean / _MAX_ANGLE, 0.0),
            "success": self._upright_steps >= _SUCCESS_STEPS,
        }


def _moved(state: NDArray[np.float64], force: float) -> NDArray[np.float64]:
    """Returns the state [4] after one Euler step under `force` in newtons."""
    x, speed, angle, spin = state.tolist()
    mass = _CART_KG + _POLE_KG
    sine, cosine = math.sin(angle), math.cos(angle)
    # push = (F + m l w^2 sin a) / (M + m): what accelerates cart and pole together
    # turn = (g sin a - cos a push) / (l (4/3 - m cos^2 a / (M + m))), thrust = push - m l turn cos a / (M + m)
    push = (force + _POLE_KG * _HALF_POLE_M * spin**2 * sine) / mass
    turn = (_GRAVITY * sine - cosine * push) / (_HALF_POLE_M * (4 / 3 - _POLE_KG * cosine**2 / mass))
    thrust = push - _POLE_KG * _HALF_POLE_M * turn * cosine / mass
    # the cart and the pole stop at their limits but keep their speed, as in the paper's code
    x = min(max(x + _STEP_S * speed, -_MAX_X), _MAX_X)
    angle = min(max(angle + _STEP_S * spin, -_MAX_ANGLE), _MAX_ANGLE)
    return np.array([x, speed + _STEP_S * thrust, angle, spin + _STEP_S * turn])


def _grid(size_px: int) -> tuple[FloatArray, FloatArray]:
    """Centres of the pixels in the scene: x [1, W] and y [H, 1]."""
    middles = (np.arange(size_px, dtype=np.float32) + 0.5) * (_SCENE_PX / size_px)
    return middles[None, :], middles[:, None]


def _blend(image: FloatArray, outside: NDArray[np.floating], colour: tuple[int, int, int]) -> None:
    """Lays a colour over `image` [H, W, 3] where `outside` [H, W], scene pixels from a shape's edge, is negative."""
    # the ramp is half a pixel wide on either side of the edge, so that edges are smooth
    share = np.clip(0.5 - outside * (len(image) / _SCENE_PX), 0.0, 1.0)[..., None]
    image += share * (np.array(colour, np.float32) - image)


def _background(size_px: int) -> FloatArray:
    """Returns the background [H, W, 3]: white, the rail, the cart."""
    x, y = _grid(size_px)
    image = np.full((size_px, size_px, 3), 255.0, np.float32)
    _blend(image, np.abs(y - _RAIL_Y) - 0.5 + 0 * x, _BLACK)  # 0 * x: the rail is as long as the image is wide
    _blend(image, np.maximum(np.abs(x - _AXLE[0]) - _CART[0] / 2, np.abs(y - _RAIL_Y) - _CART[1] / 2), _BLACK)
    return image


def _paint_pole(image: FloatArray, angle: float) -> None:
    """Adds the pole, leaning to the right by `angle` radians, and its axle."""
    x, y = (middles - middle for middles, middle in zip(_grid(len(image)), _AXLE, strict=True))
    # in the pole's own axes: along it, upwards from the axle, and across it; y points down
    along = x * math.sin(angle) - y * math.cos(angle)
    across = x * math.cos(angle) + y * math.sin(angle)
    middle = (_POLE_LENGTH - _POLE_WIDTH) / 2
    _blend(image, np.maximum(np.abs(across) - _POLE_WIDTH / 2, np.abs(along - middle) - _POLE_LENGTH / 2), _BROWN)
    _blend(image, np.hypot(x, y) - _POLE_WIDTH / 2, _PURPLE)
