"""LeRobot's data sets, version 2.1 and 3.0: Parquet for numbers, Parquet or MP4 for images; `meta/` says where.

What people publish is not always what `meta/` says. Of version 3 an episode may lie in another file than is written
(`file_index` is stale after data sets were merged): it is looked for. Where an episode has no `tasks`, its rows'
`task_index` names them. JSON objects of `episodes.jsonl` may go over several lines. `fps` may be another than that of
the films, and where an episode begins in a film is written as a sum of rounded durations: which frame belongs to a row
is found from the film itself.
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

# names of the columns, the first that is there
_ACTIONS, _STATES = ("action", "actions"), ("observation.state", "state")
_MAX_META_BYTES = 2**30  # of episodes.jsonl, whose lines have statistics in some versions
_SUCCESSES = ("is_success", "success")
DAMAGES = (OSError, KeyError, ValueError, TypeError, IndexError, AttributeError, RecursionError, pa.ArrowException)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Film:
    """Where an episode's images of one camera are."""

    file: Path
    begin_s: float
    """When the episode begins in the film, as `meta/` says."""
    row_s: NDArray[np.float64]
    """[T] time of each row since then."""
    fps: float
    """As `meta/` says."""
    first: int
    """Steps of the episodes before this one in the film."""
    num_steps: int
    """Steps of all episodes in the film: as many as it has frames, where nothing was lost or added."""


def read_lerobot(source: Path, config: CutConfig) -> Iterator[RobotTrajectory | CorruptEpisode]:
    """The episodes of a data set's folder, in the order of their numbers; one that is torn does not stop the others.

    Raises:
        UsageError: `meta/` is missing, torn, or of another version.
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
    """Names of the images in a data set, those of a wrist last, as in our envs.

    Raises:
        UsageError: `meta/info.json` cannot be read, or names none.
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
    """One folder; `file` is the one that was read last, which is the one to blame."""

    def __init__(self, source: Path, config: CutConfig) -> None:
        self._source, self._config = source, config
        self.file: Path = source / "meta" / "info.json"
        self.episodes: list[dict[str, Any]] = []
        """What `read_meta` gave."""

    def read_meta(self) -> Iterator[dict[str, Any]]:
        """What `meta/` says of each episode."""
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
            # statistics of each feature are most of the file, and nothing here asks for them
            for episode in read_table(self.file, lambda name: not name.startswith("stats/")).to_pylist():
                yield episode | {key: episode[f"data/{key}"] for key in ("chunk_index", "file_index")}

    def trajectory(self, episode: Mapping[str, Any]) -> RobotTrajectory:
        """The steps of an episode."""
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
        self.file = data  # what is wrong from here on is wrong with the numbers: a film that is torn says so itself
        return RobotTrajectory.recorded(
            _numbers(table[self._actions]),
            _numbers(table[self._states]),
            is_late=bool(self._config.late),
            name=f"{number}",
            file=data,
            instruction=instruction,
            look=partial(_look, looks),  # later, and only at the steps that chunks begin with
            success=_success(table),
            rewards=_column(table, "next.reward", np.float32),
            indices=_column(table, "index", np.int64),
        )

    def _film_of(self, episode: Mapping[str, Any], camera: str) -> tuple[Path, float]:
        """The film of an episode, and when the episode begins in it."""
        prefix = f"videos/{camera}/"  # of version 3, where each camera has files of its own
        place = {name.removeprefix(prefix): value for name, value in episode.items() if name.startswith(prefix)}
        file = self._source / self._info["video_path"].format(**{**episode, "video_key": camera} | place)
        return file, float(place.get("from_timestamp", 0.0))

    @cached_property
    def _on_film(self) -> dict[str, dict[Path, tuple[dict[int, int], int]]]:
        """By camera and film: steps before each episode in the film, by its number, and steps of all."""
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
        """The rows of an episode in their order, from the file that `meta/` names or from the one that has them."""
        number, length = episode["episode_index"], episode["length"]
        named: Path = self._source / self._info["data_path"].format(**episode)
        for file in (named, None):
            # all files are read to find an episode, so only where need be
            self.file = file or self._files.get(number, named)
            if file and not file.exists():
                continue
            table = read_table(self.file, filters=[("episode_index", "=", number)])
            if table.num_rows == length:
                return _in_order(table)
        raise ValueError(f"{table.num_rows} of {length} steps of episode {number}")

    @cached_property
    def _files(self) -> dict[int, Path]:
        """Which file has the rows of an episode, whatever `meta/` says; files that are torn are left out."""
        found: dict[int, Path] = {}
        for file in sorted((self._source / "data").glob("*/*.parquet")):
            try:
                column = read_table(file, "episode_index".__eq__)["episode_index"]
            except DAMAGES:
                continue
            found |= {int(number): file for number in column.unique().to_pylist()}
        return found

    def _instruction(self, episode: Mapping[str, Any], table: pa.Table) -> str:
        """The sentence of an episode: that of its rows' `task_index`, else the one beside it in `meta/`."""
        data = self.file
        if "task_index" in table.column_names and self._tasks:
            return self._tasks[int(table["task_index"][0].as_py())]
        self.file = data
        return str(episode["tasks"][0])

    @cached_property
    def _tasks(self) -> dict[int, str]:
        """The sentences by `task_index`, whatever the order of their rows; empty where there is no such file."""
        self.file = self._source / "meta" / "tasks.parquet"
        if self.file.exists():
            rows = read_table(self.file).to_pylist()
            # pandas' index, which the sentences are, has a name of its own
            return {
                row["task_index"]: str(next(value for name, value in row.items() if name != "task_index"))
                for row in rows
            }
        self.file = self._source / "meta" / "tasks.jsonl"
        rows = json_objects(self.file) if self.file.exists() else ()
        return {row["task_index"]: str(row["task"]) for row in rows}


def _column(table: pa.Table, name: str, dtype: Any) -> NDArray[Any] | None:
    """[T] one number of each row; None where there is no such column."""
    return np.ravel(np.array(table[name].to_pylist(), dtype)) if name in table.column_names else None


def _success(table: pa.Table) -> bool | None:
    """Whether an episode succeeded; None where no column says so, as in many data sets of demonstrations alone."""
    if "next.success" in table.column_names:  # of each action
        return bool(np.any(_numbers(table["next.success"])))
    name = next((name for name in _SUCCESSES if name in table.column_names), None)
    return None if name is None else bool(np.ravel(_numbers(table[name]))[-1])  # of the episode, on its last row


def _in_order(table: pa.Table) -> pa.Table:
    """The rows by their `index`, or as they are where that rises already or is not there.

    Raises:
        ValueError: two rows have one index.
    """
    if "index" not in table.column_names:
        return table
    indices = np.ravel(table["index"].to_pylist())
    order = np.argsort(indices, kind="stable")
    if (np.diff(indices[order]) < 1).any():
        raise ValueError("two rows have one index")
    return table if (np.diff(order) == 1).all() else table.take(order)


def read_table(file: Path, is_wanted: Callable[[str], bool] = lambda _: True, filters: Any = None) -> pa.Table:
    """The columns of a Parquet file whose names are wanted, and the rows that pass.

    Raises:
        ValueError: its header claims more than a file of its size may hold; nothing of it was read.
    """
    with open_regular(file) as stream:
        about = pq.read_metadata(stream)
    num_bytes = 0
    for group in map(about.row_group, range(about.num_row_groups)):
        # packed runs of one value are short, however many values they stand for: these are counted, too
        num_values = sum(group.column(place).num_values for place in range(group.num_columns))
        num_bytes += max(group.total_byte_size, 4 * num_values, 8 * group.num_rows)
    check_claim(max(num_bytes, 8 * about.num_rows), file.stat().st_size)
    columns = [name for name in pq.read_schema(file).names if is_wanted(name)]
    # texts and images that rows share are kept once, as they lie in the file: Arrow would copy them for every row
    leaves = [about.schema.column(place) for place in range(about.num_columns)]
    shared = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    table = pq.read_table(file, columns=columns, filters=filters, read_dictionary=shared)
    check_claim(sum(_spread_bytes(chunk) for column in table.columns for chunk in column.chunks), file.stat().st_size)
    return table


def _spread_bytes(array: pa.Array) -> int:
    """Bytes that the values of an array take at most, each by itself."""
    if isinstance(array, pa.DictionaryArray):
        lengths = pc.call_function("binary_length", [array.dictionary])
        return len(array) * (pc.call_function("max", [lengths]).as_py() or 0)
    inner = array.flatten() if isinstance(array, pa.StructArray | pa.ListArray | pa.LargeListArray) else []
    return sum(map(_spread_bytes, inner)) if isinstance(inner, list) else _spread_bytes(inner)


def json_objects(file: Path) -> Iterator[Any]:
    """Objects one after the other, whatever the lines."""
    text = read_bytes(file, _MAX_META_BYTES).decode()
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
        ValueError: the film is torn, or its times do not fit the rows'.
    """
    from rlvlm.demonstrations.films import film_frames, film_times  # PyAV is slow to import, and few have films

    stamps, tick_s = film_times(film.file)
    return film_frames(film.file, stamps[_frame_numbers(film, (stamps * tick_s).astype(np.float64))[steps]])


def _frame_numbers(film: _Film, frame_s: NDArray[np.float64]) -> NDArray[np.intp]:
    """[T] which frame each row of an episode saw, of a film whose frames are shown at `frame_s` [F].

    Raises:
        ValueError: none, or another, belongs to a row.
    """
    num_rows = len(film.row_s)
    asked_s = film.begin_s + film.row_s
    if len(frame_s) == film.num_steps:
        # A frame per row: the numbers are known, whatever the times. `from_timestamp` only has to tell which episode
        # comes after which, by the film's own clock or by that of `meta/`
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
        # times that are shifted by more than a quarter may as well be those of the neighbours
        is_near = np.abs(error_s).max() <= step_s / 2 and abs(float(np.median(error_s))) <= step_s / 4
        if is_near and (np.diff(nearest) > 0).all():
            return nearest
    raise ValueError(
        f"{film.file}: the video's times do not fit: it has {len(frame_s)} frames from {frame_s[0]:.3f} to "
        f"{frame_s[-1]:.3f} s, episodes with {film.num_steps} rows lie in it, and this one is at {asked_s[0]:.3f} to "
        f"{asked_s[-1]:.3f} s"
    )
