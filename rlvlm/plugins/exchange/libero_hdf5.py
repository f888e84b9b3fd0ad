"""LIBERO's HDF5 files, one per task, as its own script or OpenVLA's wrote them.

`data/demo_i` contains `actions` [T, 7], `rewards` [T] and `obs`: `agentview_rgb` and `eye_in_hand_rgb` [T, H, W, 3],
upside down, `ee_states` [T, 6] (or `ee_pos` and `ee_ori`) and `gripper_states` [T, 2]. LIBERO's script recorded
observations after each action; OpenVLA's before. The file is named after the task; the instruction that LIBERO's script
put into `data`'s attributes differs for a third of the tasks, and is used only if the file has another name.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.errors import MachineError, UsageError
from rlvlm.core.foreign import check_claim, files_ending, open_inside, parse_json
from rlvlm.core.steps import Frames
from rlvlm.demonstrations.trajectory import CorruptEpisode, RobotTrajectory
from rlvlm.envs.libero.tasks import SUITES, file_sentence, instruction_of
from rlvlm.plugins.exchange.cutting import CutConfig

ENDINGS = (".hdf5", ".h5")
CAMERAS = ("agentview_rgb", "eye_in_hand_rgb")


def is_libero(path: Path) -> bool:
    """Returns whether `path` is an HDF5 file, or a folder of some."""
    return path.suffix.lower() in ENDINGS or bool(files_ending(path, *ENDINGS))


def read_recorded(source: Path, camera: str) -> Iterator[RobotTrajectory | CorruptEpisode]:
    """Yields the demonstrations as `rlvlm score` shows them to a judge: every image counts, above all the last one, and
    they are rotated by half a turn, to match our envs and published policies.
    """
    for film in read_libero(source, CutConfig(cameras=(camera or CAMERAS[0],), late=False)):
        if isinstance(film, CorruptEpisode):
            yield film
            continue
        # several files may each have a demo_0
        yield replace(film, name=f"{film.file.stem}/{film.name}", look=partial(_turned, film.look))


def _turned(look: Callable[[NDArray[np.intp]], Frames], steps: NDArray[np.intp]) -> Frames:
    return look(steps)[:, :, ::-1, ::-1]


def read_libero(source: Path, config: CutConfig) -> Iterator[RobotTrajectory | CorruptEpisode]:
    """Yields the demonstrations of a file, or of all files of a folder, in the order of their numbers.

    Raises:
        UsageError: there is no file.
        MachineError: h5py is not installed.
    """
    try:
        import h5py  # noqa: F401 - asked for here, before any file is opened
    except ImportError as error:
        raise MachineError(
            "HDF5 files are read with h5py, which is not installed", "pip install '.[libero]'"
        ) from error
    root = source if source.is_dir() else source.parent
    files = files_ending(source, *ENDINGS) if source.is_dir() else [source]
    if not files:
        raise UsageError(f"{source} has no .hdf5 file", "name a file of LIBERO's, or the folder of a suite")
    for path in files:
        try:
            with _opened(root, path) as (file, file_bytes):
                data = _held(file, "data")
                is_own = "problem_info" in data.attrs  # written by LIBERO's script but not by OpenVLA's
                for name in sorted(data, key=lambda name: (len(name), name)):  # demo_2 before demo_10
                    demo = _held(data, name)
                    arrays = [_held(group, inner) for group in (demo, _held(demo, "obs")) for inner in group]
                    check_claim(sum(array.nbytes for array in arrays if hasattr(array, "nbytes")), file_bytes)
                    yield _trajectory(root, path, name, demo, _instruction(path, data), is_own, config)
        except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            yield CorruptEpisode(file=path, reason=f"torn, or no file of LIBERO's: {error}")


@contextmanager
def _opened(root: Path, path: Path) -> Iterator[tuple[Any, int]]:
    """Yields the HDF5 file `path` in the folder `root`, and its size in bytes."""
    import h5py

    with open_inside(root, path) as stream:
        file_bytes = stream.seek(0, 2)
        with h5py.File(stream, "r") as file:
            yield file, file_bytes


def _held(group: Any, name: str) -> Any:
    """Returns a member of a group.

    Raises:
        ValueError: it is missing, or a link, which may lead into another file through others; or its data lie in one.
    """
    import h5py

    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise ValueError(
            f"{name} {'is a link, and may lie' if name in group else 'is missing, or lies'} in another file"
        )
    found = group[name]
    if isinstance(found, h5py.Dataset) and (found.external or found.is_virtual):
        raise ValueError(f"{name} lies in another file")
    return found


def _instruction(path: Path, data: Any) -> str:
    """Returns the instruction, from the file's name if that is a task's, else from the attributes."""
    stem = path.stem.removesuffix("_demo")
    if "problem_info" not in data.attrs or any(stem in names for names in SUITES.values()):
        return instruction_of(stem)
    sentence = parse_json(data.attrs["problem_info"])["language_instruction"]
    return file_sentence(("".join(sentence) if isinstance(sentence, list) else str(sentence)).strip().lower())


def _trajectory(
    root: Path, path: Path, name: str, demo: Any, instruction: str, is_own: bool, config: CutConfig
) -> RobotTrajectory:
    obs = demo["obs"]
    if missing := [camera for camera in config.cameras if camera not in obs]:
        there = ", ".join(camera for camera in obs if camera.endswith("_rgb")) or "none"
        raise UsageError(f"{path} has no camera {missing[0]}; it has {there}", "name one of these")
    cameras = [obs[camera] for camera in config.cameras or CAMERAS]
    none = np.zeros((len(cameras[0]), 0), np.float32)  # a judge needs images alone
    pose = ("ee_states",) if "ee_states" in obs else ("ee_pos", "ee_ori")
    parts = (*pose, "gripper_states")
    has_states, has_actions = any(part in obs for part in parts), "actions" in demo
    proprio = np.concatenate([obs[part][()] for part in parts], axis=1) if has_states else none
    actions = demo["actions"][()] if has_actions else none
    counts = [len(actions), len(proprio), *map(len, cameras)]  # a truncated file may lack some rows of one kind
    if len(set(counts)) > 1:
        raise ValueError(f"{name} has {' and '.join(map(str, counts))} actions, states and images of each camera")
    digest = hashlib.sha256()
    if not has_states and not has_actions:  # they would identify the episode
        for camera in cameras:
            digest.update(camera[()].tobytes())
    return RobotTrajectory.recorded(
        actions,
        proprio,
        is_late=is_own if config.late is None else config.late,
        name=name,
        file=path,
        instruction=instruction,
        look=partial(_look, root, path, name, config.cameras or CAMERAS),
        success=bool(np.max(demo["rewards"][()]) > 0) if "rewards" in demo else None,
        rewards=np.asarray(demo["rewards"][()], np.float32) if "rewards" in demo else None,
        digest="" if has_states or has_actions else digest.hexdigest(),
    )


def _look(root: Path, path: Path, name: str, cameras: Sequence[str], steps: NDArray[np.intp]) -> Frames:
    """Returns [n, cameras, H, W, 3], the images of the ascending `steps` only: an episode has hundreds."""
    with _opened(root, path) as (file, _):
        obs = _held(_held(_held(file, "data"), name), "obs")
        return np.stack([_held(obs, camera)[steps] for camera in cameras], axis=1)
