"""A trajectory of single steps, whatever file it comes from, and how it is cut into chunks."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import tyro
from numpy.typing import NDArray
from PIL import Image

from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray, Frames

_STILL = 1e-4  # an action of at most this length moves nothing, as in OpenVLA's filter
SuccessRule = Literal["assumed", "none"]
GripperUnits = Literal["minus_one_opens", "one_opens", "one_closes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CutConfig:
    """How steps become chunks, and what is converted on the way. What was done is on the folder's card."""

    stride: int = 0
    """Steps from one chunk's first to that of the next, >= 0; 0: a chunk's length, so that no step is in two."""
    last: Literal["still", "repeat", "drop"] = "still"
    """Steps that the last chunk lacks. still: no movement, the gripper as it was; repeat: the last action again, as
    OpenVLA-OFT; drop: a chunk that is not whole is left out."""
    drop_no_ops: bool = False
    """Leave out steps that neither move the arm nor change the gripper, as OpenVLA's LIBERO data do."""
    turn: bool | None = None
    """Turn images by half a turn. None: those of LIBERO's HDF5 files, which are upside down, and no others."""
    late: bool | None = None
    """Whether what was seen beside an action was seen after it. None: in HDF5 files that LIBERO's own script wrote,
    and in no others."""
    gripper: GripperUnits | None = None
    """Units of the gripper's actions; envs have 1 for open and 0 for closed. None: -1 opens and 1 closes, as in
    LIBERO, where any is negative; else it must be said."""
    image_px: int = 0
    """Side that images are scaled to; 0 keeps them as they are. A policy wants them at its own size."""
    unlike: bool = False
    """Take what begins elsewhere than the task's own episodes, or whose actions are places and not movements."""
    success: Annotated[SuccessRule | None, tyro.conf.arg(prefix_name=False)] = None
    """What data are taken for that do not say which episodes succeeded. assumed: all did; none: none did. None: such
    data are refused."""
    cameras: tuple[str, ...] = ()
    """Names of the images in the data, in the order of the env's cameras; empty: all, the wrist's last."""

    def __post_init__(self) -> None:
        if self.stride < 0 or self.image_px < 0:
            raise ValueError(f"cut.stride and cut.image_px must be >= 0, got {self.stride} and {self.image_px}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RobotTrajectory:
    """T steps of one episode: what was seen before each action."""

    name: str
    """Name of the episode in its file."""
    file: Path
    instruction: str
    actions: FloatArray
    """[T, A] in the file's units."""
    proprio: FloatArray
    """[T, P]."""
    look: Callable[[NDArray[np.intp]], Frames]
    """Makes the images [n, cameras, H, W, 3] before the steps [n], as they are in the file."""
    success: bool | None = True
    """None: the file does not say."""
    quality: float | None = None
    """How much of the task is done at the end, in [0, 1], as a person or a published table says; None: unknown."""
    is_late: bool = False
    """Whether the file had what was seen after an action beside it; it has been put right."""
    rewards: FloatArray | None = None
    """[T] of the actions; None: the file has none."""
    progress: FloatArray | None = None
    """[T] true progress in [0, 1] of what was seen; None: the file has none."""
    indices: NDArray[np.int64] | None = None
    """[T] numbers of the rows in the whole data set; None: the file has none."""
    digest: str = ""
    """SHA-256 of what was recorded besides these arrays; empty where they tell episodes apart."""

    @classmethod
    def recorded(
        cls, actions: FloatArray, proprio: FloatArray, *, is_late: bool, rewards: FloatArray | None = None, **rest: Any
    ) -> Self:
        """Pairs the actions and observations of a file's rows; where these are late, with the row before."""
        if is_late:  # the first action has no observation before it, and the last state no action after it
            actions, proprio = actions[1:], proprio[:-1]
            rewards = None if rewards is None else rewards[1:]
        return cls(actions=actions, proprio=proprio, is_late=is_late, rewards=rewards, **rest)

    def known_success(self, rule: SuccessRule | None) -> bool:
        """Whether the episode is taken for a success.

        Args:
            rule: for a file that does not say.

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
        """What `look` makes, [n, cameras, H, W, 3].

        Raises:
            UsageError: the images are missing, torn or of sizes that are not decoded, or do not fit the steps.
        """
        try:
            return self.look(steps)
        except (OSError, ValueError, LookupError, TypeError, SyntaxError, Image.DecompressionBombError) as error:
            raise UsageError(f"{self.file}: its images cannot be read: {error}", "fetch it anew") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class CorruptEpisode:
    """An episode, or a whole file of them, that cannot be read."""

    file: Path
    """The one to blame."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """C chunks of a trajectory."""

    starts: NDArray[np.intp]
    """[C] steps before which each chunk was looked at."""
    actions: FloatArray
    """[C, L, A]."""
    steps: NDArray[np.int64]
    """[C] steps until the next chunk, or the end."""


def cut(actions: FloatArray, grippers: NDArray[np.bool_], length: int, config: CutConfig) -> Cut:
    """Cuts `actions` [T, A] into chunks of `length`; C may be 0.

    Args:
        actions: in the env's units, where 0 is no movement.
        grippers: [A] which of their dimensions are grippers.
        length: L.
        config: stride, end and filter.
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
        # standing still is 0 for what moves the arm; a gripper is commanded to a place, and 0 would close it
        chunk[len(given) :] = given[-1] if config.last == "repeat" else np.where(grippers, given[-1], 0.0)
    # with a stride below L chunks overlap: only the steps up to the next one are counted
    steps = np.minimum(stride, len(kept) - firsts)
    return Cut(starts=kept[firsts], actions=chunks, steps=steps.astype(np.int64))


def moving(actions: FloatArray, grippers: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Places of the `actions` [T, A] that move the arm, or a gripper against the last action that was kept.

    Source: Kim et al. 2024, arXiv:2406.09246 (OpenVLA), its LIBERO data without no-ops.
    """
    kept: list[int] = []
    # a gripper is compared with the last action that was kept, so that a slow change of it is not lost step by step
    for place, action in enumerate(actions):
        is_still = np.linalg.norm(action[~grippers]) < _STILL
        if not (is_still and (not kept or np.array_equal(action[grippers], actions[kept[-1]][grippers]))):
            kept.append(place)
    return np.array(kept, np.intp)


def opened(actions: FloatArray, grippers: NDArray[np.bool_], units: GripperUnits) -> FloatArray:
    """`actions` [T, A] with 1 for an open gripper and 0 for a closed one."""
    openness = actions
    if units == "minus_one_opens":
        openness = (1.0 - actions) / 2.0
    elif units == "one_closes":
        openness = 1.0 - actions
    return np.where(grippers, openness, actions).astype(np.float32)
