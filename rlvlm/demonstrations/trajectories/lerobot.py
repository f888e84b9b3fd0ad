"""LeRobot's data sets, version 2.1 and 3.0: Parquet for numbers, Parquet or MP4 for images; `meta/` says where."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from av.error import FFmpegError
from numpy.typing import NDArray

from rlvlm.core.errors import UsageError
from rlvlm.core.steps import Frames
from rlvlm.demonstrations.trajectories.cut import CutConfig, Trajectory
from rlvlm.demonstrations.trajectories.rlds import decoded

_ACTIONS, _STATES = ("action", "actions"), ("observation.state", "state")
"""Names of the columns, the first that is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Film:
    """Where an episode's images of one camera are."""

    file: Path
    begins_s: float
    fps: float


def read_lerobot(source: Path, config: CutConfig) -> Iterator[Trajectory]:
    """The episodes of a data set's folder, in the order of their numbers.

    Raises:
        UsageError: a file is missing, torn, or of another version.
    """
    file = source / "meta" / "info.json"
    try:
        info = json.loads(file.read_text())
        version = str(info["codebase_version"])
        features: Mapping[str, Any] = info["features"]
        if not version.startswith(("v2", "v3")):
            raise ValueError(f"version {version}, and 2.x and 3.x are read")
        actions = next(name for name in _ACTIONS if name in features)
        states = next(name for name in _STATES if name in features)
        cameras = list(config.cameras) or _cameras(features)
        for episode in _episodes_of_3(source) if version.startswith("v3") else _episodes_of_2(source, info):
            file = _file(source, info["data_path"], episode)
            table = pq.read_table(file, filters=[("episode_index", "=", episode["episode_index"])])
            if table.num_rows != episode["length"]:
                raise ValueError(f"{table.num_rows} of {episode['length']} steps of episode {episode['episode_index']}")
            looks: list[Any] = []
            for camera in cameras:
                if features[camera]["dtype"] == "video":
                    places = {**episode, "video_key": camera} | _place_of_film(episode, camera)
                    path = _file(source, info["video_path"], places)
                    begins_s, fps = float(places.get("from_timestamp", 0.0)), float(info["fps"])
                    looks.append(_Film(file=path, begins_s=begins_s, fps=fps))
                else:
                    looks.append(table[camera])
            done, seen = _numbers(table[actions]), _numbers(table[states])
            yield Trajectory(
                name=f"{episode['episode_index']}",
                file=file,
                instruction=str(episode["tasks"][0]),
                actions=done[1:] if config.late else done,
                proprio=seen[:-1] if config.late else seen,
                look=partial(_look, looks),
                success=bool(np.any(_numbers(table["next.success"]))) if "next.success" in table.column_names else True,
                is_late=bool(config.late),
            )
    except (OSError, KeyError, ValueError, TypeError, IndexError, StopIteration, pa.ArrowException) as error:
        columns = f"no column {' or '.join(_ACTIONS)}, or none {' or '.join(_STATES)}"
        what = columns if isinstance(error, StopIteration) else error
        raise UsageError(
            f"{file} is missing or torn, or {source} is no data set of LeRobot's that can be read: {what}",
            "name the folder that holds meta/info.json; conversions from older versions come with LeRobot",
        ) from error


def _file(source: Path, pattern: str, place: Mapping[str, Any]) -> Path:
    """The file that a pattern of `meta/info.json` names; it may be a link, as in a cache of the hub.

    Raises:
        ValueError: it does not lie in the data set.
    """
    name = Path(str(pattern).format(**place))
    if name.is_absolute() or ".." in name.parts:
        raise ValueError(f"{name} lies elsewhere")
    return source / name


def _cameras(features: Mapping[str, Any]) -> list[str]:
    """Names of the columns with images, the wrist's last."""
    names = [name for name, feature in features.items() if feature["dtype"] in ("image", "video")]
    return sorted(names, key=lambda name: ("wrist" in name or "hand" in name, names.index(name)))


def _episodes_of_2(source: Path, info: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for line in (source / "meta" / "episodes.jsonl").read_text().splitlines():
        episode = json.loads(line)
        yield episode | {"episode_chunk": episode["episode_index"] // info["chunks_size"]}


def _episodes_of_3(source: Path) -> Iterator[dict[str, Any]]:
    files = sorted((source / "meta" / "episodes").glob("*/*.parquet"))
    if not files:
        raise ValueError("no file in meta/episodes")
    for file in files:
        names = [name for name in pq.read_schema(file).names if not name.startswith("stats/")]
        for episode in pq.read_table(file, columns=names).to_pylist():
            place = {key: episode[f"data/{key}"] for key in ("chunk_index", "file_index")}
            yield episode | place


def _place_of_film(episode: Mapping[str, Any], camera: str) -> dict[str, Any]:
    """Of version 3: in which file of a camera an episode is, and when it begins there."""
    prefix = f"videos/{camera}/"
    return {name.removeprefix(prefix): value for name, value in episode.items() if name.startswith(prefix)}


def _numbers(column: Any) -> NDArray[np.float32]:
    """[T, N] of a column of lists, [T] of one of numbers."""
    return np.array(column.to_pylist(), np.float32)


def _look(cameras: list[Any], steps: NDArray[np.intp]) -> Frames:
    shown = []
    for camera in cameras:
        if isinstance(camera, _Film):
            shown.append(_filmed(camera, steps))
        else:
            shown.append(np.stack([decoded(camera[step].as_py()["bytes"]) for step in steps.tolist()]))
    return np.stack(shown, axis=1)


def _filmed(film: _Film, steps: NDArray[np.intp]) -> Frames:
    """[n, H, W, 3] the frames of `steps`, which rise.

    Raises:
        UsageError: the film is torn, or too short.
    """
    wanted = film.begins_s + steps / film.fps
    images: list[NDArray[np.uint8]] = []
    try:
        with av.open(str(film.file), format="mp4") as container:  # a playlist could name any file
            stream = container.streams.video[0]
            if film.begins_s and stream.time_base:
                container.seek(int(film.begins_s / stream.time_base), stream=stream)
            for frame in container.decode(stream):
                if len(images) == len(wanted):
                    break
                if frame.time is not None and abs(frame.time - wanted[len(images)]) < 0.5 / film.fps:
                    images.append(frame.to_ndarray(format="rgb24").astype(np.uint8, copy=False))
        if len(images) < len(wanted):
            raise ValueError(f"no frame {wanted[len(images)]:.3f} s from its beginning")
    except (OSError, ValueError, IndexError, FFmpegError) as error:
        raise UsageError(f"{film.file} is missing or torn: {error}", "fetch it anew") from error
    return np.stack(images)
