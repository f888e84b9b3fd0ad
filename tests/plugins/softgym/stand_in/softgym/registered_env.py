"""One task with SoftGym's interface: a row of particles that an action pushes along x. One scene per process."""

from typing import Any

import numpy as np
from gymnasium import spaces

_scene: dict[str, np.ndarray] = {}


class RopeFlattenEnv:
    def __init__(self, observation_mode: str, horizon: int, headless: bool, render: bool, num_variations: int) -> None:
        assert observation_mode == "key_point" and headless and render and horizon > 1_000
        self.cached_configs = [{"number": 3 + number % 2} for number in range(num_variations)]
        self.cached_init_states = [self._start(index) for index in range(num_variations)]
        self.observation_space = spaces.Box(-np.inf, np.inf, (9,))
        self.action_space = spaces.Box(np.array([-0.02, 0.0], np.float32), np.array([0.02, 1.0], np.float32))

    def _start(self, index: int) -> dict[str, Any]:
        number = self.cached_configs[index]["number"]
        places = np.zeros((number, 4), np.float32)
        places[:, 0] = 0.01 * index
        return {
            "particle_pos": places.ravel(),
            "particle_vel": np.zeros(3 * number, np.float32),
            "shape_pos": np.zeros(14, np.float32),
            "phase": np.zeros(number),
            "camera_params": {},
        }

    def set_scene(self, config: dict[str, Any], state: dict[str, Any]) -> None:
        assert state["particle_pos"].size == 4 * config["number"]
        self.set_state(state)

    def set_state(self, state: dict[str, Any]) -> None:
        _scene.update({name: np.array(state[name]) for name in ("particle_pos", "particle_vel", "shape_pos")})

    def get_state(self) -> dict[str, Any]:
        return {name: array.copy() for name, array in _scene.items()}

    def reset(self, config: Any = None, initial_state: Any = None, config_id: int | None = None) -> np.ndarray:
        assert config_id is not None
        self.set_scene(self.cached_configs[config_id], self.cached_init_states[config_id])
        return self._observe()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, dict[str, float]]:
        assert self.action_space.contains(action.astype(np.float32)), f"not rescaled: {action}"
        places, velocities = _scene["particle_pos"].reshape(-1, 4), _scene["particle_vel"].reshape(-1, 3)
        velocities[0, 0] = 0.5 * velocities[0, 0] + action[0]
        places[0, 0] += velocities[0, 0]
        length = float(abs(places[0, 0] - places[1, 0]))
        return self._observe(), length, False, {"normalized_performance": length / 0.1}

    def get_image(self, width: int, height: int) -> np.ndarray:
        image = np.zeros((height, width, 3), np.uint8)
        for x in _scene["particle_pos"].reshape(-1, 4)[:, 0]:
            image[height // 2, int(np.clip((x + 1) / 2 * (width - 1), 0, width - 1))] = 255
            image[0, 0] += np.uint8(int(x * 5_000) % 256)
        return image

    def _observe(self) -> np.ndarray:
        return _scene["particle_pos"].reshape(-1, 4)[:3, :3].ravel().copy()


SOFTGYM_ENVS = {"RopeFlatten": RopeFlattenEnv}
env_arg_dict = {
    "RopeFlatten": {
        "observation_mode": "cam_rgb",
        "horizon": 75,
        "headless": False,
        "render": False,
        "num_variations": 5,
    }
}
