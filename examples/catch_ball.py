"""An env in chunks of your own in one file, with a setting of its own, the wind. See docs/chunk_envs.md."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from rlvlm.core.checks import Bound
from rlvlm.core.episodes import Observations
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.env import ChunkEnv
from rlvlm.envs.registry import Task

SPEED, REACH = 0.1, 0.08  # of the hand in an env step, and from where it catches; the field is [-1, 1] by [-1, 1]
COLOURS = {"red": (200, 40, 40), "blue": (40, 70, 200)}


@dataclass(frozen=True, kw_only=True)
class CatchBallConfig(ChunkEnvConfig):
    """A field with two balls, and wind."""

    wind: Annotated[float, Bound("[-0.5, 0.5]")] = 0.1
    """Speed of the balls to the right, in [-0.5, 0.5], where the hand's largest is 1."""


TASK = Task(
    name="catch_ball",
    goal="catch the ball of the named colour",
    maker="catch_ball:CatchBall",
    kind="chunks",
    env=CatchBallConfig(episode_steps=24),
)


class CatchBall(ChunkEnv):
    """A scene [7] is where the hand, the red and the blue ball are, and the number of the ball that is asked for."""

    goal, snapshot_size, proprio_size, chunk_steps, grain = TASK.goal, 7, 2, 4, 1e-3
    instructions, cameras = tuple(f"catch the {colour} ball" for colour in COLOURS), ("above",)
    action_low, action_high, scaled_actions = -np.ones(2, np.float32), np.ones(2, np.float32), (True, True)

    def __init__(self, config: CatchBallConfig, seed: int) -> None:
        self.config, self.episode_steps = config, config.episode_steps
        self.reset(seed=seed)

    def reset(self, *, seed=None, options=None):
        self.state_id, self.age, self.was_caught = self.drawn_state(seed, options), 0, False
        rng = np.random.default_rng(self.state_id)  # the number alone decides a start: a group's episodes begin alike
        self.scene = np.array([rng.uniform(-0.9, 0.9), 0.9, *rng.uniform(-0.7, 0.5, 4), rng.integers(2)], np.float32)
        return self.observed(), self.info(success=False)

    def step(self, chunk):
        trail, rewards, caught, is_over = [], [], [], False
        for action in chunk:
            self.scene, self.age = self.moved(self.scene, action), self.age + 1
            trail.append(self.scene)
            caught.append(bool(np.hypot(*self.way(self.scene)) < REACH))
            rewards.append(float(caught[-1] and not self.was_caught))  # once, however long it is held
            self.was_caught |= caught[-1]
            is_over = bool(self.was_caught) and not self.config.continue_after_success
            if is_over or self.age >= self.episode_steps:
                break  # the rest of the chunk is not run
        info = self.info(any(caught)) | {"steps": len(trail), "snapshots": np.stack(trail)}
        info |= {"env_rewards": np.array(rewards, np.float32), "success_at_end": caught[-1]}
        return self.observed(), sum(rewards), is_over, not is_over and self.age >= self.episode_steps, info

    def moved(self, scene, action):
        move = [*np.clip(action, -1, 1), *(self.config.wind, 0) * 2, 0]
        return np.clip(scene + SPEED * np.array(move), -1, 1).astype(np.float32)

    def way(self, scene):
        return (scene[2:4] if scene[6] == 0 else scene[4:6]) - scene[:2]

    def observed(self):
        text = self.instructions[int(self.scene[6])]
        return Observations(snapshots=self.scene[None], texts=(text,), proprio=self.scene[None, :2])

    def info(self, success):
        left = float(np.hypot(*self.way(self.scene)))
        return {"state_id": self.state_id, "progress": max(0.0, 1 - left / 2), "success": success}

    def scripted_chunk(self, noise, rng):
        scene, chunk = self.scene, np.zeros((self.chunk_steps, 2), np.float32)
        for action in chunk:  # each answers what the ones before it lead to
            action[:] = self.way(scene) / SPEED + [self.config.wind, 0] + noise * rng.normal(size=2)
            scene = self.moved(scene, action)
        return np.clip(chunk, -1, 1)

    def snapshot(self):
        return self.scene.copy()

    def draw(self, snapshots, size_px, camera=""):
        x, y = np.meshgrid(*[(np.arange(size_px) + 0.5) * 2 / size_px - 1] * 2)
        frames = np.full((len(snapshots), size_px, size_px, 3), 230, np.uint8)
        for frame, scene in zip(frames, self.image_key(snapshots) * self.grain, strict=True):
            for at, colour in zip((2, 4, 0), (*COLOURS.values(), (40, 40, 40)), strict=True):
                frame[np.hypot(x - scene[at], y - scene[at + 1]) < 0.12] = colour
        return frames

    def get_state(self):
        numbers = np.array([self.age, self.was_caught, self.state_id])
        return {"scene": self.scene.copy(), "numbers": numbers, "generator": self.generator_text()}

    def set_state(self, state):
        self.scene = np.array(state["scene"])
        self.age, self.was_caught, self.state_id = (int(number) for number in state["numbers"])
        self.set_generator(state["generator"])
