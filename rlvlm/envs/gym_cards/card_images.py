"""The games of gym-cards as ordinary Gymnasium envs, for other libraries: an image in, the index of an action out.

Importing this file registers them under our ids, `rlvlm/NumberLine-v0` and so on, and also under the reference's ids,
`gym_cards/NumberLine-v0` and so on, unless its own package has done so; in one line:
`gymnasium.make("rlvlm.envs.gym_cards.card_images:rlvlm/NumberLine-v0")`.
"""

from typing import Any, Literal

import gymnasium as gym
import numpy as np

from rlvlm.core.steps import Frames
from rlvlm.envs.gym_cards.blackjack import Blackjack
from rlvlm.envs.gym_cards.config import CardsConfig
from rlvlm.envs.gym_cards.games import IDS, OWN_IDS
from rlvlm.envs.gym_cards.number_line import NumberLine
from rlvlm.envs.gym_cards.points import PointsGame
from rlvlm.envs.registry import make_env, task_env


class CardImageEnv(gym.Env[Frames, int]):
    """Observations are the images [300, 300, 3] that the env in turns shows, actions index its `action_names`.

    Args:
        game: a task of gym-cards, e.g. `number_line`.
        rules: see `CardsConfig`.
        deals: see `CardsConfig`.
        render_mode: `rgb_array` or None.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 2}

    def __init__(
        self,
        game: str,
        rules: Literal["strict", "legacy"] = "strict",
        deals: Literal["any", "solvable"] = "any",
        render_mode: str | None = None,
    ) -> None:
        config = CardsConfig(rules=rules, deals=deals, episode_steps=task_env(game).episode_steps)
        env = make_env(game, config, 0)
        assert isinstance(env, NumberLine | Blackjack | PointsGame), "the games that have these settings"
        self._env = env
        self.render_mode = render_mode
        self.action_names = self._env.action_names
        """Action words in the order of their indices."""
        self.observation_space = gym.spaces.Box(0, 255, (*self._env.image_px, 3), np.uint8)
        self.action_space = gym.spaces.Discrete(len(self.action_names))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Frames, dict[str, Any]]:
        """Returns first image and info of a new episode; `options` is not used."""
        super().reset(seed=seed, options=options)
        # the inner env gets a seed of its own, so that episodes after a seeded one are reproducible too
        if seed is None and self._np_random is not None:
            seed = int(self.np_random.integers(2**31))
        self._env.reset(seed=seed)
        return self.render(), self._info()

    def step(self, action: int | np.integer) -> tuple[Frames, float, bool, bool, dict[str, Any]]:
        """Returns image, reward, terminated, truncated, info.

        Raises:
            ValueError: there is no such action.
        """
        if not self.action_space.contains(action):
            names = ", ".join(f"{number} {name}" for number, name in enumerate(self.action_names))
            raise ValueError(f"an action must be one of {names}; got {action!r}")
        reward, terminated, truncated = self._env.act(int(action))
        return self.render(), reward, terminated, truncated, self._info()

    def render(self) -> Frames:  # pyright: ignore[reportIncompatibleMethodOverride] - always one image
        """Returns the present image."""
        return self._env.draw(self._env.snapshot()[None])[0]

    def _info(self) -> dict[str, Any]:
        """Returns the inner env's info with the reference's keys, and the action words that a text wrapper needs."""
        return self._env.info() | self._env.reference_info() | {"prompt": self._env.prompt()}


for _id, _game in (IDS | OWN_IDS).items():
    if _id not in gym.registry:  # where the reference's package was imported first, its names stay its own
        gym.register(_id, f"{__name__}:CardImageEnv", kwargs={"game": _game})
