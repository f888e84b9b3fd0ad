"""LeRobot's data sets, version 2.1 and 3.0: Parquet for numbers, Parquet or MP4 for images; `meta/` says where.

What people publish is not always what `meta/` says. Of version 3 an episode may lie in another file than is written
(`file_index` is stale after data sets were merged): it is looked for. Where an episode has no `tasks`, its rows'
`task_index` names them. JSON objects of `episodes.jsonl` may go over several lines.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
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
from rlvlm.demonstrations.rlds import decoded
from rlvlm.demonstrations.trajectory import CutConfig, RobotTrajectory, Torn

# names of the columns, the first that is there
_ACTIONS, _STATES = ("action", "actions"), ("observation.state", "state")
_DAMAGES = (OSError, KeyError, ValueError, TypeError, IndexError, pa.ArrowException)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Film:
    """Where an episode's images of one camera are."""

    file: Path
    begins_s: float
    fps: float


def read_lerobot(source: Path, config: CutConfig) -> Iterator[RobotTrajectory | Torn]:
    """The episodes of a data set's folder, in the order of their numbers; one that is torn does not stop the others.

    Raises:
        UsageError: `meta/` is missing, torn, or of another version.
    """
    dataset = _LeRobotDataset(source, config)
    try:
        episodes = list(dataset.episodes())
    except _DAMAGES as error:
        raise UsageError(
            f"{dataset.file} is missing or torn, or {source} is no data set of LeRobot's that can be read: {error}",
            "name the folder that holds meta/info.json; conversions from older versions come with LeRobot",
        ) from error
    for episode in episodes:
        try:
            yield dataset.trajectory(episode)
        except _DAMAGES as error:
            yield Torn(file=dataset.file, reason=str(error))


class _LeRobotDataset:
    """One folder; `file` is the one that was read last, which is the one to blame."""

    def __init__(self, source: Path, config: CutConfig) -> None:
        self._source, self._config = source, config
        self.file: Path = source / "meta" / "info.json"

    def episodes(self) -> Iterator[dict[str, Any]]:
        """What `meta/` says of each episode."""
        self._info = info = json.loads(self.file.read_text())
        version = str(info["codebase_version"])
        self._features: Mapping[str, Any] = info["features"]
        if not version.startswith(("v2", "v3")):
            raise ValueError(f"version {version}, and 2.x and 3.x are read")
        for path in (info["data_path"], info.get("video_path") or ""):  # untrusted, and formatted into file names
            if Path(path).is_absolute() or ".." in Path(path).parts:
                raise ValueError(f"{path} lies elsewhere")
        found = [next((name for name in names if name in self._features), None) for names in (_ACTIONS, _STATES)]
        if None in found:
            raise ValueError(f"no column {' or '.join(_ACTIONS)}, or none {' or '.join(_STATES)}")
        self._actions, self._states = found
        images = [name for name, feature in self._features.items() if feature["dtype"] in ("image", "video")]
        images.sort(key=lambda name: "wrist" in name or "hand" in name)  # the wrist's last, as in our envs
        self._cameras = list(self._config.cameras) or images
        if version.startswith("v2"):
            self.file = self._source / "meta" / "episodes.jsonl"
            for episode in _json_objects(self.file.read_text()):
                yield episode | {"episode_chunk": episode["episode_index"] // info["chunks_size"]}
            return
        files = sorted((self._source / "meta" / "episodes").glob("*/*.parquet"))
        if not files:
            raise ValueError("no file in meta/episodes")
        for file in files:
            self.file = file
            # statistics of each feature are most of the file, and nothing here asks for them
            names = [name for name in pq.read_schema(self.file).names if not name.startswith("stats/")]
            for episode in pq.read_table(self.file, columns=names).to_pylist():
                yield episode | {key: episode[f"data/{key}"] for key in ("chunk_index", "file_index")}

    def trajectory(self, episode: Mapping[str, Any]) -> RobotTrajectory:
        """The steps of an episode."""
        number = episode["episode_index"]
        table = self._rows(episode)
        data = self.file
        # data sets of demonstrations alone often have no such column
        success = bool(np.any(_numbers(table["next.success"]))) if "next.success" in table.column_names else True
        tasks = episode.get("tasks") or [self._task_of(table)]
        looks: list[Any] = []
        for camera in self._cameras:
            if self._features[camera]["dtype"] != "video":
                looks.append(table[camera])
                continue
            prefix = f"videos/{camera}/"  # of version 3: in which file an episode is, and when it begins there
            place = {name.removeprefix(prefix): value for name, value in episode.items() if name.startswith(prefix)}
            self.file = self._source / self._info["video_path"].format(**{**episode, "video_key": camera} | place)
            begins_s = float(place.get("from_timestamp", 0.0))
            looks.append(_Film(file=self.file, begins_s=begins_s, fps=float(self._info["fps"])))
        self.file = data  # what is wrong from here on is wrong with the numbers: a film that is torn says so itself
        return RobotTrajectory.recorded(
            _numbers(table[self._actions]),
            _numbers(table[self._states]),
            is_late=bool(self._config.late),
            name=f"{number}",
            file=data,
            instruction=str(tasks[0]),
            look=partial(_look, looks),  # later, and only at the steps that chunks begin with
            success=success,
        )

    def _rows(self, episode: Mapping[str, Any]) -> pa.Table:
        """The rows of an episode, from the file that `meta/` names or from the one that has them."""
        number, length = episode["episode_index"], episode["length"]
        of_episode = [("episode_index", "=", number)]
        named: Path = self._source / self._info["data_path"].format(**episode)
        self.file = named
        if named.exists():
            table = pq.read_table(named, filters=of_episode)
            if table.num_rows == length:
                return table
        self.file = self._files.get(number, named)  # all files are read for this, so only where need be
        table = pq.read_table(self.file, filters=of_episode)
        if table.num_rows == length:
            return table
        raise ValueError(f"{table.num_rows} of {length} steps of episode {number}")

    @cached_property
    def _files(self) -> dict[int, Path]:
        """Which file has the rows of an episode, whatever `meta/` says; files that are torn are left out."""
        found: dict[int, Path] = {}
        for file in sorted((self._source / "data").glob("*/*.parquet")):
            try:
                column = pq.read_table(file, columns=["episode_index"])["episode_index"]
            except _DAMAGES:
                continue
            found |= {int(number): file for number in column.unique().to_pylist()}
        return found

    def _task_of(self, table: pa.Table) -> str:
        """The sentence of an episode's `task_index`, from `meta/tasks`."""
        index = int(table["task_index"][0].as_py())
        self.file = self._source / "meta" / "tasks.parquet"
        if not self.file.exists():
            self.file = self._source / "meta" / "tasks.jsonl"
            return next(str(one["task"]) for one in _json_objects(self.file.read_text()) if one["task_index"] == index)
        tasks = pq.read_table(self.file).to_pylist()  # pandas' index, which the sentences are, has a name of its own
        row = next(one for one in tasks if one["task_index"] == index)
        return str(next(value for name, value in row.items() if name != "task_index"))


def _json_objects(text: str) -> Iterator[Any]:
    """Objects one after the other, whatever the lines."""
    decoder, at = json.JSONDecoder(), 0
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        found, at = decoder.raw_decode(text, at)
        yield found


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
        ValueError: the film is torn, or too short.
    """
    wanted = film.begins_s + steps / film.fps
    images: list[NDArray[np.uint8]] = []
    try:
        with av.open(str(film.file), format="mp4") as container:  # a playlist could name any file
            stream = container.streams.video[0]
            # several episodes share a film: to the key frame before this one, and on from there
            if film.begins_s and stream.time_base:
                container.seek(int(film.begins_s / stream.time_base), stream=stream)
            for frame in container.decode(stream):
                if len(images) == len(wanted):
                    break
                # within half a frame: times are rounded when films are written
                if frame.time is not None and abs(frame.time - wanted[len(images)]) < 0.5 / film.fps:
                    images.append(frame.to_ndarray(format="rgb24").astype(np.uint8, copy=False))
        if len(images) < len(wanted):
            raise ValueError(f"no frame {wanted[len(images)]:.3f} s from its beginning")
    except (OSError, ValueError, IndexError, FFmpegError) as error:
        raise ValueError(f"{film.file} is missing or torn: {error}") from error
    return np.stack(images)
