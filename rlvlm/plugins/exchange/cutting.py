"""How a trajectory of single steps is cut into chunks."""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import tyro
from numpy.typing import NDArray

from rlvlm.core.grippers import OPENNESS, GripperUnits
from rlvlm.core.steps import FloatArray
from rlvlm.demonstrations.trajectory import SuccessRule

_STILL = 1e-4  # an action of at most this length counts as no movement, as in OpenVLA's filter


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
