"""A task of your own in one file: a ball slides over a plate and has to stop in the ring. See docs/tasks.md."""

import gymnasium as gym
import numpy as np

from rlvlm.envs.config import StepEnvConfig
from rlvlm.envs.env import StepEnv
from rlvlm.envs.registry import Task
from rlvlm.runs.settings.config import RunConfig
from rlvlm.runs.settings.kinds import StepsRun

RING = np.array([0.7, 0.3])
TASK = Task(
    name="slide_ball",
    goal="put the red ball into the green ring",
    maker="slide_ball:SlideBall",
    recipe="slide_ball:recipe",
)


def recipe() -> RunConfig:
    """What a run starts from; the command line overrides it."""
    return StepsRun(task=TASK.name, steps=5_000, env=StepEnvConfig(episode_steps=50))


class SlideBall(StepEnv):
    """Observations and snapshots are the ball's place on the unit square; an action moves it."""

    goal, snapshot_size = TASK.goal, 2
    grain = 1e-3  # snapshots are rounded to this before they are drawn: less than that nobody sees

    def __init__(self, config: StepEnvConfig, seed: int) -> None:
        self.observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.config = config
        self.reset(seed=seed)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.ball = self.np_random.uniform(0, 1, 2) if self.config.start == "random" else np.array([0.2, 0.8])
        self.steps = 0
        return self.snapshot(), self.info()

    def step(self, action):
        self.ball, self.steps = np.clip(self.ball + 0.05 * np.clip(action, -1, 1), 0, 1), self.steps + 1
        info = self.info()
        return self.snapshot(), info["progress"], False, self.steps >= self.config.episode_steps, info

    def info(self):
        left = float(np.linalg.norm(self.ball - RING))
        return {"snapshot": self.snapshot(), "progress": max(1 - left, 0.0), "success": left < 0.1}

    def snapshot(self):
        return self.ball.astype(np.float32)

    def draw(self, snapshots, size_px):
        x, y = np.meshgrid(*[(np.arange(size_px) + 0.5) / size_px] * 2)
        frames = np.full((len(snapshots), size_px, size_px, 3), 230, np.uint8)
        frames[:, np.abs(np.hypot(x - RING[0], y - RING[1]) - 0.1) < 0.02] = (0, 150, 0)
        for frame, (ball_x, ball_y) in zip(frames, self.image_key(snapshots) * self.grain, strict=True):
            frame[np.hypot(x - ball_x, y - ball_y) < 0.06] = (200, 30, 30)
        return frames

    def get_state(self):
        return {"ball": self.ball, "steps": self.steps, "generator": self.generator_text()}

    def set_state(self, state):
        self.ball, self.steps = np.array(state["ball"]), int(state["steps"])
        self.set_generator(state["generator"])
