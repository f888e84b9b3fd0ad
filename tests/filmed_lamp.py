"""An env in turns that cannot draw its past again."""

import numpy as np

from rlvlm.envs.config import TurnEnvConfig
from rlvlm.envs.env import TurnEnv
from rlvlm.envs.pixels import PixelEnv
from rlvlm.envs.registry import Task

TASK = Task(
    name="filmed_lamp",
    goal="press the button of the lamp's colour",
    maker="filmed_lamp:FilmedLamp",
    kind="turns",
    env=TurnEnvConfig(episode_steps=3),
)


class FilmedLamp(PixelEnv, TurnEnv):
    """Is as bright as the number of the button that is to be pressed."""

    goal, image_px, action_names = TASK.goal, (32, 48), ("red", "green")

    def __init__(self, config: TurnEnvConfig = TASK.env, seed: int = 0) -> None:
        self.px, self.max_turns = 24, config.episode_steps
        self.reset(seed=seed)

    def film(self) -> None:
        self.keep(np.full((self.px, 2 * self.px, 3), 100 + 90 * self.lamp + self.presses, np.uint8))

    def begin(self) -> None:
        self.lamp, self.turns, self.presses, self.is_right = int(self.np_random.integers(2)), 0, 0, False
        self.film()

    def act(self, action: int | None) -> tuple[float, bool, bool]:
        self.turns, self.is_right = self.turns + 1, action == self.lamp
        self.presses += action is not None  # what cannot be read is not seen
        self.film()
        return 1.0 if self.is_right else -0.1, self.is_right, not self.is_right and self.turns >= self.max_turns

    def prompt(self) -> str:
        return "Which button has the lamp's colour?"

    def is_success(self) -> bool:
        return self.is_right

    def progress(self) -> float:
        return float(self.is_right)

    def get_state(self) -> dict:
        return {
            "numbers": np.array([self.lamp, self.turns, self.presses, self.is_right]),
            "generator": self.generator_text(),
        }

    def set_state(self, state: dict) -> None:
        self.lamp, self.turns, self.presses, is_right = (int(number) for number in state["numbers"])
        self.is_right = bool(is_right)
        self.set_generator(state["generator"])
        self.film()

    def expert_action(self) -> int:
        return self.lamp

    def expert_thought(self) -> str:
        return "I see it."
