"""Recorded episodes of any format as trajectories with images: `rlvlm score` asks a judge about them.

Formats: a folder of ours, those of guests, or MP4 videos. Videos have their goals beside them: `clip.txt` beside
`clip.mp4`; one `metadata.csv` or `metadata.jsonl` with the columns `file_name`, `goal` and, if known, `success`, as in
Hugging Face's video folders; or a CSV or Parquet table with the columns of RoboReward (`video`, `task`, `reward` 1 to
5) or Robometer (`frames`, `task`, `quality_label`, `partial_success`). All input is untrusted.
"""

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.errors import UsageError
from rlvlm.core.foreign import MAX_JSON_BYTES, files_ending, read_text
from rlvlm.core.guests import DataFormat, load, missing_of, with_guests
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.demonstrations.folder import DemonstrationFolder, open_folder
from rlvlm.demonstrations.records import EpisodeRecord
from rlvlm.demonstrations.tables import DAMAGES, json_objects, read_table
from rlvlm.demonstrations.trajectory import CorruptEpisode, RobotTrajectory

FORMS = ("folder", "videos")
"""Formats of the core; guests may add others."""
Draw = Callable[[FloatArray, str], Frames]
"""Function from an env's snapshots [N, S] to images [N, H, W, 3], by the named camera; the first camera if empty."""
Names = Sequence[Sequence[str]]
"""[T][cameras] digests of images."""
_SUCCESS = {
    # pandas writes a column of booleans with a gap as `1.0`, `0.0` and nothing
    **dict.fromkeys(("true", "1", "1.0", "yes"), True),
    **dict.fromkeys(("false", "0", "0.0", "no"), False),
    **dict.fromkeys(("", "none", "null", "nan"), None),
}
_QUALITIES = {"failure": 0.0, "suboptimal": 0.5, "successful": 1.0}
"""Robometer's labels, as the share of the task that is done."""
_COLUMNS = {"file_name": "file_name", "video": "file_name", "frames": "file_name", "goal": "goal", "task": "goal"} | {
    name: name for name in ("success", "reward", "quality_label", "partial_success")
}
"""Columns to read from a table, and their meaning here; of those with the same meaning the first counts."""
_NAMELESS = "it names no video: its column is file_name, video or frames"
TABLES, FILM = (".csv", ".parquet"), ".mp4"
MAX_ROWS = 100_000
_MAX_GOAL_BYTES = 64 * 2**10


@dataclass(frozen=True, kw_only=True, slots=True)
class Recordings:
    """Location of recorded episodes, and how to view them. Each iteration reads them anew."""

    path: Path
    form: str
    """One of `FORMS`, or a guest's."""
    camera: str = ""
    """Camera to use; empty: the first that is not at the wrist."""
    goal: str = ""
    """Goal of all episodes, replacing their own; empty: their own."""
    make_draw: Callable[[DemonstrationFolder], Draw] | None = None
    """Makes the renderer of one of our folders that stores snapshots; it may import the folder's task."""

    def __iter__(self) -> Iterator[RobotTrajectory | CorruptEpisode]:
        """Yields the episodes in order; one that cannot be read is a `CorruptEpisode`, and does not stop the others.

        Raises:
            UsageError: nothing can be read at all, or there is no such camera.
        """
        if self.camera and self.form == "videos":
            raise UsageError("--camera has no effect on videos, which have one each", "leave it out")
        elif self.form in FORMS:
            found = self._read_folder() if self.form == "folder" else _read_videos(self.path)
        else:
            found = load(with_guests("formats", {})[self.form].read)(self.path, self.camera)
        for film in found:
            is_renamed = self.goal and isinstance(film, RobotTrajectory)
            yield replace(film, instruction=self.goal) if is_renamed else film

    def _read_folder(self) -> Iterator[RobotTrajectory | CorruptEpisode]:
        folder, draw = open_folder(self.path), None
        said = folder.chunks.get("cameras")
        cameras = list(map(str, said)) if isinstance(said, list) else []
        if self.camera and self.camera not in cameras:
            there = ", ".join(cameras) or "one without a name"
            raise UsageError(f"{self.path} has no camera {self.camera}; it has {there}", "name one of these")
        place = cameras.index(self.camera) if self.camera else 0
        for record in folder.episodes():
            names = _image_names(record)
            if names:
                look = partial(_load_images, folder, names, place)
            elif np.ndim(record.arrays.get("snapshots", 0)) == 2 and self.make_draw is not None:
                draw = draw or self.make_draw(folder)  # at the first episode that needs it: a simulator takes seconds
                names = record.arrays["snapshots"]
                look = partial(_draw_snapshots, draw, names, self.camera)
            else:
                yield CorruptEpisode(
                    file=folder.path / "episodes.jsonl", reason=f"{record.id} keeps neither images nor states"
                )
                continue
            progress = [0.0, *(step.progress for step in record.steps)] if record.steps else None
            content = json.dumps([record.id, record.goal, record.success, list(names) if draw is None else []])
            digest = hashlib.sha256(content.encode())
            for array in map(np.ascontiguousarray, record.arrays.values()):
                digest.update(array.tobytes())
            yield RobotTrajectory(
                name=record.id,
                file=folder.path,
                instruction=record.goal,
                actions=np.zeros((len(names), 0), np.float32),
                proprio=np.zeros((len(names), 0), np.float32),
                look=look,
                success=record.success,
                rewards=np.array([step.env_reward for step in record.steps] or [record.env_return], np.float32),
                progress=None if progress is None else np.array(progress[: len(names)], np.float32),
                digest=digest.hexdigest(),
            )
        if folder.num_damaged:
            yield CorruptEpisode(file=folder.path / "episodes.jsonl", reason=f"{folder.num_damaged} damaged episodes")


def find_form(path: Path) -> str:
    """Returns the format of the recorded data at `path`.

    Raises:
        UsageError: it contains nothing that can be read.
    """
    if (path / "demonstrations.json").is_file():
        return "folder"
    if found := guest_form(path):
        return found[0]
    # last, because films may lie beside other data; cameras and Windows write endings in capitals
    if path.suffix.lower() in (FILM, *TABLES) and path.is_file() or files_ending(path, FILM):
        return "videos"
    there = "holds" if path.exists() else "is not there: there are"
    readable = [form.about for form in with_guests("formats", {}).values() if form.about]
    raise UsageError(
        f"{path} {there} no recorded episodes that can be read{missing_of('formats')}",
        f"name {', '.join(readable + ['a folder of `rlvlm collect`'])}, or MP4 videos",
    )


def guest_form(path: Path) -> tuple[str, DataFormat] | None:
    """Returns the guest's format of the recorded data at `path`, with its name; None if no guest reads them."""
    if not path.exists():  # most names of a bench are no paths, and the readers take a moment to import
        return None
    forms: dict[str, DataFormat] = with_guests("formats", {})
    return next(((name, form) for name, form in forms.items() if load(form.is_here)(path)), None)


def recordings_digest(episodes: Iterable[RobotTrajectory | CorruptEpisode]) -> str:
    """Returns the SHA-256 of recorded episodes, of all their numbers and their order, by which labels identify data."""
    digest = hashlib.sha256()
    for film in episodes:
        if isinstance(film, CorruptEpisode):
            digest.update(b"torn")
            continue
        about = [film.name, len(film.actions), film.success, film.digest]
        digest.update(json.dumps(about).encode())
        for array in (film.actions, film.proprio, film.rewards, film.indices):
            digest.update(b"-" if array is None else np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _image_names(record: EpisodeRecord) -> Names:
    """Returns [T, cameras] digests of the images, including the last if stored; empty if there are none."""
    if record.has_chunks:
        names = np.asarray(record.arrays.get("pictures", ""))
        return names.tolist() if names.ndim == 2 else []
    names = [step.pictures for step in record.steps] + [record.last_pictures] * bool(record.last_pictures)
    return names if all(names) else []


def _load_images(folder: DemonstrationFolder, names: Names, place: int, steps: NDArray[np.intp]) -> Frames:
    return np.stack([folder.image_store.load(str(names[step][place])) for step in steps.tolist()])[:, None]


def _draw_snapshots(draw: Draw, snapshots: FloatArray, camera: str, steps: NDArray[np.intp]) -> Frames:
    return draw(np.asarray(snapshots[steps], np.float32), camera)[:, None]


def _read_videos(path: Path) -> Iterator[RobotTrajectory | CorruptEpisode]:
    root = path if path.is_dir() else path.parent
    if path.suffix.lower() in TABLES and not path.is_dir():
        rows = _read_rows(root, path)  # a video may be in several rows, with several goals
    else:
        about = {str(row["file_name"]): (where, row) for where, row in _read_metadata(root)}
        files = files_ending(root, FILM) if path.is_dir() else [path]
        names = dict.fromkeys([*(file.name for file in files), *(about if path.is_dir() else ())])
        rows = [about.get(name, (name, {"file_name": name})) for name in names]
    for where, row in rows:
        try:
            yield _video(root, row)
        except (OSError, ValueError) as error:
            yield CorruptEpisode(file=root / str(row.get("file_name") or path.name), reason=f"{where}: {error}")


def _video(root: Path, row: Mapping[str, Any]) -> RobotTrajectory:
    """Returns the episode of a row, whose video must be in `root` or below.

    Raises:
        OSError, ValueError: it cannot be read, or is elsewhere.
    """
    if not isinstance(row.get("file_name"), str) or not row["file_name"]:
        raise ValueError(_NAMELESS)
    file = root / row["file_name"]
    from rlvlm.demonstrations.films import film_digest, film_times  # PyAV is slow to import, and few have films

    times, _ = film_times(root, file)
    goal = str(row.get("goal") or "").strip()
    beside = (file.with_suffix(ending) for ending in (".txt", ".TXT"))
    if not goal and (sentence := next((each for each in beside if each.exists()), None)):
        goal = read_text(sentence, _MAX_GOAL_BYTES, root).strip()
    success, quality = _labels(row)
    return RobotTrajectory(
        name=row["file_name"],
        file=file,
        instruction=goal,
        actions=np.zeros((len(times), 0), np.float32),
        proprio=np.zeros((len(times), 0), np.float32),
        look=partial(_look_at_video, root, file),
        success=success,
        quality=quality,
        digest=film_digest(root, file),
    )


def _labels(row: Mapping[str, Any]) -> tuple[bool | None, float | None]:
    """Returns whether an episode succeeded, and the share of its task done at its end, in [0, 1]; None if unknown.

    Raises:
        ValueError: a label is not among those of its column.
    """
    said = {
        name: "" if (value := row.get(name)) is None or value != value else str(value).strip().lower()  # noqa: PLR0124 - NaN
        for name in ("success", "reward", "quality_label", "partial_success")
    }
    if said["success"] not in _SUCCESS:
        raise ValueError(f"its success is true, false or empty, got {said['success']!r:.40}")
    success, quality = _SUCCESS[said["success"]], None
    if said["reward"]:
        reward = float(said["reward"])
        if reward not in (1, 2, 3, 4, 5):
            raise ValueError(f"its reward is 1, 2, 3, 4 or 5, got {said['reward']!r:.40}")
        quality = (reward - 1) / 4  # as in RoboReward: only 5 is a success
    if said["quality_label"]:
        if said["quality_label"] not in _QUALITIES:
            raise ValueError(f"its quality_label is one of {', '.join(_QUALITIES)}, got {said['quality_label']!r:.40}")
        quality = _QUALITIES[said["quality_label"]]
    if said["partial_success"]:
        if not 0 <= (share := float(said["partial_success"])) <= 1:
            raise ValueError(f"its partial_success is in [0, 1], got {said['partial_success']!r:.40}")
        success = said["quality_label"] == "successful" if said["quality_label"] and success is None else success
        quality = share
    return (quality == 1.0 if success is None and quality is not None else success), quality


def _look_at_video(root: Path, file: Path, steps: NDArray[np.intp]) -> Frames:
    from rlvlm.demonstrations.films import film_frames, film_times  # PyAV is slow to import, and few have films

    return film_frames(root, file, film_times(root, file)[0][steps])[:, None]


def _read_metadata(root: Path) -> list[tuple[str, dict[str, Any]]]:
    """Returns the rows of `metadata.csv` or `metadata.jsonl` with their positions; none if there is no such file.

    Raises:
        UsageError: it cannot be read, or two rows are of one video.
    """
    file = next((root / name for name in ("metadata.csv", "metadata.jsonl") if (root / name).exists()), None)
    if file is None:
        return []
    rows = _read_rows(root, file)
    if len({row["file_name"] for _, row in rows}) < len(rows):
        raise UsageError(f"{file} cannot be read: two rows have one file_name", _FIX)
    return rows


_FIX = "its columns are file_name, goal and success; or video, task and reward; or frames, task and quality_label"


def _read_rows(root: Path, file: Path) -> list[tuple[str, dict[str, Any]]]:
    """Returns the rows of a table, under the names that `_COLUMNS` gives, each with its position.

    Raises:
        UsageError: it cannot be read, has no column of videos, or too many rows.
    """
    try:
        if file.suffix.lower() == ".csv":
            reader = csv.DictReader(io.StringIO(read_text(file, MAX_JSON_BYTES, root), newline=""))
            rows: list[tuple[str, Any]] = [(f"{file.name}, line {reader.line_num}", row) for row in reader]
        else:
            is_table = file.suffix.lower() == ".parquet"
            found = (
                read_table(file, _COLUMNS.__contains__, root=root).to_pylist() if is_table else json_objects(file, root)
            )
            rows = [(f"{file.name}, row {number}", row) for number, row in enumerate(found, start=1)]
        if len(rows) > MAX_ROWS:
            raise ValueError(f"it has {len(rows):,} rows, at most {MAX_ROWS:,} are read")
        named = []
        for where, row in rows:
            mine: dict[str, Any] = {}
            for column, name in _COLUMNS.items():
                if column in row:
                    mine.setdefault(name, row[column])
            if "file_name" not in mine:
                raise ValueError(f"{where}: {_NAMELESS}, got {', '.join(map(str, row))[:200]}")
            named.append((where, mine))
    except (*DAMAGES, csv.Error) as error:
        raise UsageError(f"{file} cannot be read: {type(error).__name__}: {error}", _FIX) from error
    return named
