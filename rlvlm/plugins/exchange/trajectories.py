"""Import of trajectories from other projects, as episodes in chunks in a folder of demonstrations."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rlvlm.core.errors import UsageError
from rlvlm.core.grippers import GripperUnits
from rlvlm.core.steps import Frames
from rlvlm.demonstrations.chunk_form import form_of
from rlvlm.demonstrations.collect import Log
from rlvlm.demonstrations.folder import DemonstrationFolder, create_folder
from rlvlm.demonstrations.recordings import Recordings, recordings_digest
from rlvlm.demonstrations.records import SOURCE_DIGEST, SOURCE_EPISODE, SOURCE_FRAMES, EpisodeRecord
from rlvlm.demonstrations.trajectory import CorruptEpisode, RobotTrajectory
from rlvlm.envs.env import ChunkEnv
from rlvlm.labels.images import image_digest
from rlvlm.plugins.exchange.cutting import Cut, CutConfig, cut, opened
from rlvlm.plugins.exchange.lerobot_data import read_lerobot
from rlvlm.plugins.exchange.libero_hdf5 import read_libero
from rlvlm.plugins.exchange.rlds import read_rlds

Source = Literal["libero", "lerobot", "rlds"]
READERS: Mapping[Source, Callable[[Path, CutConfig], Iterator[RobotTrajectory | CorruptEpisode]]] = {
    "libero": read_libero,
    "lerobot": read_lerobot,
    "rlds": read_rlds,
}
# sources whose images are rotated by half a turn to match published policies and our envs
_UPSIDE_DOWN = ("libero",)
_LOG_EVERY = 50  # episodes between progress messages
_COMPARED = 20  # episodes whose first states are compared with the task's own
# tolerance by which a first state may exceed the task's own, in metres or radians; and metres from a position
_UNLIKE, _SAME_PLACE = 0.5, 0.02
_ROUNDING = 1e-3  # tolerance of an action's range


def import_trajectories(
    source: Path, form: Source, out: Path, task: str, env: ChunkEnv, config: CutConfig, log: Log
) -> tuple[DemonstrationFolder, Counter[str]]:
    """Adds the trajectories of a data set, one episode each; returns counts of those added and, by reason, left out.

    Args:
        source: file or folder. Untrusted.
        form: format of the data set.
        out: folder of the demonstrations, made if missing. Trajectories already in it are not added again.
        task: name of the task; trajectories with other instructions are left out.
        env: env of the task.
        config: how trajectories are cut and converted.
        log: receives progress messages.

    Raises:
        UsageError: no file can be read, units or successes are unknown, or the data do not resemble the task's own.
    """
    read = READERS[form]
    # Data sets are larger than memory, so trajectories are read one by one, and checks that need several before the
    # first is added read the beginning of the set twice.
    torn: list[CorruptEpisode] = []
    trajectories = _whole(read(source, config), torn)
    first = _first(trajectories, torn, source, config)
    grippers = ~np.array(env.scaled_actions)
    made = {
        "source": form,
        "stride": config.stride or env.chunk_steps,
        "last": config.last,
        "drop_no_ops": config.drop_no_ops,
        "turned": form in _UPSIDE_DOWN if config.turn is None else config.turn,
        "late": first.is_late,
        "success": "as recorded" if first.success is not None else config.success,
        "gripper": _gripper_units(_whole(read(source, config), []), grippers, source, config.gripper),
    }
    if form != "libero" and not config.unlike:  # LIBERO's fields are named after their content
        _check_like(islice(_whole(read(source, config), []), _COMPARED), env, task)
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
    # by which `rlvlm score` names these data, so that its labels hold for what is made of them
    camera, unseen = next(iter(config.cameras), ""), list[CorruptEpisode]()
    digest = recordings_digest(Recordings(path=source, form=form, camera=camera)) if form != "rlds" else ""
    for number, trajectory in enumerate(chain([first], trajectories)):
        origin = number + len(torn)  # labels count episodes that cannot be read too
        name = _name_of(form, trajectory)
        chunks = "there already" if name in known else _chunks_of(trajectory, env, grippers, made, config)
        if isinstance(chunks, str):
            counts[chunks] += 1
            continue
        try:
            images = _shown(trajectory, chunks.starts, made["turned"], config.image_px)
        except UsageError as error:
            unseen.append(CorruptEpisode(file=trajectory.file, reason=str(error)))
            continue
        if images.shape[1:] != sample.shape[1:]:
            raise UsageError(
                f"{trajectory.file}: images of {images.shape[3]} x {images.shape[2]} pixels, others have "
                f"{sample.shape[3]} x {sample.shape[2]}",
                "scale them with --cut.image-px",
            )
        goals = (
            [_spelled(trajectory.instructions[start], env) for start in chunks.starts]
            if trajectory.instructions
            else []
        )
        success = trajectory.known_success(config.success)
        record = EpisodeRecord(
            id=name,
            task=task,
            kind="chunks",
            seed=number,
            player=form,
            goal=_spelled(trajectory.instruction, env),
            env_return=float(success),
            success=success,
            terminated=success,
            arrays={
                "pictures": np.array([[image_digest(image) for image in row] for row in images]),
                "proprio": trajectory.proprio[chunks.starts].astype(np.float32),
                "actions": chunks.actions,
                "steps": chunks.steps,
                SOURCE_DIGEST: np.array(digest),
                SOURCE_EPISODE: np.array(origin),
                SOURCE_FRAMES: chunks.starts.astype(np.int64),
                **({"goals": np.array(goals)} if goals else {}),
            },
        )
        folder.add(record, images.reshape(-1, *images.shape[2:]))
        counts["added"] += 1
        if counts["added"] % _LOG_EVERY == 0:
            log(f"{counts['added']} episodes added, {counts.total() - counts['added']} left out")
    for episode in (*torn, *unseen):
        log(f"torn: {episode.file}: {episode.reason}")
        counts[f"torn, as {episode.file.name}"] += 1
    return folder, counts


def _chunks_of(
    trajectory: RobotTrajectory, env: ChunkEnv, grippers: NDArray[np.bool_], made: dict[str, Any], config: CutConfig
) -> Cut | str:
    """Returns the chunks of a trajectory, in the env's units, or the reason why it cannot be learned from."""
    known = set(map(_plain, env.instructions))
    for instruction in dict.fromkeys((trajectory.instruction, *trajectory.instructions)):
        if known and _plain(instruction) not in known:
            return f"another task's instruction: {instruction}"
    if trajectory.is_late != made["late"]:  # a folder's card makes one statement about all its chunks
        return "seen at another moment than the others"
    if trajectory.actions.shape[1:] != env.action_low.shape:
        return f"actions of {trajectory.actions.shape[-1]} numbers, not {len(env.action_low)}"
    if trajectory.proprio.shape[1:] != (env.proprio_size,):
        return f"proprioception of {trajectory.proprio.shape[-1]} numbers, not {env.proprio_size}"
    if not (np.isfinite(trajectory.actions).all() and np.isfinite(trajectory.proprio).all()):
        return "numbers that are not finite"
    actions = opened(trajectory.actions, grippers, made["gripper"])
    is_within = (actions >= env.action_low - _ROUNDING) & (actions <= env.action_high + _ROUNDING)
    if not is_within.all():
        return "actions out of range" if not is_within[:, ~grippers].all() else "a gripper outside of [0, 1]"
    chunks = cut(actions, grippers, env.chunk_steps, config)
    return chunks if len(chunks.starts) else "too short"


def _first(
    trajectories: Iterator[RobotTrajectory], torn: list[CorruptEpisode], source: Path, config: CutConfig
) -> RobotTrajectory:
    """Returns the first trajectory.

    Raises:
        UsageError: there is none, or a policy cannot learn from it.
    """
    first = next(trajectories, None)
    if first is None:
        what = "; ".join(f"{episode.file}: {episode.reason}" for episode in torn) or f"{source} holds no episode"
        raise UsageError(what, "fetch it anew, or name another")
    first.known_success(config.success)
    given = {"actions": first.actions, "states": first.proprio}
    missing = [name for name, numbers in given.items() if not numbers.shape[1]]
    if missing:
        raise UsageError(
            f"{first.file} has no {' and no '.join(missing)} under the names of its format, and a policy needs both",
            "name other data; a judge needs images alone: rlvlm score",
        )
    return first


def _whole(found: Iterator[RobotTrajectory | CorruptEpisode], torn: list[CorruptEpisode]) -> Iterator[RobotTrajectory]:
    """Yields the intact trajectories of `found`; corrupt ones go to `torn`."""
    for item in found:
        if isinstance(item, RobotTrajectory):
            yield item
        else:
            torn.append(item)


def _check_like(trajectories: Iterable[RobotTrajectory], env: ChunkEnv, task: str) -> None:
    """Checks that first states are about as large as those of the task's own env, and that actions are movements.

    Raises:
        UsageError: they are not. Joint angles, for instance, have as many numbers as a hand's pose and fingers.
    """
    starts = np.concatenate([env.reset(options={"state_id": state_id})[0].proprio for state_id in range(4)])
    some = [
        trajectory
        for trajectory in trajectories
        if len(trajectory.actions) > 1 and trajectory.proprio.shape[1:] == starts.shape[1:]
    ]
    if not some:
        return
    met = f"the first episode's instruction is {some[0].instruction!r}"
    fix = "import data whose states are the task's own; --cut.unlike takes it all the same"
    # the median: a few odd episodes do not indicate another robot
    first = np.median(np.abs([trajectory.proprio[0] for trajectory in some]), axis=0)
    if (first - np.abs(starts).max(axis=0) > _UNLIKE).any():
        found, own = (np.array2string(np.asarray(row), precision=2) for row in (some[0].proprio[0], starts[0]))
        raise UsageError(f"states begin at {found}, and those of {task} at {own}: joint angles? {met}", fix)
    num = min(3, starts.shape[1])  # the hand's position comes first, and the first numbers of an action move it
    actions = np.concatenate([trajectory.actions[:-1, :num] for trajectory in some])
    places = np.concatenate([trajectory.proprio[1:, :num] for trajectory in some])
    # an action that resembles the position it leads to is no movement; near the origin, it must resemble it closely
    error, size = np.abs(actions - places).mean(), np.abs(actions).mean()
    if error < _SAME_PLACE and error < size / 4:
        raise UsageError(
            f"actions are the places where the hand comes to (on average {error:.3f} away), and {task} takes "
            f"movements; {met}",
            "convert them to movements, as OpenVLA's data have; --cut.unlike takes them all the same",
        )


def _gripper_units(
    trajectories: Iterator[RobotTrajectory], grippers: NDArray[np.bool_], source: Path, said: GripperUnits | None
) -> GripperUnits:
    """Returns the units that were `said`; if none were, LIBERO's if any gripper action is negative.

    Raises:
        UsageError: none is negative: 1 could mean open or closed, or contradicts what was said.
    """
    if not grippers.any() or said in ("one_opens", "one_closes"):
        return said or "one_opens"
    values = set[float]()
    for trajectory in trajectories:
        # actions of another size are refused later, with a better reason than their gripper's units
        if trajectory.actions.shape[1:] != grippers.shape or (trajectory.actions[:, grippers] < -_ROUNDING).any():
            return "minus_one_opens"
        values.update(np.unique(trajectory.actions[:, grippers])[:2].tolist())
    if said is not None and len(values) == 1:
        return said  # it never moves: they may be any
    raise UsageError(
        f"{source}: the gripper's actions are all in [0, 1], where 1 may open or close it",
        "say which with --cut.gripper one_opens, or one_closes",
    )


def _plain(instruction: str) -> str:
    """Normalises the spelling differences of instructions in files."""
    return " ".join(re.sub(r"[^a-z0-9 ]", " ", instruction.lower().replace("_", " ")).split())


def _spelled(instruction: str, env: ChunkEnv) -> str:
    """Returns an instruction in the env's own spelling, which a policy is given; files differ in case, punctuation and
    underscores.
    """
    return next((own for own in env.instructions if _plain(own) == _plain(instruction)), instruction)


def _name_of(form: Source, trajectory: RobotTrajectory) -> str:
    """Returns an id that equal trajectories share."""
    digest = hashlib.sha256(trajectory.instruction.encode())
    for array in (trajectory.actions, trajectory.proprio):
        digest.update(np.ascontiguousarray(array).tobytes())
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", f"{trajectory.file.stem[:60]}-{trajectory.name[:20]}")
    return f"{form}-{stem}-{digest.hexdigest()[:12]}"


def _shown(trajectory: RobotTrajectory, steps: NDArray[np.intp], is_turned: Any, size_px: int) -> Frames:
    """Returns [n, cameras, H, W, 3], the images before `steps`, H = W.

    Raises:
        UsageError: there are no such images, or they are not square.
    """
    images = trajectory.images(steps)
    if images.dtype != np.uint8 or images.ndim != 5 or images.shape[4] != 3 or images.shape[2] != images.shape[3]:
        raise UsageError(f"{trajectory.file}: square images of bytes are wanted, got {images.dtype} {images.shape[1:]}")
    images = images[:, :, ::-1, ::-1] if is_turned else images  # half a turn reverses both sides
    if size_px and size_px != images.shape[2]:
        one_by_one = map(Image.fromarray, np.ascontiguousarray(images).reshape(-1, *images.shape[2:]))
        scaled = [np.asarray(image.resize((size_px, size_px), Image.Resampling.LANCZOS)) for image in one_by_one]
        images = np.stack(scaled).reshape(*images.shape[:2], size_px, size_px, 3)
    return np.ascontiguousarray(images)
