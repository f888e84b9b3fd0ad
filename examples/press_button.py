"""An env in turns of your own in one file: press the button of the lamp's colour. See docs/turn_envs.md."""

import numpy as np

from rlvlm.envs.config import TurnEnvConfig
from rlvlm.envs.env import TurnEnv
from rlvlm.envs.registry import Task

TASK = Task(
    name="press_button",
    goal="press the button of the lamp's colour",
    maker="press_button:PressButton",
    kind="turns",
    env=TurnEnvConfig(episode_steps=4),
)
COLOURS = np.array([[200, 30, 30], [30, 160, 30], [30, 30, 200]], np.uint8)


class PressButton(TurnEnv):
    """A snapshot is the number of the lamp's colour; pressing the right button ends the episode."""

    goal, snapshot_size, image_px = TASK.goal, 1, (64, 64)
    action_names = ("red", "green", "blue")
    grain = 1  # snapshots are whole numbers

    def __init__(self, config: TurnEnvConfig, seed: int) -> None:
        self.max_turns = config.episode_steps
        self.reset(seed=seed)

    def begin(self):
        self.lamp, self.turns, self.is_right = int(self.np_random.integers(3)), 0, False

    def act(self, action):  # None: the reply could not be read, which must have a price
        self.turns, self.is_right = self.turns + 1, action == self.lamp
        reward = 1.0 if self.is_right else -0.1
        return reward, self.is_right, not self.is_right and self.turns >= self.max_turns

    def prompt(self):
        return (
            "The image shows a lamp. Which button has its colour? Answer with one JSON object that has the keys "
            '"thoughts" and "action", which is "red", "green" or "blue".'
        )

    def is_success(self):
        return self.is_right

    def progress(self):
        return float(self.is_right)

    def snapshot(self):
        return np.array([self.lamp], np.float32)

    def draw(self, snapshots):
        frames = np.full((len(snapshots), 64, 64, 3), 230, np.uint8)
        frames[:, 16:48, 16:48] = COLOURS[self.image_key(snapshots)[:, 0]][:, None, None]
        return frames

    def get_state(self):
        numbers = np.array([self.lamp, self.turns, self.is_right])
        return {"numbers": numbers, "generator": self.generator_text()}

    def set_state(self, state):
        self.lamp, self.turns, is_right = (int(number) for number in state["numbers"])
        self.is_right = bool(is_right)
        self.set_generator(state["generator"])

    def expert_action(self):  # with `has_expert = False` instead of both, bring demonstrations or begin without
        return self.lamp

    def expert_thought(self):
        return f"The lamp is {self.action_names[self.lamp]}."
