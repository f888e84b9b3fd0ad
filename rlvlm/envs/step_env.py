"""The contract of an env: a Gymnasium env whose images can be drawn later from a few stored numbers.

Frames are references, not pixels: replay, query sampler and preference set keep snapshots (a few dozen floats), and
pixels are drawn when somebody looks. `rlvlm.envs.contracts` holds every member to this contract.
"""

from abc import abstractmethod
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rlvlm.core.errors import NumericsError
from rlvlm.core.steps import FloatArray, Frames


class StepEnv(gym.Env[FloatArray, FloatArray]):
    """A continuous-control env with snapshots.

    Observations are float32 `[D]`, actions float32 `[A]` in [-1, 1]. `reset` and `step` put into `info`:
    `snapshot` (`[S]` float32, of the state just reached), `progress` (float in [0, 1], the simulator's truth) and
    `success` (bool). Time limits truncate, they do not terminate.
    """

    goal: str
    """Fills the slot of the prompt, e.g. `open the drawer`; empty where only the user can say it."""
    note: str = ""
    """What a user should know about this env's images; `rlvlm check-task` prints it."""
    snapshot_size: int
    """S."""
    observation_space: gym.spaces.Box  # pyright: ignore[reportIncompatibleVariableOverride] - narrower than Gymnasium's
    action_space: gym.spaces.Box  # pyright: ignore[reportIncompatibleVariableOverride]

    @abstractmethod
    def snapshot(self) -> FloatArray:
        """The present state as `[S]`: everything that can change the image."""

    @abstractmethod
    def draw(self, snapshots: FloatArray, size_px: int) -> Frames:
        """Images `[N, size_px, size_px, 3]` of `snapshots` `[N, S]`. The running episode is not disturbed."""

    @abstractmethod
    def image_key(self, snapshots: FloatArray) -> NDArray[np.int64]:
        """`[N, P]`: snapshots with equal keys look the same, to well under a pixel at any size in use."""

    @abstractmethod
    def get_state(self) -> dict[str, Any]:
        """The full state as arrays, numbers and strings: after `set_state` the future is bit-identical."""

    @abstractmethod
    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned, on this or another instance of the same config."""

    def scripted_action(self, obs: FloatArray) -> FloatArray | None:
        """`[A]` what a script that knows the goal does next, not clipped; None where there is none.

        It shows what a task looks like when it is done, for contact sheets and the like; nobody learns from it.
        """
        return None


def check_action(action: FloatArray) -> None:
    """Passes when `action` [A] is finite: a simulator does not recover from one that is not.

    Raises:
        NumericsError: it is not.
    """
    if not np.isfinite(action).all():
        raise NumericsError(f"actions must be finite, got {action}", "look at the policy's losses before this step")
