"""Trajectories that others recorded, as episodes in chunks in a folder of demonstrations."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.demonstrations.chunks import Log, form_of
from rlvlm.demonstrations.folder import DemonstrationFolder, create_folder
from rlvlm.demonstrations.records import EpisodeRecord
from rlvlm.demonstrations.trajectories.cut import CutConfig, GripperUnits, Trajectory, cut, opened
from rlvlm.demonstrations.trajectories.lerobot import read_lerobot
from rlvlm.demonstrations.trajectories.libero import read_libero
from rlvlm.demonstrations.trajectories.rlds import read_rlds
from rlvlm.envs.chunk_env import ChunkEnv
from rlvlm.labels.images import image_digest

Source = Literal["libero", "lerobot", "rlds"]
READERS: Mapping[Source, Callable[[Path, CutConfig], Iterator[Trajectory]]] = {
    "libero": read_libero,
    "lerobot": read_lerobot,
    "rlds": read_rlds,
}
_UPSIDE_DOWN = ("libero",)
"""Sources whose images are turned by half a turn to be as published policies, and our envs, have them."""
_TELL_EVERY = 50
"""Episodes between lines about them."""
_ROUNDING = 1e-3
"""By how much an action may be out of its range."""


def import_trajectories(
    source: Path, form: Source, out: Path, task: str, env: ChunkEnv, config: CutConfig, log: Log
) -> tuple[DemonstrationFolder, Counter[str]]:
    """Adds the trajectories of a data set, one episode each; says how many were added and why others were not.

    Args:
        source: file or folder. Untrusted.
        form: of the data set.
        out: folder of the demonstrations; made where there is none. What is there already is not added again.
        task: whose instructions are taken; others are left out.
        env: of the task.
        config: how they are cut and converted.
        log: takes a line now and then.

    Raises:
        UsageError: a file is torn or of another form, or its units are unknown.
    """
    read = READERS[form]
    trajectories = read(source, config)
    first = next(trajectories, None)
    if first is None:
        raise UsageError(f"{source} holds no episode", "name another")
    grippers = ~np.array(env.scaled_actions)
    made = {
        "source": form,
        "stride": config.stride or env.chunk_steps,
        "last": config.last,
        "drop_no_ops": config.drop_no_ops,
        "turned": form in _UPSIDE_DOWN if config.turn is None else config.turn,
        "late": first.is_late,
        "gripper": config.gripper or _gripper_units(read(source, config), grippers, source),
    }
    sample = _shown(first, np.array([0]), made["turned"], config.image_px)
    if sample.shape[1] != len(env.cameras):
        raise UsageError(
            f"{first.file} has images of {sample.shape[1]} cameras, {task} has {', '.join(env.cameras)}",
            "name the images with --cut.cameras",
        )
    kept = asdict(form_of(env, sample.shape[2]))
    folder = create_folder(out, task, "chunks", chunks=kept | made)
    known = {record.id for record in folder.episodes()}
    counts: Counter[str] = Counter()
    for number, trajectory in enumerate(chain([first], trajectories)):
        name = _name_of(form, trajectory)
        reason = "there already" if name in known else _reason_against(trajectory, env, made["late"])
        actions = trajectory.actions
        if not reason:
            actions = opened(actions, grippers, made["gripper"])
            is_inside = (actions >= env.action_low - _ROUNDING) & (actions <= env.action_high + _ROUNDING)
            reason = "" if is_inside.all() else "actions out of range"
        chunks = cut(actions, grippers, env.chunk_steps, config) if not reason else None
        if chunks is not None and not len(chunks.starts):
            reason = "too short"
        if chunks is None or reason:
            counts[reason] += 1
            continue
        images = _shown(trajectory, chunks.starts, made["turned"], config.image_px)
        if images.shape[1:] != sample.shape[1:]:
            raise UsageError(
                f"{trajectory.file}: images of {images.shape[3]} x {images.shape[2]} pixels, others have "
                f"{sample.shape[3]} x {sample.shape[2]}",
                "scale them with --cut.image-px",
            )
        instruction = next(
            (one for one in env.instructions if _plain(one) == _plain(trajectory.instruction)), trajectory.instruction
        )
        digests = [[image_digest(image) for image in row] for row in images]
        record = EpisodeRecord(
            id=name,
            task=task,
            kind="chunks",
            seed=number,
            player=form,
            goal=instruction,
            env_return=float(trajectory.success),
            success=trajectory.success,
            terminated=trajectory.success,
            arrays={
                "pictures": np.array(digests),
                "proprio": trajectory.proprio[chunks.starts].astype(np.float32),
                "actions": chunks.actions,
                "steps": chunks.steps,
            },
        )
        folder.add(record, images.reshape(-1, *images.shape[2:]))
        counts["added"] += 1
        if counts["added"] % _TELL_EVERY == 0:
            log(f"{counts['added']} episodes added, {counts.total() - counts['added']} left out")
    return folder, counts


def _gripper_units(trajectories: Iterator[Trajectory], grippers: NDArray[np.bool_], source: Path) -> GripperUnits:
    """LIBERO's, where any action is negative.

    Raises:
        UsageError: none is: 1 may mean either.
    """
    for trajectory in trajectories:
        if trajectory.actions.shape[1:] != grippers.shape or (trajectory.actions[:, grippers] < -_ROUNDING).any():
            return "minus_one_opens"
    if not grippers.any():
        return "one_opens"
    raise UsageError(
        f"{source}: the gripper's actions are all in [0, 1], where 1 may open or close it",
        "say which with --cut.gripper one_opens, or one_closes",
    )


def _reason_against(trajectory: Trajectory, env: ChunkEnv, late: bool) -> str:
    """Why a trajectory cannot be learned from in `env`, apart from its units; empty where it can."""
    if env.instructions and _plain(trajectory.instruction) not in map(_plain, env.instructions):
        return "another task's instruction"
    if trajectory.is_late != late:
        return "seen at another moment than the others"
    if trajectory.actions.shape[1:] != env.action_low.shape:
        return f"actions of {trajectory.actions.shape[-1]} numbers, not {len(env.action_low)}"
    if trajectory.proprio.shape[1:] != (env.proprio_size,):
        return f"proprioception of {trajectory.proprio.shape[-1]} numbers, not {env.proprio_size}"
    if not (np.isfinite(trajectory.actions).all() and np.isfinite(trajectory.proprio).all()):
        return "numbers that are not finite"
    return ""


def _plain(instruction: str) -> str:
    """An instruction without what files write differently."""
    return " ".join(re.sub(r"[^a-z0-9 ]", " ", instruction.lower().replace("_", " ")).split())


def _name_of(form: Source, trajectory: Trajectory) -> str:
    """An id that equal trajectories share."""
    seen: tuple[FloatArray, FloatArray] = (trajectory.actions, trajectory.proprio)
    digest = hashlib.sha256(trajectory.instruction.encode())
    for one in seen:
        digest.update(np.ascontiguousarray(one).tobytes())
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", f"{trajectory.file.stem[:60]}-{trajectory.name[:20]}")
    return f"{form}-{stem}-{digest.hexdigest()[:12]}"


def _shown(trajectory: Trajectory, steps: NDArray[np.intp], is_turned: Any, size_px: int) -> Frames:
    """[n, cameras, H, W, 3] what was seen before `steps`, H = W.

    Raises:
        UsageError: no such images, or they are not square.
    """
    try:
        images = trajectory.look(steps)
    except (OSError, ValueError, KeyError, TypeError, SyntaxError, Image.DecompressionBombError) as error:
        raise UsageError(f"{trajectory.file}: its images are torn: {error}", "fetch it anew") from error
    if images.dtype != np.uint8 or images.ndim != 5 or images.shape[4] != 3 or images.shape[2] != images.shape[3]:
        raise UsageError(f"{trajectory.file}: square images of bytes are wanted, got {images.dtype} {images.shape[1:]}")
    images = images[:, :, ::-1, ::-1] if is_turned else images
    if size_px and size_px != images.shape[2]:
        one_by_one = map(Image.fromarray, np.ascontiguousarray(images).reshape(-1, *images.shape[2:]))
        scaled = [np.asarray(image.resize((size_px, size_px), Image.Resampling.LANCZOS)) for image in one_by_one]
        images = np.stack(scaled).reshape(*images.shape[:2], size_px, size_px, 3)
    return np.ascontiguousarray(images)
