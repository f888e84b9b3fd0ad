"""LeRobot's data sets, version 2.1 and 3.0: Parquet for numbers, Parquet or MP4 for images, `meta/` as index.

Published data often contradict `meta/`. In version 3 an episode may be in another file than stated (`file_index` is
stale after data sets were merged): it is searched for. If an episode has no `tasks`, its rows' `task_index` names them.
JSON objects of `episodes.jsonl` may span several lines. `fps` may differ from the videos', and the start of an episode
in a video is a sum of rounded durations: the frame of each row is determined from the video itself.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rlvlm.core.errors import UsageError
from rlvlm.core.foreign import check_claim, open_regular, read_bytes, read_json
from rlvlm.core.steps import Frames
from rlvlm.demonstrations.rlds import decoded
from rlvlm.demonstrations.trajectory import CorruptEpisode, CutConfig, RobotTrajectory

# column names by preference: the first that exists
_ACTIONS, _STATES = ("action", "actions"), ("observation.state", "state")
_MAX_META_BYTES = 2**30  # limit for episodes.jsonl, whose lines contain statistics in some versions
_SUCCESSES = ("is_success", "success")
DAMAGES = (OSError, KeyError, ValueError, TypeError, IndexError, AttributeError, RecursionError, pa.ArrowException)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Film:
    """Location of an episode's images from one camera."""

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
        raise UsageError(f"{source} has no camera {missing[0]}; it has {there}", "name one of these")
    for episode in episodes:
        try:
            yield dataset.trajectory(episode)
        except DAMAGES as error:
            yield CorruptEpisode(file=dataset.file, reason=str(error))


def lerobot_cameras(source: Path) -> list[str]:
    """Returns the names of the images in a data set, wrist cameras last, as in our envs.

    Raises:
        UsageError: `meta/info.json` cannot be read, or names no image.
    """
    try:
        found = _cameras(read_json(source / "meta" / "info.json")["features"])
    except DAMAGES as error:
        raise UsageError(f"{source / 'meta' / 'info.json'} cannot be read: {error}", "fetch the data anew") from error
    if not found:
        raise UsageError(f"{source} has neither images nor videos", "name data that have, or fetch them too")
    return found


def _cameras(features: Mapping[str, Any]) -> list[str]:
    found = [name for name, feature in features.items() if feature["dtype"] in ("image", "video")]
    return sorted(found, key=lambda name: "wrist" in name or "hand" in name)


class _LeRobotDataset:
    """One data set's folder; `file` is the file read last, for error messages."""

    def __init__(self, source: Path, config: CutConfig) -> None:
        self._source, self._config = source, config
        self.file: Path = source / "meta" / "info.json"
        self.episodes: list[dict[str, Any]] = []
        """Episodes as returned by `read_meta`."""

    def read_meta(self) -> Iterator[dict[str, Any]]:
        """Yields the entry of each episode in `meta/`."""
        self._info = info = read_json(self.file)
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
        self.images = _cameras(self._features)
        self.cameras = list(self._config.cameras) or self.images
        if version.startswith("v2"):
            self.file = self._source / "meta" / "episodes.jsonl"
            for episode in json_objects(self.file):
                yield episode | {"episode_chunk": episode["episode_index"] // info["chunks_size"]}
            return
        files = sorted((self._source / "meta" / "episodes").glob("*/*.parquet"))
        if not files:
            raise ValueError("no file in meta/episodes")
        for file in files:
            self.file = file
            # per-feature statistics are most of the file, and are not needed here
            for episode in read_table(self.file, lambda name: not name.startswith("stats/")).to_pylist():
                yield episode | {key: episode[f"data/{key}"] for key in ("chunk_index", "file_index")}

    def trajectory(self, episode: Mapping[str, Any]) -> RobotTrajectory:
        """Returns the steps of an episode."""
        number = episode["episode_index"]
        table = self._rows(episode)
        data = self.file
        instruction = self._instruction(episode, table)
        looks: list[Any] = []
        for camera in self.cameras:
            if self._features[camera]["dtype"] != "video":
                looks.append(table[camera])
                continue
            self.file, begin_s = self._film_of(episode, camera)
            before, num_steps = self._on_film[camera][self.file]
            fps = float(self._info["fps"])
            row_s = _numbers(table["timestamp"]).ravel() if "timestamp" in table.column_names else None
            row_s = np.arange(table.num_rows) / fps if row_s is None else row_s.astype(np.float64)
            if row_s.shape != (table.num_rows,) or not (np.diff(row_s) > 0).all():
                raise ValueError(f"the times of the rows of episode {number} do not rise")
            film = _Film(
                file=self.file, begin_s=begin_s, row_s=row_s, fps=fps, first=before[number], num_steps=num_steps
            )
            looks.append(film)
        self.file = data  # later errors concern the numbers: a corrupt video raises its own
        return RobotTrajectory.recorded(
            _numbers(table[self._actions]),
            _numbers(table[self._states]),
            is_late=bool(self._config.late),
            name=f"{number}",
            file=data,
            instruction=instruction,
            look=partial(_look, looks),  # deferred, and only for the steps that begin chunks
            success=_success(table),
            rewards=_column(table, "next.reward", np.float32),
            indices=_column(table, "index", np.int64),
        )

    def _film_of(self, episode: Mapping[str, Any], camera: str) -> tuple[Path, float]:
        """Returns the video of an episode, and the episode's start in it."""
        prefix = f"videos/{camera}/"  # in version 3 each camera has its own files
        place = {name.removeprefix(prefix): value for name, value in episode.items() if name.startswith(prefix)}
        file = self._source / self._info["video_path"].format(**{**episode, "video_key": camera} | place)
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
        named: Path = self._source / self._info["data_path"].format(**episode)
        for file in (named, None):
            # all files must be read to find an episode, so only if necessary
            self.file = file or self._files.get(number, named)
            if file and not file.exists():
                continue
            table = read_table(self.file, filters=[("episode_index", "=", number)])
            if table.num_rows == length:
                return _in_order(table)
        raise ValueError(f"{table.num_rows} of {length} steps of episode {number}")

    @cached_property
    def _files(self) -> dict[int, Path]:
        """Returns the file that contains each episode's rows, regardless of `meta/`; corrupt files are left out."""
        found: dict[int, Path] = {}
        for file in sorted((self._source / "data").glob("*/*.parquet")):
            try:
                column = read_table(file, "episode_index".__eq__)["episode_index"]
            except DAMAGES:
                continue
            found |= {int(number): file for number in column.unique().to_pylist()}
        return found

    def _instruction(self, episode: Mapping[str, Any], table: pa.Table) -> str:
        """Returns the instruction of an episode: by its rows' `task_index`, else the one beside it in `meta/`."""
        data = self.file
        if "task_index" in table.column_names and self._tasks:
            return self._tasks[int(table["task_index"][0].as_py())]
        self.file = data
        return str(episode["tasks"][0])

    @cached_property
    def _tasks(self) -> dict[int, str]:
        """Returns the instructions by `task_index`, whatever the order of rows; empty if there is no such file."""
        self.file = self._source / "meta" / "tasks.parquet"
        if self.file.exists():
            rows = read_table(self.file).to_pylist()
            # pandas stores the index, which holds the instructions, under a name of its own
            return {
                row["task_index"]: str(next(value for name, value in row.items() if name != "task_index"))
                for row in rows
            }
        self.file = self._source / "meta" / "tasks.jsonl"
        rows = json_objects(self.file) if self.file.exists() else ()
        return {row["task_index"]: str(row["task"]) for row in rows}


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


def read_table(file: Path, is_wanted: Callable[[str], bool] = lambda _: True, filters: Any = None) -> pa.Table:
    """Returns the wanted columns of a Parquet file, and the rows that pass the filters.

    Raises:
        ValueError: its header claims more data than a file of its size may hold; nothing was read.
    """
    with open_regular(file) as stream:
        about = pq.read_metadata(stream)
    num_bytes = 0
    for group in map(about.row_group, range(about.num_row_groups)):
        # run-length encoding makes repeated values tiny in the file, so the expanded size is counted too
        num_values = sum(group.column(place).num_values for place in range(group.num_columns))
        num_bytes += max(group.total_byte_size, 4 * num_values, 8 * group.num_rows)
    check_claim(max(num_bytes, 8 * about.num_rows), file.stat().st_size)
    columns = [name for name in pq.read_schema(file).names if is_wanted(name)]
    # texts and images shared by rows are kept once, as in the file: Arrow would copy them for every row
    leaves = [about.schema.column(place) for place in range(about.num_columns)]
    shared = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    table = pq.read_table(file, columns=columns, filters=filters, read_dictionary=shared)
    check_claim(sum(_spread_bytes(chunk) for column in table.columns for chunk in column.chunks), file.stat().st_size)
    return table


def _spread_bytes(array: pa.Array) -> int:
    """Returns the maximum bytes of an array's values, each expanded."""
    if isinstance(array, pa.DictionaryArray):
        lengths = pc.call_function("binary_length", [array.dictionary])
        return len(array) * (pc.call_function("max", [lengths]).as_py() or 0)
    inner = array.flatten() if isinstance(array, pa.StructArray | pa.ListArray | pa.LargeListArray) else []
    return sum(map(_spread_bytes, inner)) if isinstance(inner, list) else _spread_bytes(inner)


def json_objects(file: Path) -> Iterator[Any]:
    """Yields consecutive JSON objects, wherever the line breaks are."""
    text = read_bytes(file, _MAX_META_BYTES).decode()
    decoder, at = json.JSONDecoder(), 0
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        found, at = decoder.raw_decode(text, at)
        yield found


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

    stamps, tick_s = film_times(film.file)
    return film_frames(film.file, stamps[_frame_numbers(film, (stamps * tick_s).astype(np.float64))[steps]])


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
