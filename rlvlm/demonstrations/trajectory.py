"""A trajectory of single steps, from any file format, and how it is cut into chunks."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import tyro
from numpy.typing import NDArray
from PIL import Image

from rlvlm.core.errors import UsageError
from rlvlm.core.grippers import OPENNESS, GripperUnits
from rlvlm.core.steps import FloatArray, Frames

_STILL = 1e-4  # an action of at most this length counts as no movement, as in OpenVLA's filter
SuccessRule = Literal["assumed", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CutConfig:
    """Settings by which recorded steps are converted and cut into chunks. The folder's card records them."""

    stride: int = 0
    """Steps from the start of one chunk to that of the next, >= 0; 0: a chunk's length, so that chunks do not
    overlap."""
    last: Literal["still", "repeat", "drop"] = "still"
    """Filling of an incomplete last chunk. still: with no movement and the gripper unchanged; repeat: with the last
    action, as in OpenVLA-OFT; drop: it is left out."""
    drop_no_ops: bool = False
    """Whether to leave out steps that neither move the arm nor change the gripper, as in OpenVLA's LIBERO data."""
    turn: bool | None = None
    """Whether to rotate images by half a turn. None: only for LIBERO's HDF5 files, which are upside down."""
    late: bool | None = None
    """Whether the observation beside an action was made after it. None: only in HDF5 files written by LIBERO's own
    script."""
    gripper: GripperUnits | None = None
    """Units of gripper actions; envs use 1 for open and 0 for closed. None: -1 opens and 1 closes, as in LIBERO, if any
    action is negative; otherwise the units must be given."""
    image_px: int = 0
    """Side to which images are scaled, pixels; 0 keeps them as they are. A policy needs them at its own size."""
    unlike: bool = False
    """Whether to accept data that start elsewhere than the task's own episodes, or whose actions are positions."""
    success: Annotated[SuccessRule | None, tyro.conf.arg(prefix_name=False)] = None
    """Treatment of data that do not say which episodes succeeded. assumed: all did; none: none did. None: such data are
    refused."""
    cameras: tuple[str, ...] = ()
    """Names of the images in the data, in the order of the env's cameras; empty: all, the wrist's last."""

    def __post_init__(self) -> None:
        if self.stride < 0 or self.image_px < 0:
            raise ValueError(f"cut.stride and cut.image_px must be >= 0, got {self.stride} and {self.image_px}")


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
    indices: NDArray[np.int64] | None = None
    """[T] indices of the rows in the whole data set; None: the file has none."""
    instructions: tuple[str, ...] = ()
    """[T] sentence of each step; empty: one for all."""
    digest: str = ""
    """SHA-256 of the recorded data besides these arrays; empty if the arrays identify the episode."""

    @classmethod
    def recorded(
        cls, actions: FloatArray, proprio: FloatArray, *, is_late: bool, rewards: FloatArray | None = None, **rest: Any
    ) -> Self:
        """Pairs the actions and observations of a file's rows; if these are late, each with the row before."""
        if is_late:  # the first action has no observation before it, and the last state no action after it
            actions, proprio = actions[1:], proprio[:-1]
            rewards = None if rewards is None else rewards[1:]
        return cls(actions=actions, proprio=proprio, is_late=is_late, rewards=rewards, **rest)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """C chunks of a trajectory."""

    starts: NDArray[np.intp]
    """[C] step at which each chunk starts."""
    actions: FloatArray
    """[C, L, A] actions of the chunks."""
    steps: NDArray[np.int64]
    """[C] number of steps until the next chunk, or the end."""


def cut(actions: FloatArray, grippers: NDArray[np.bool_], length: int, config: CutConfig) -> Cut:
    """Cuts `actions` [T, A] into chunks of `length`; C may be 0.

    Args:
        actions: in the env's units, where 0 is no movement.
        grippers: [A] which dimensions are grippers.
        length: L, the actions in a chunk.
        config: stride, treatment of the last chunk, and filter.
    """
    kept = moving(actions, grippers) if config.drop_no_ops else np.arange(len(actions))
    stride = config.stride or length
    firsts = np.arange(0, len(kept), stride)
    if config.last == "drop":
        firsts = firsts[firsts + length <= len(kept)]
    chunks = np.empty((len(firsts), length, actions.shape[1]), np.float32)
    for chunk, first in zip(chunks, firsts.tolist(), strict=True):
        given = actions[kept[first : first + length]]
        chunk[: len(given)] = given
        # for the arm 0 is no movement; a gripper's command is a position, and 0 would close it
        chunk[len(given) :] = given[-1] if config.last == "repeat" else np.where(grippers, given[-1], 0.0)
    # with a stride below L chunks overlap: only the steps up to the next one count
    steps = np.minimum(stride, len(kept) - firsts)
    return Cut(starts=kept[firsts], actions=chunks, steps=steps.astype(np.int64))


def moving(actions: FloatArray, grippers: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Returns the indices of the `actions` [T, A] that move the arm, or change a gripper since the last kept action.

    Source: Kim et al. 2024, arXiv:2406.09246 (OpenVLA), its LIBERO data without no-ops.
    """
    kept: list[int] = []
    # a gripper is compared with the last kept action, so that a slow change is not lost step by step
    for place, action in enumerate(actions):
        is_still = np.linalg.norm(action[~grippers]) < _STILL
        if not (is_still and (not kept or np.array_equal(action[grippers], actions[kept[-1]][grippers]))):
            kept.append(place)
    return np.array(kept, np.intp)


def opened(actions: FloatArray, grippers: NDArray[np.bool_], units: GripperUnits) -> FloatArray:
    """Returns `actions` [T, A] with 1 for an open gripper and 0 for a closed one."""
    factor, offset = OPENNESS[units]
    return np.where(grippers, factor * actions + offset, actions).astype(np.float32)
