"""LeRobot's data sets, version 2.1 and 3.0: Parquet for numbers, Parquet or MP4 for images, `meta/` as index.

Published data often contradict `meta/`. In version 3 an episode may be in another file than stated (`file_index` is
stale after data sets were merged): it is searched for. If an episode has no `tasks`, its rows' `task_index` names them.
JSON objects of `episodes.jsonl` may span several lines. `fps` may differ from the videos', and the start of an episode
in a video is a sum of rounded durations: the frame of each row is determined from the video itself.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlvlm.core.errors import UsageError
from rlvlm.core.foreign import read_json
from rlvlm.core.steps import Frames
from rlvlm.demonstrations.tables import DAMAGES, json_objects, read_table
from rlvlm.demonstrations.trajectory import CorruptEpisode, RobotTrajectory
from rlvlm.plugins.exchange.cutting import CutConfig
from rlvlm.plugins.exchange.encoded import decoded

# column names by preference: the first that exists
_ACTIONS, _STATES = ("action", "actions"), ("observation.state", "state")
_SUCCESSES = ("is_success", "success")
_FIELD = re.compile(r"\{(\w+)(?::0?([0-9]{1,2})d)?\}")
"""Field of a template of file names: a name and, for numbers, the digits to which it is filled with zeros."""
_NUMBERED = ("episode_chunk", "episode_index", "chunk_index", "file_index")
_CAMERA, _MAX_DIGITS = "video_key", 20


@dataclass(frozen=True, kw_only=True, slots=True)
class _Film:
    """Location of an episode's images from one camera."""

    root: Path
    """Folder of the data set."""
    file: Path
    begin_s: float
    """Start of the episode in the video according to `meta/`, seconds."""
    row_s: NDArray[np.float64]
    """[T] time of each row since then, seconds."""
    fps: float
    """Frame rate according to `meta/`."""
    first: int
    """Number of steps of earlier episodes in the video."""
    num_steps: int
    """Number of steps of all episodes in the video; equals its number of frames if nothing was lost or added."""


def read_lerobot(source: Path, config: CutConfig) -> Iterator[RobotTrajectory | CorruptEpisode]:
    """Yields the episodes of a data set's folder, in the order of their numbers; a corrupt one does not stop the
    others.

    Raises:
        UsageError: `meta/` is missing, truncated, or of another version.
    """
    dataset = _LeRobotDataset(source, config)
    try:
        dataset.episodes = episodes = list(dataset.read_meta())
    except DAMAGES as error:
        raise UsageError(
            f"{dataset.file} is missing or torn, or {source} is no data set of LeRobot's that can be read: {error}",
            "name the folder that holds meta/info.json; conversions from older versions come with LeRobot",
        ) from error
    if missing := [camera for camera in dataset.cameras if camera not in dataset.images]:
        there = ", ".join(dataset.images) or "none"
        what = "depth maps, which are not shown as images, in" if missing[0] in dataset.depths else "no camera"
        raise UsageError(f"{source} has {what} {missing[0]}; it has {there}", "name one of these")
    for episode in episodes:
        try:
            yield dataset.trajectory(episode)
        except DAMAGES as error:
            yield CorruptEpisode(file=dataset.file, reason=str(error))


def is_lerobot(path: Path) -> bool:
    """Returns whether `path` is the folder of a data set of LeRobot's."""
    return (path / "meta" / "info.json").is_file()


def read_recorded(source: Path, camera: str) -> Iterator[RobotTrajectory | CorruptEpisode]:
    """Yields the episodes as `rlvlm score` shows them to a judge: every image counts, above all the last one.

    Args:
        source: folder of the data set.
        camera: camera to decode; empty for the first that is not at the wrist.
    """
    # `late` matters for learning from actions
    return read_lerobot(source, CutConfig(cameras=(camera or default_camera(source),), late=False))


def read_shown(source: Path) -> Iterator[RobotTrajectory | CorruptEpisode]:
    """Yields the episodes as the bench shows them to a judge, by all cameras."""
    return read_lerobot(source, CutConfig())


def default_camera(source: Path) -> str:
    """Returns the camera of a data set by which it is judged: of those in colour the first that is not at the wrist.

    Raises:
        UsageError: `meta/info.json` cannot be read, or names no image in colour.
    """
    try:
        features = read_json(source / "meta" / "info.json", root=source)["features"]
        found = _cameras(features)
        coloured = [name for name in found if not _is_grey(features[name])]
    except DAMAGES as error:
        raise UsageError(f"{source / 'meta' / 'info.json'} cannot be read: {error}", "fetch the data anew") from error
    if found and not coloured:
        raise UsageError(f"{source} has no camera in colour, only {', '.join(found)}", "name one with --camera")
    if not coloured:
        raise UsageError(f"{source} has neither images nor videos", "name data that have, or fetch them too")
    return coloured[0]


def _cameras(features: Mapping[str, Any]) -> list[str]:
    """Returns the names of the images but depth maps, wrist cameras last, as in our envs."""
    found = [name for name, feature in features.items() if _is_image(feature) and not _is_depth(feature)]
    return sorted(found, key=lambda name: "wrist" in name or "hand" in name)


def _is_image(feature: Mapping[str, Any]) -> bool:
    return feature["dtype"] in ("image", "video")


def _is_depth(feature: Mapping[str, Any]) -> bool:
    """Returns whether LeRobot says that the images are distances; older versions put `video.` before the names."""
    about = {**feature, **(feature.get("info") or {})}
    return any(about.get(name) for name in ("is_depth_map", "video.is_depth_map"))


def _is_grey(feature: Mapping[str, Any]) -> bool:
    """Returns whether the images have one channel: infrared, or depth that is not said to be."""
    about, shape = feature.get("info") or {}, feature.get("shape") or ()
    return about.get("video.channels", about.get("channels")) == 1 or (len(shape) == 3 and 1 in (shape[0], shape[-1]))


class _LeRobotDataset:
    """One data set's folder; `file` is the file read last, for error messages."""

    def __init__(self, source: Path, config: CutConfig) -> None:
        self._source, self._config = source, config
        self.file: Path = source / "meta" / "info.json"
        self.episodes: list[dict[str, Any]] = []
        """Episodes as returned by `read_meta`."""

    def read_meta(self) -> Iterator[dict[str, Any]]:
        """Yields the entry of each episode in `meta/`."""
        self._info = info = read_json(self.file, root=self._source)
        version = str(info["codebase_version"])
        self._features: Mapping[str, Any] = info["features"]
        if not version.startswith(("v2", "v3")):
            raise ValueError(f"version {version}, and 2.x and 3.x are read")
        for template in filter(None, (info["data_path"], info.get("video_path"))):
            _check_template(template)
        self._fps = float(info.get("fps") or 0)
        self._actions, self._states = (
            next((name for name in names if name in self._features), None) for names in (_ACTIONS, _STATES)
        )
        self.images = _cameras(self._features)
        self.depths = [name for name, feature in self._features.items() if _is_depth(feature)]
        self.cameras = list(self._config.cameras) or self.images
        if version.startswith("v2"):
            self.file = self._source / "meta" / "episodes.jsonl"
            if type(size := info["chunks_size"]) is not int or size < 1:
                raise ValueError(f"chunks_size in meta/info.json is the number of episodes in a folder, got {size!r}")
            for episode in json_objects(self.file, self._source):
                yield episode | {"episode_chunk": episode["episode_index"] // size}
            return
        files = sorted((self._source / "meta" / "episodes").glob("*/*.parquet"))
        if not files:
            raise ValueError("no file in meta/episodes")
        for file in files:
            self.file = file
            # per-feature statistics are most of the file, and are not needed here
            table = read_table(self.file, lambda name: not name.startswith("stats/"), root=self._source)
            for episode in table.to_pylist():
                yield episode | {key: episode[f"data/{key}"] for key in ("chunk_index", "file_index")}

    def trajectory(self, episode: Mapping[str, Any]) -> RobotTrajectory:
        """Returns the steps of an episode."""
        number = episode["episode_index"]
        table = self._rows(episode)
        data = self.file
        instructions = self._instructions(episode, table)
        looks: list[Any] = []
        for camera in self.cameras:
            if self._features[camera]["dtype"] != "video":
                looks.append(table[camera])
                continue
            self.file, begin_s = self._film_of(episode, camera)
            before, num_steps = self._on_film[camera][self.file]
            if not 0 < (fps := self._fps) < np.inf:
                raise ValueError(f"fps in meta/info.json is above 0, got {fps:g}")
            row_s = _numbers(table["timestamp"]).ravel() if "timestamp" in table.column_names else None
            row_s = np.arange(table.num_rows) / fps if row_s is None else row_s.astype(np.float64)
            if row_s.shape != (table.num_rows,) or not (np.diff(row_s) > 0).all():
                raise ValueError(f"the times of the rows of episode {number} do not rise")
            film = _Film(
                root=self._source,
                file=self.file,
                begin_s=begin_s,
                row_s=row_s,
                fps=fps,
                first=before[number],
                num_steps=num_steps,
            )
            looks.append(film)
        self.file = data  # later errors concern the numbers: a corrupt video raises its own
        none = np.zeros((table.num_rows, 0), np.float32)
        has_numbers = self._actions is not None or self._states is not None
        return RobotTrajectory.recorded(
            none if self._actions is None else _numbers(table[self._actions]),
            none if self._states is None else _numbers(table[self._states]),
            digest="" if has_numbers else _digest(looks),
            is_late=bool(self._config.late),
            name=f"{number}",
            file=data,
            instruction=instructions[0],
            instructions=instructions if len(set(instructions)) > 1 else (),
            look=partial(_look, looks),  # deferred, and only for the steps that begin chunks
            success=_success(table),
            rewards=_column(table, "next.reward", np.float32),
            corrected=_column(table, "intervention", np.bool_),
            indices=_column(table, "index", np.int64),
        )

    def _film_of(self, episode: Mapping[str, Any], camera: str) -> tuple[Path, float]:
        """Returns the video of an episode, and the episode's start in it."""
        prefix = f"videos/{camera}/"  # in version 3 each camera has its own files
        place = {name.removeprefix(prefix): value for name, value in episode.items() if name.startswith(prefix)}
        file = self._source / _filled(self._info["video_path"], {**episode, **place}, camera)
        return file, float(place.get("from_timestamp", 0.0))

    @cached_property
    def _on_film(self) -> dict[str, dict[Path, tuple[dict[int, int], int]]]:
        """Returns, by camera and video, the steps before each episode (by number) and the total number of steps."""
        found: dict[str, dict[Path, tuple[dict[int, int], int]]] = {}
        for camera in self.cameras:
            films: dict[Path, tuple[dict[int, int], int]] = {}
            placed = [(*self._film_of(episode, camera), episode) for episode in self.episodes]
            for file, _, episode in sorted(placed, key=lambda entry: (entry[1], entry[2]["episode_index"])):
                before, total = films.get(file, ({}, 0))
                films[file] = before | {episode["episode_index"]: total}, total + episode["length"]
            found[camera] = films
        return found

    def _rows(self, episode: Mapping[str, Any]) -> pa.Table:
        """Returns the rows of an episode in order, from the file that `meta/` names or the one that contains them."""
        number, length = episode["episode_index"], episode["length"]
        named: Path = self._source / _filled(self._info["data_path"], episode)
        for file in (named, None):
            # all files must be read to find an episode, so only if necessary
            self.file = file or self._files.get(number, named)
            if file and not file.exists():
                continue
            table = read_table(self.file, filters=[("episode_index", "=", number)], root=self._source)
            if table.num_rows == length:
                return _in_order(table)
        raise ValueError(f"{table.num_rows} of {length} steps of episode {number}")

    @cached_property
    def _files(self) -> dict[int, Path]:
        """Returns the file that contains each episode's rows, regardless of `meta/`; corrupt files are left out."""
        found: dict[int, Path] = {}
        for file in sorted((self._source / "data").glob("*/*.parquet")):
            try:
                column = read_table(file, "episode_index".__eq__, root=self._source)["episode_index"]
            except DAMAGES:
                continue
            found |= {int(number): file for number in column.unique().to_pylist()}
        return found

    def _instructions(self, episode: Mapping[str, Any], table: pa.Table) -> tuple[str, ...]:
        """Returns the instruction of each row of an episode by its `task_index`, else the one in `meta/`, alone."""
        data = self.file
        if "task_index" in table.column_names and self._tasks:
            self.file, tasks = data, self._tasks
            return tuple(tasks[int(index)] for index in np.ravel(table["task_index"].to_pylist()))
        self.file = data
        return (str(episode["tasks"][0]),)

    @cached_property
    def _tasks(self) -> dict[int, str]:
        """Returns the instructions by `task_index`, whatever the order of rows; empty if there is no such file."""
        self.file = self._source / "meta" / "tasks.parquet"
        if self.file.exists():
            rows = read_table(self.file, root=self._source).to_pylist()
            # pandas stores the index, which holds the instructions, under a name of its own
            return {
                row["task_index"]: str(next(value for name, value in row.items() if name != "task_index"))
                for row in rows
            }
        self.file = self._source / "meta" / "tasks.jsonl"
        rows = json_objects(self.file, self._source) if self.file.exists() else ()
        return {row["task_index"]: str(row["task"]) for row in rows}


def _filled(template: str, values: Mapping[str, Any], camera: str = "") -> str:
    """Returns the file's name of an episode, relative to the data set's folder.

    The values are anybody's: only whole numbers are filled in, and the camera's name. Where the file's name then leads
    is checked by `open_inside`, with which it is opened.

    Args:
        template: `data_path` or `video_path` of `meta/info.json`, as `_check_template` wants it.
        values: entry of the episode.
        camera: name of the camera; empty for numbers.

    Raises:
        ValueError: a number is none.
    """

    def fill(field: re.Match[str]) -> str:
        if field[1] == _CAMERA:
            return camera
        if type(number := values[field[1]]) is not int or not 0 <= number < 10**_MAX_DIGITS:
            raise ValueError(f"{field[1]} of an episode is a number from 0 on, got {str(number)[:40]!r}")
        return f"{number:0{field[2] or 0}d}"

    return _FIELD.sub(fill, template)


def _check_template(template: Any) -> None:
    """Raises ValueError unless a path of `meta/info.json` lies in the folder and has only fields that are filled in."""
    if not isinstance(template, str) or Path(template).is_absolute() or ".." in Path(template).parts:
        raise ValueError(f"{str(template)[:200]} lies elsewhere")
    fields = list(_FIELD.finditer(template))
    if any(mark in _FIELD.sub("", template) for mark in "{}") or not all(
        field[1] == _CAMERA and field[2] is None or field[1] in _NUMBERED and int(field[2] or 0) <= _MAX_DIGITS
        for field in fields
    ):
        raise ValueError(
            f"{template[:200]} has fields other than {', '.join(_NUMBERED)} (as {{episode_index:06d}}) and {_CAMERA}"
        )


def _digest(looks: list[Any]) -> str:
    """Returns the SHA-256 of an episode's images, for data without numbers, which would otherwise identify it."""
    from rlvlm.demonstrations.films import film_digest  # PyAV is slow to import, and few have films

    digest = hashlib.sha256()
    for camera in looks:
        if isinstance(camera, _Film):
            digest.update(f"{film_digest(camera.root, camera.file)} {camera.begin_s} {camera.first}".encode())
        else:
            for image in camera:
                digest.update(hashlib.sha256(image.as_py()["bytes"]).digest())
    return digest.hexdigest()


def _column(table: pa.Table, name: str, dtype: Any) -> NDArray[Any] | None:
    """Returns [T], one number per row; None if there is no such column."""
    return np.ravel(np.array(table[name].to_pylist(), dtype)) if name in table.column_names else None


def _success(table: pa.Table) -> bool | None:
    """Returns whether an episode succeeded; None if no column says so, as in many data sets of demonstrations."""
    if "next.success" in table.column_names:  # one value per action
        return bool(np.any(_numbers(table["next.success"])))
    name = next((name for name in _SUCCESSES if name in table.column_names), None)
    return None if name is None else bool(np.ravel(_numbers(table[name]))[-1])  # one value per episode, on its last row


def _in_order(table: pa.Table) -> pa.Table:
    """Returns the rows sorted by `index`, or unchanged if it already rises or does not exist.

    Raises:
        ValueError: two rows share an index.
    """
    if "index" not in table.column_names:
        return table
    indices = np.ravel(table["index"].to_pylist())
    order = np.argsort(indices, kind="stable")
    if (np.diff(indices[order]) < 1).any():
        raise ValueError("two rows have one index")
    return table if (np.diff(order) == 1).all() else table.take(order)


def _numbers(column: Any) -> NDArray[np.float32]:
    """Returns [T, N] for a column of lists, [T] for a column of numbers."""
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
    """Returns [n, H, W, 3], the frames of the ascending `steps`.

    Raises:
        ValueError: the video is truncated, or its times do not match the rows'.
    """
    from rlvlm.demonstrations.films import film_frames, film_times  # PyAV is slow to import, and few have films

    stamps, tick_s = film_times(film.root, film.file)
    return film_frames(film.root, film.file, stamps[_frame_numbers(film, (stamps * tick_s).astype(np.float64))[steps]])


def _frame_numbers(film: _Film, frame_s: NDArray[np.float64]) -> NDArray[np.intp]:
    """Returns [T], the index of each row's frame in a video whose frames are shown at `frame_s` [F].

    Raises:
        ValueError: a row has no frame, or an ambiguous one.
    """
    num_rows = len(film.row_s)
    asked_s = film.begin_s + film.row_s
    if len(frame_s) == film.num_steps:
        # One frame per row: the indices are known, whatever the times. `from_timestamp` only has to show the order of
        # the episodes, by the video's own clock or by that of `meta/`
        by_film = int(np.abs(frame_s - film.begin_s).argmin())
        error = min(abs(by_film - film.first), abs(film.begin_s * film.fps - film.first))
        if error <= max(1.5, num_rows / 2):
            return film.first + np.arange(num_rows)
    else:
        step_s = float(np.median(np.diff(frame_s))) if len(frame_s) > 1 else 1 / film.fps
        after = (
            np.clip(np.searchsorted(frame_s, asked_s), 1, len(frame_s) - 1) if len(frame_s) > 1 else np.zeros(1, int)
        )
        nearest = after - (asked_s - frame_s[after - 1] < frame_s[after] - asked_s)
        error_s = frame_s[nearest] - asked_s
        # times shifted by more than a quarter of a frame could equally belong to the neighbours
        is_near = np.abs(error_s).max() <= step_s / 2 and abs(float(np.median(error_s))) <= step_s / 4
        if is_near and (np.diff(nearest) > 0).all():
            return nearest
    raise ValueError(
        f"{film.file}: the video's times do not fit: it has {len(frame_s)} frames from {frame_s[0]:.3f} to "
        f"{frame_s[-1]:.3f} s, episodes with {film.num_steps} rows lie in it, and this one is at {asked_s[0]:.3f} to "
        f"{asked_s[-1]:.3f} s"
    )
