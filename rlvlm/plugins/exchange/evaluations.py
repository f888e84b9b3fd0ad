"""Logs of others' evaluations as trajectories with images, to find out whether a grader is right.

Forms: a log of inspect-robots (schema version 1, a JSON file, with its frames in `frames/RUN/*.npy`), and the folder of
`lerobot-eval` (0.4 to 0.6: `eval_info.json` and `videos/`). All input is untrusted.

What is the truth: of inspect-robots a person's verdict, or else the embodiment's own end of the trial; the verdict of a
model that graded it is not. Of `lerobot-eval` the simulator's success; its films say no instruction.
"""

import hashlib
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.errors import UsageError
from rlvlm.core.foreign import MAX_JSON_BYTES, files_ending, read_array, read_bytes, read_json
from rlvlm.core.steps import Frames
from rlvlm.demonstrations.trajectory import CorruptEpisode, RobotTrajectory

LEROBOT_INFO = "eval_info.json"
_INSPECT_VERSION = 1
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_YES = ("success", "pass", "yes", "y", "1", "true")
"""Verdicts of inspect-robots that are a success; all others are not."""
_DAMAGES = (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError)
_MAX_FRAME_BYTES = 2**28
MAX_FRAMES = 100_000
"""Maximum number of frames of one evaluation."""


def is_evaluation(path: Path) -> bool:
    """Returns whether `path` is a log of inspect-robots, or a folder of `lerobot-eval`."""
    if (path / LEROBOT_INFO).is_file():
        return True
    if path.suffix.lower() != ".json" or not path.is_file():
        return False
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"version", "eval", "samples", "stats"} <= found.keys()


def read_evaluation(path: Path, camera: str = "") -> Iterator[RobotTrajectory | CorruptEpisode]:
    """Yields the trials of an evaluation; one without frames is a `CorruptEpisode`.

    Args:
        path: log, or folder.
        camera: camera to read; empty: all that have images of the first one's size, by name.

    Raises:
        UsageError: the log cannot be read, is of another version, or has no such camera.
    """
    try:
        if path.is_dir():
            if camera:
                raise UsageError("--camera has no effect on films, which have one each", "leave it out")
            yield from _lerobot_trials(path)
        else:
            yield from _inspect_trials(path, camera)
    except UsageError:
        raise
    except _DAMAGES as error:
        raise UsageError(f"{path} cannot be read: {type(error).__name__}: {error}", "fetch the log anew") from error


def _inspect_trials(path: Path, camera: str) -> Iterator[RobotTrajectory | CorruptEpisode]:
    log: dict[str, Any] = read_json(path, MAX_JSON_BYTES)
    if log["version"] != _INSPECT_VERSION:
        what = f"{path} is a log of inspect-robots of schema version {log['version']}, and {_INSPECT_VERSION} is read"
        raise UsageError(what, "use a release of rlvlm that reads it")
    # frames lie where the run's own folder says, or beside the log if that was moved
    said = log["stats"].get("frames_dir") or ""
    folder = path.absolute().parent / "frames" / (PureWindowsPath(said).name if "\\" in said else Path(said).name)
    names = [file.name for file in files_ending(folder, ".npy")] if said else []
    if len(names) > MAX_FRAMES:
        raise UsageError(f"{folder} has {len(names):,} frames, at most {MAX_FRAMES:,} are read", "split the evaluation")
    for scene in log["samples"]:
        for epoch, scores in enumerate(scene["epochs"]):
            name = f"{scene['scene_id']}-e{epoch}"
            try:
                files, digest = _files_of(name, folder, names, camera)
            except (OSError, ValueError) as error:
                yield CorruptEpisode(file=path, reason=f"{name}: {error}")
                continue
            instruction, truth = str(scene.get("instruction") or ""), _truth(scene, epoch, scores)
            yield _trial(name, path, instruction, len(files), truth, partial(_frames, folder, files), digest)


def _files_of(name: str, folder: Path, names: Sequence[str], camera: str) -> tuple[list[list[Path]], str]:
    """Returns the files [T][cameras] of a trial's frames, and the SHA-256 of them all.

    Raises:
        UsageError: there is no such camera.
        OSError, ValueError: there are no frames, or they cannot be read.
    """
    pattern = re.compile(rf"{re.escape(_safe(name))}_(.+)_(\d{{6,}})\.npy")
    films: dict[str, dict[int, Path]] = {}
    for match in filter(None, map(pattern.fullmatch, names)):
        films.setdefault(match[1], {})[int(match[2])] = folder / match[0]
    if camera and films and _safe(camera) not in films:
        raise UsageError(f"{name} has no camera {camera}; it has {', '.join(sorted(films))}", "name one of these")
    shown = [films[key] for key in sorted(films) if not camera or key == _safe(camera)]
    # a moment counts if every camera has it, because graders are asked about moments
    times = sorted(set.intersection(*map(set, shown))) if shown else []
    if len(times) < 2:
        raise ValueError(f"there are no frames of it in {folder}")
    shapes = [read_array(film[times[0]], folder).shape for film in shown]
    files = [[film[t] for film, shape in zip(shown, shapes, strict=True) if shape == shapes[0]] for t in times]
    digest = hashlib.sha256()
    for file in (file for row in files for file in row):
        digest.update(read_bytes(file, _MAX_FRAME_BYTES, folder))
    return files, digest.hexdigest()


def _truth(scene: Mapping[str, Any], epoch: int, scores: Mapping[str, Any]) -> bool | None:
    """Returns whether a trial succeeded, by a person or the embodiment; None if only a model has said so."""

    def of(column: str) -> Any:
        return (scene.get(column) or [None] * (epoch + 1))[epoch]

    verdict, source = of("operator_judgements"), of("judgement_sources")
    if verdict is not None and source in ("console", "prompt", "embodiment"):
        return str(verdict).strip().lower() in _YES
    for name in ("success_at_end", "reached_goal_state"):
        if scores.get(name) is not None:
            return float(scores[name]) >= 1.0
    return None


def _lerobot_trials(path: Path) -> Iterator[RobotTrajectory | CorruptEpisode]:
    from rlvlm.demonstrations.films import film_digest, film_frames, film_times  # PyAV is slow to import

    info: dict[str, Any] = read_json(path / LEROBOT_INFO, MAX_JSON_BYTES, path)
    for task in info["per_task"]:
        metrics, about = task["metrics"], f"{task['task_group']}_{task['task_id']}"
        # the first episodes of a task have a film each, in order; the paths are those of the machine that played them
        for number, (said, success) in enumerate(zip(metrics["video_paths"], metrics["successes"], strict=False)):
            file = path / "videos" / Path(said).parent.name / Path(said).name
            name = f"{about}/{number}"
            try:
                times = film_times(path, file)[0]
                digest = film_digest(path, file)
            except (OSError, ValueError) as error:
                yield CorruptEpisode(file=file, reason=f"{name}: {error}")
                continue

            def look(steps: NDArray[np.intp], file: Path = file, times: NDArray[np.int64] = times) -> Frames:
                return film_frames(path, file, times[steps])[:, None]

            yield _trial(name, file, "", len(times), bool(success), look, digest)


def _trial(
    name: str, file: Path, instruction: str, num_frames: int, success: bool | None, look: Any, digest: str
) -> RobotTrajectory:
    nothing = np.zeros((num_frames, 0), np.float32)  # no actions and no robot state are read: every frame counts
    return RobotTrajectory(
        name=name, file=file, instruction=instruction, actions=nothing, proprio=nothing, look=look, success=success,
        digest=digest,
    )  # fmt: skip


def _frames(folder: Path, files: list[list[Path]], steps: NDArray[np.intp]) -> Frames:
    """Returns [n, cameras, H, W, 3] of npy files [T][cameras].

    Raises:
        ValueError: a frame is no image.
    """
    images = [[read_array(file, folder) for file in files[step]] for step in steps.tolist()]
    if any(image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3 for row in images for image in row):
        raise ValueError("a frame is no array [H, W, 3] of uint8")
    return np.stack([np.stack(row) for row in images])


def _safe(name: str) -> str:
    """Returns a trial's name as inspect-robots writes it in the names of files."""
    safe = _UNSAFE.sub("-", name)
    return safe if safe == name else f"{safe}-{zlib.crc32(name.encode()) & 0xFFFFFFFF:08x}"
