"""The form of the chunks in a folder, from any source; a policy can only learn from chunks of its env's form."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlvlm.core.errors import UsageError
from rlvlm.core.steps import Frames
from rlvlm.demonstrations.folder import DemonstrationFolder
from rlvlm.demonstrations.records import SOURCE_DIGEST, SOURCE_EPISODE, SOURCE_FRAMES, EpisodeRecord
from rlvlm.envs.env import ChunkEnv
from rlvlm.labels.images import MissingImage


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkForm:
    """Sizes and cameras of the chunks in a folder."""

    chunk_steps: int
    """L, the actions in a chunk."""
    action_size: int
    """A, the numbers in an action."""
    proprio_size: int
    """P, the numbers of proprioception."""
    snapshot_size: int
    """S, the numbers in a snapshot; 0 if images are stored instead of states to draw them from."""
    cameras: tuple[str, ...]
    image_px: int = 0
    """Side of the stored images, pixels; 0 if images are drawn from snapshots."""

    def against(self, other: "ChunkForm") -> list[str]:
        """Returns the differences from `other`, in words."""
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in self.__slots__]
        return [f"{name} {mine}, not {theirs}" for name, mine, theirs in pairs if mine != theirs]


def form_of(env: ChunkEnv, image_px: int = 0) -> ChunkForm:
    """Returns the form of the chunks of `env`; with `image_px`, of chunks that store images instead of snapshots."""
    return ChunkForm(
        chunk_steps=env.chunk_steps,
        action_size=len(env.action_low),
        proprio_size=env.proprio_size,
        snapshot_size=0 if image_px else env.snapshot_size,
        cameras=tuple(env.cameras),
        image_px=image_px,
    )


def folder_form(folder: DemonstrationFolder) -> ChunkForm:
    """Returns the form of the chunks in a folder.

    Raises:
        UsageError: it holds no chunks.
    """
    try:
        # selected by name: a folder's card contains more about its chunks than their form
        form: dict[str, Any] = {name: folder.chunks[name] for name in ChunkForm.__slots__}
        return ChunkForm(**{**form, "cameras": tuple(form["cameras"])})
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"{folder.path} holds {folder.kind} of {folder.task}, and no chunks",
            "make chunks with rlvlm collect push_block, or with rlvlm data import --form libero",
        ) from error


def kept_images(folder: DemonstrationFolder, record: EpisodeRecord) -> Frames:
    """Returns [C, cameras, H, W, 3], the images of an episode's chunks.

    Raises:
        UsageError: an image is missing, damaged, or not of the size stated in the folder.
    """
    try:
        names = record.arrays["pictures"]
        images = np.stack([[folder.image_store.load(str(name)) for name in row] for row in names])
        if images.shape[2:] != 2 * (folder_form(folder).image_px,) + (3,):
            raise ValueError(f"images of {images.shape[3]} x {images.shape[2]} pixels")
    except (MissingImage, KeyError, ValueError) as error:
        raise UsageError(
            f"{folder.path}: the images of {record.id} cannot be used: {error}", "import it anew"
        ) from error
    return images


def is_whole(record: EpisodeRecord, form: ChunkForm) -> bool:
    """Returns whether an episode's arrays have the shapes stated in its folder, and finite numbers."""
    arrays: Mapping[str, np.ndarray] = record.arrays
    if not {"proprio", "actions", "pictures" if form.image_px else "snapshots"} <= arrays.keys():
        return False
    if not all(np.issubdtype(arrays[name].dtype, np.floating) for name in ("proprio", "actions")):
        return False
    num = len(arrays["actions"])  # C, with which all other arrays must agree
    if "steps" in arrays and (
        arrays["steps"].shape != (num,) or arrays["steps"].dtype.kind != "i" or arrays["steps"].min() < 1
    ):
        return False
    if "goals" in arrays and (arrays["goals"].shape != (num,) or arrays["goals"].dtype.kind != "U"):
        return False
    if SOURCE_DIGEST in arrays and not (
        {SOURCE_EPISODE, SOURCE_FRAMES} <= arrays.keys()
        and all(arrays[name].dtype.kind == "i" for name in (SOURCE_EPISODE, SOURCE_FRAMES))
        and (arrays[SOURCE_EPISODE].shape, arrays[SOURCE_FRAMES].shape) == ((), (num,))
    ):
        return False
    if "perturbed" in arrays and (arrays["perturbed"].shape != (num,) or arrays["perturbed"].dtype != bool):
        return False
    shapes = {"actions": (num, form.chunk_steps, form.action_size), "proprio": (num, form.proprio_size)}
    shapes |= {"pictures": (num, len(form.cameras))} if form.image_px else {"snapshots": (num + 1, form.snapshot_size)}
    return num > 0 and all(
        arrays[name].shape == shape and (name == "pictures" or bool(np.isfinite(arrays[name]).all()))
        for name, shape in shapes.items()
    )
