"""SoftGym's own tasks as envs: `softgym/NAME`, where the package can be imported.

SoftGym (Lin et al. 2020, arXiv:2011.07215) runs on PyFleX, which is compiled with CUDA. It cannot be installed on the
project's own machines, so this adapter was only tested against a stand-in of the same interface. What to know:

1. PyFleX holds one scene, which the envs of a process share; drawing uses it too. An env that gets the scene
   back replays the episode's actions; a state is restored in the same way. Use one env per process.
2. Observations are SoftGym's key points, starts its cached ones: the first for `start="fixed"`, any for `random`.
3. Progress is SoftGym's normalised performance, success its exceeding 0.9.
"""

import importlib
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.env import StepEnv, check_action
from rlvlm.plugins.softgym.tasks import GOALS

_KEY_METRES = 0.25e-3
_SUCCESS = 0.9
_NO_HORIZON = 10**9  # the time limit is ours
_simulators: dict[str, "_Simulator"] = {}


class _Simulator:
    """The one SoftGym env of a name in a process, and the env whose state it holds."""

    def __init__(self, name: str) -> None:
        registered = importlib.import_module("softgym.registered_env")
        settings = {"observation_mode": "key_point", "render": True, "headless": True, "horizon": _NO_HORIZON}
        self.env = registered.SOFTGYM_ENVS[name](**(registered.env_arg_dict[name] | settings))
        self.holder: SoftGymEnv | None = None


class SoftGymEnv(StepEnv):
    """One SoftGym task.

    A snapshot holds the number of the cached start, which says how many particles and shapes there are, then their
    positions, with zeros up to the size of the largest scene.

    Args:
        config: start and episode length; there is no robot to show.
        seed: of the random start.
        name: as in SoftGym's registry, e.g. `RopeFlatten`.
    """

    def __init__(self, config: StepEnvConfig, seed: int, name: str) -> None:
        self.goal = GOALS[name][0]
        if name not in _simulators:
            _simulators[name] = _Simulator(name)
        self._simulator = _simulators[name]
        self._env = self._simulator.env
        self._starts = self._env.cached_init_states
        self._num_particles, self._num_shapes = (
            max(np.size(start[part]) for start in self._starts) for part in ("particle_pos", "shape_pos")
        )
        self.snapshot_size = 1 + self._num_particles + self._num_shapes
        self._is_random = config.start != "fixed"
        self._episode_steps = config.episode_steps
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, self._env.observation_space.shape, np.float32)
        self._action_shape = tuple(self._env.action_space.shape)
        self.action_space = gym.spaces.Box(-1.0, 1.0, self._action_shape, np.float32)
        self._start = 0
        self._actions: list[FloatArray] = []
        self._latest: tuple[FloatArray, float, dict[str, Any]]
        self.reset(seed=seed)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        """Returns the first observation [D] and info of a new episode; `options` is not used."""
        super().reset(seed=seed, options=options)
        self._start = int(self.np_random.integers(len(self._starts))) if self._is_random else 0
        self._actions = []
        self._replay()
        return self._latest[0], self._latest[2]

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        """Returns observation [D], SoftGym's reward, never terminated, truncated at the time limit, info.

        Raises:
            NumericsError: the action is not finite.
        """
        check_action(action)
        if self._simulator.holder is not self:  # another env of this process has stepped or drawn since
            self._replay()
        self._actions.append(np.array(action, np.float32))
        self._step(self._actions[-1])
        obs, reward, info = self._latest
        return obs, reward, False, len(self._actions) >= self._episode_steps, info

    def snapshot(self) -> FloatArray:
        """Returns [S]: the start's number, particles, shapes."""
        return self._latest[2]["snapshot"]

    def draw(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Returns images [N, size_px, size_px, 3] of `snapshots` [N, S], rounded to the grain of `image_key` first."""
        self._simulator.holder = None  # drawing moves the scene: the env that steps next replays its episode
        frames = np.empty((len(snapshots), size_px, size_px, 3), np.uint8)
        for key, frame in zip(self.image_key(snapshots), frames, strict=True):
            positions = (key[1:] * _KEY_METRES).astype(np.float32)
            start = self._starts[key[0]]  # scenes differ in their numbers of particles and shapes
            particles, shapes = np.size(start["particle_pos"]), np.size(start["shape_pos"])
            shown = {
                "particle_pos": positions[:particles],
                "particle_vel": np.zeros_like(start["particle_vel"]),
                "shape_pos": positions[self._num_particles :][:shapes],
            }
            self._env.set_scene(self._env.cached_configs[key[0]], start | shown)
            frame[:] = self._env.get_image(size_px, size_px)
        return frames

    def image_key(self, snapshots: FloatArray) -> NDArray[np.int64]:
        """Returns [N, S]: the start's number, and positions in steps of a quarter of a millimetre."""
        keys = np.rint(snapshots / _KEY_METRES).astype(np.int64)
        keys[:, 0] = snapshots[:, 0]
        return keys

    def get_state(self) -> dict[str, Any]:
        """Returns the episode so far, and the generator."""
        actions = np.array(self._actions, np.float32).reshape(-1, *self._action_shape)
        return {"start": self._start, "actions": actions, "generator": self.generator_text()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Replays the stored episode; as exact as PyFleX's solver, which runs on a GPU, repeats itself."""
        self._start = int(state["start"])
        self._actions = list(np.asarray(state["actions"], np.float32))
        self.set_generator(state["generator"])
        self._replay()

    def _replay(self) -> None:
        """Brings the simulator to the episode's present state."""
        self._simulator.holder = self
        self._remember(self._env.reset(config_id=self._start), 0.0, {})
        for action in self._actions:
            self._step(action)

    def _step(self, action: FloatArray) -> None:
        low, high = self._env.action_space.low, self._env.action_space.high
        obs, reward, _, info = self._env.step(low + (np.clip(action, -1.0, 1.0) + 1.0) / 2 * (high - low))
        self._remember(obs, reward, info)

    def _remember(self, obs: FloatArray, reward: float, info: dict[str, Any]) -> None:
        """Stores the simulator's latest answer; at the start of an episode progress and success are still zero."""
        performance = float(info.get("normalized_performance", 0.0))
        state, snapshot = self._env.get_state(), np.zeros(self.snapshot_size, np.float32)
        particles, shapes = np.ravel(state["particle_pos"]), np.ravel(state["shape_pos"])
        snapshot[0] = self._start
        snapshot[1 : 1 + len(particles)] = particles
        snapshot[1 + self._num_particles :][: len(shapes)] = shapes
        info = {"snapshot": snapshot, "progress": min(max(performance, 0.0), 1.0), "success": performance > _SUCCESS}
        self._latest = np.asarray(obs, np.float32), float(reward), info
