"""The games of gym-cards as ordinary Gymnasium envs, for other libraries: a picture in, the index of an action out.

Importing this file registers them under the reference's ids, `gym_cards/NumberLine-v0` and so on; in one line:
`gymnasium.make("rlvlm.envs.gym_cards.pictured:gym_cards/NumberLine-v0")`.
"""

from typing import Any, Literal

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rlvlm.envs.config import EnvConfig
from rlvlm.envs.gym_cards.games import IDS
from rlvlm.envs.registry import make_world, task_env
from rlvlm.envs.turns import TurnWorld
from rlvlm.types.steps import Frames


class PicturedGame(gym.Env[Frames, int]):
    """Observations are the pictures [300, 300, 3] that the world in turns shows, actions index its `action_names`.

    Args:
        game: a task of gym-cards, e.g. `number_line`.
        rules: as of `EnvConfig`.
        deals: as of `EnvConfig`.
        render_mode: `rgb_array` or None.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 2}

    def __init__(
        self,
        game: str,
        rules: Literal["mended", "legacy"] = "mended",
        deals: Literal["any", "solvable"] = "any",
        render_mode: str | None = None,
    ) -> None:
        config = EnvConfig(rules=rules, deals=deals, episode_steps=task_env(game).episode_steps)
        self._world: TurnWorld = make_world(game, config, 0)
        self.render_mode = render_mode
        self.action_names = self._world.action_names
        """What the indices mean."""
        self.observation_space = gym.spaces.Box(0, 255, (*self._world.picture_px, 3), np.uint8)
        self.action_space = gym.spaces.Discrete(len(self.action_names))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Frames, dict[str, Any]]:
        """First picture and info of a new episode; `options` is not used."""
        super().reset(seed=seed, options=options)
        if seed is None and self._np_random is not None:
            seed = int(self.np_random.integers(2**31))
        _, info = self._world.reset(seed=seed)
        return self._picture(), self._told(info)

    def step(self, action: int | np.integer) -> tuple[Frames, float, bool, bool, dict[str, Any]]:
        """Picture, reward, terminated, truncated, info."""
        reward, terminated, truncated = self._world.act(int(action))
        return self._picture(), reward, terminated, truncated, self._told(self._world.info())

    def render(self) -> Frames:  # pyright: ignore[reportIncompatibleMethodOverride] - always one picture
        """The present picture."""
        return self._picture()

    def _picture(self) -> NDArray[np.uint8]:
        return self._world.draw(self._world.snapshot()[None])[0]

    def _told(self, info: dict[str, Any]) -> dict[str, Any]:
        """`info` with what a text wrapper needs: the world's words."""
        return info | {"prompt": self._world.prompt()}


for _id, _game in IDS.items():
    if _id not in gym.registry:
        gym.register(_id, f"{__name__}:PicturedGame", kwargs={"game": _game})
