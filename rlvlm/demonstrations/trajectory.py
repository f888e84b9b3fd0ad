"""A trajectory of single steps, from any file format."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray, Frames

SuccessRule = Literal["assumed", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RobotTrajectory:
    """T steps of one episode, with the observation before each action."""

    name: str
    """Name of the episode in its file."""
    file: Path
    instruction: str
    """Sentence of the first step."""
    actions: FloatArray
    """[T, A] in the file's units."""
    proprio: FloatArray
    """[T, P] proprioception."""
    look: Callable[[NDArray[np.intp]], Frames]
    """Function that returns the images [n, cameras, H, W, 3] before the steps [n], as stored in the file."""
    success: bool | None = True
    """Success of the episode; None: the file does not say."""
    quality: float | None = None
    """Share of the task that is done at the end, in [0, 1], according to a person or a published table; None:
    unknown."""
    is_late: bool = False
    """Whether the file's observations were made after the actions beside them; this has been corrected."""
    rewards: FloatArray | None = None
    """[T] rewards of the actions; None: the file has none."""
    progress: FloatArray | None = None
    """[T] true progress in [0, 1] at the observations; None: the file has none."""
    corrected: NDArray[np.bool_] | None = None
    """[T] whether the action was a person's, who had taken over from a policy; None: the file does not say."""
    indices: NDArray[np.int64] | None = None
    """[T] indices of the rows in the whole data set; None: the file has none."""
    instructions: tuple[str, ...] = ()
    """[T] sentence of each step; empty: one for all."""
    digest: str = ""
    """SHA-256 of the recorded data besides these arrays; empty if the arrays identify the episode."""

    @classmethod
    def recorded(cls, actions: FloatArray, proprio: FloatArray, *, is_late: bool, **rest: Any) -> Self:
        """Pairs the actions and observations of a file's rows; if these are late, each with the row before."""
        if is_late:  # the first action has no observation before it, and the last state no action after it
            actions, proprio = actions[1:], proprio[:-1]
            rest |= {name: rest[name][1:] for name in ("rewards", "corrected") if rest.get(name) is not None}
        return cls(actions=actions, proprio=proprio, is_late=is_late, **rest)

    def known_success(self, rule: SuccessRule | None) -> bool:
        """Returns whether the episode counts as a success.

        Args:
            rule: rule for a file that does not say.

        Raises:
            UsageError: it does not, and there is no rule.
        """
        if self.success is None and rule is None:
            raise UsageError(
                f"{self.file} does not say whether its episodes succeeded: no next.success, is_success, success or "
                "reward is in it",
                "--success assumed takes them all for successes, --success none takes none",
            )
        return rule == "assumed" if self.success is None else self.success

    def images(self, steps: NDArray[np.intp]) -> Frames:
        """Returns the images of `look`, [n, cameras, H, W, 3].

        Raises:
            UsageError: the images are missing, corrupt, of sizes that are not decoded, or do not match the steps.
        """
        try:
            return self.look(steps)
        except (OSError, ValueError, LookupError, TypeError, SyntaxError, Image.DecompressionBombError) as error:
            raise UsageError(f"{self.file}: its images cannot be read: {error}", "fetch it anew") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class CorruptEpisode:
    """An episode, or a whole file of them, that cannot be read."""

    file: Path
    """File that caused the error."""
    reason: str
