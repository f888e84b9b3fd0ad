"""`number_line`: bring a number to its target in steps of one. The first game of gym-cards. Made by the registry.

Source: Zhai et al. 2024 (RL4VLM), arXiv:2405.10292, app. B. Rules, rewards and image are the paper's. Departures:
seeds work, and a reply that cannot be read moves nothing and costs 1, as a move in the wrong direction does.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.env import Outcome, TurnEnv
from rlvlm.envs.gym_cards.canvas import SIDE_PX, font
from rlvlm.envs.gym_cards.config import CardsConfig
from rlvlm.envs.gym_cards.games import GAMES

_LAST = 5  # numbers run from 0 to this
_MAX_TURNS = 2 * _LAST
_PROMPT = (
    "This is a game on a number line. The picture shows a target number and the current number. "
    "Each turn you add one to the current number or take one away from it; bring it to the target. "
    'Answer with one JSON object that has the keys "current number", "target number", "thoughts" '
    '(read both numbers, then decide) and "action", which is "-" or "+".'
)


class NumberLine(TurnEnv):
    """Actions `-` and `+`; +1 on reaching the target, -1 for a move that comes no nearer, 0 for one that does.

    A snapshot [2] is the current number and the target. Episodes last 10 turns at most.

    Args:
        config: rules; `episode_steps` above 10 counts as 10.
        seed: of the episodes, until `reset` is given another seed.
    """

    goal = GAMES["number_line"][0]
    snapshot_size = 2
    action_names = ("-", "+")
    num_starts = 30
    image_px = (SIDE_PX, SIDE_PX)
    grain = 1  # snapshots hold whole numbers

    def __init__(self, config: CardsConfig, seed: int) -> None:
        self.rules, self.split = config.rules, config.split
        self._max_turns = min(config.episode_steps, _MAX_TURNS)
        self.reset(seed=seed)

    def begin(self) -> None:
        """Draws both numbers; equal ones are separated as in the reference."""
        self._current, self._target = (int(number) for number in self.np_random.integers(0, _LAST + 1, 2))
        if self._current == self._target:  # an episode that begins with success would teach nothing
            self._target = (self._target + 1) % _LAST
        self._first_distance = abs(self._target - self._current)
        self._turns = 0

    def act(self, action: int | None) -> Outcome:
        """Moves by one, within 0 and 5."""
        before = abs(self._target - self._current)
        if action is not None:
            self._current = min(max(self._current + (1 if action else -1), 0), _LAST)
        self._turns += 1
        after = abs(self._target - self._current)
        reward = 1.0 if after == 0 else (0.0 if after < before else -1.0)
        return reward, after == 0, after > 0 and self._turns >= self._max_turns

    def reference_info(self) -> dict[str, Any]:
        """Returns the reference's `info`."""
        return {"Target": self._target, "Current": self._current}

    def prompt(self) -> str:
        """Returns the same prompt in every turn: the numbers are in the image."""
        return _PROMPT

    def is_success(self) -> bool:
        """Returns whether the current number is the target."""
        return self._current == self._target

    def progress(self) -> float:
        """Returns the share of the distance that is done."""
        return max(0.0, 1.0 - abs(self._target - self._current) / self._first_distance)

    def turns_left(self) -> int:
        """Returns the distance to the target."""
        return abs(self._target - self._current)

    def snapshot(self) -> FloatArray:
        """Returns [2]: current number and target."""
        return np.array([self._current, self._target], np.float32)

    def draw(self, snapshots: FloatArray) -> Frames:
        """Returns images [N, 300, 300, 3] of `snapshots` [N, 2]."""
        return np.stack([_paint(int(current), int(target)) for current, target in self.image_key(snapshots)])

    def get_state(self) -> dict[str, Any]:
        """Returns numbers, turns and generator."""
        numbers = np.array([self._current, self._target, self._first_distance, self._turns])
        return {"numbers": numbers, "generator": self.generator_text()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._current, self._target, self._first_distance, self._turns = (int(number) for number in state["numbers"])
        self.set_generator(state["generator"])

    def expert_action(self) -> int:
        """Returns the sign that leads to the target."""
        return int(self._target > self._current)

    def expert_thought(self) -> str:
        """Returns both numbers and a comparison."""
        is_larger = self._target > self._current
        reason = f"The target is {'larger' if is_larger else 'smaller'}, so I {'add' if is_larger else 'subtract'} one."
        return f'"current number": {self._current}, "target number": {self._target}, "thoughts": "{reason}"'


@lru_cache(maxsize=(_LAST + 1) ** 2)
def _paint(current: int, target: int) -> Frames:
    """Returns one image [300, 300, 3]; must not be written to."""
    image = Image.new("RGB", (SIDE_PX, SIDE_PX), "white")
    pen = ImageDraw.Draw(image)
    pen.text((30, 60), f"Target: {target}", font=font(36, is_bold=True), fill="black")
    pen.text((30, 180), f"Current: {current}", font=font(36, is_bold=True), fill="black")
    return np.asarray(image)
