"""Export of episodes in chunks as a data set of LeRobot's, version 3.0: one row per env step, with an image of each
camera before its action. `lerobot_data.py` reads such data sets.
"""

import io
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from rlvlm.core.disk import replace_folder, write_json
from rlvlm.core.errors import UsageError
from rlvlm.core.grippers import OPENNESS, GripperUnits
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.demonstrations.card import FilterConfig, select
from rlvlm.demonstrations.chunk_form import folder_form, is_whole, kept_images
from rlvlm.demonstrations.folder import DemonstrationFolder
from rlvlm.demonstrations.records import EpisodeRecord
from rlvlm.envs.env import ChunkEnv

_DATA, _EPISODES = "data/chunk-{0:03d}/file-{1:03d}.parquet", "meta/episodes/chunk-{0:03d}/file-{1:03d}.parquet"
_FILES_PER_CHUNK, _FILE_BYTES = 1000, 100 * 2**20
_QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
_SAME = 1e-3  # tolerance of a state that is played again
_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """T env steps of an episode."""

    actions: FloatArray
    """[T, A] in the exported units."""
    states: FloatArray
    """[T, P] proprioception before each action."""
    images: Frames
    """[T, cameras, H, W, 3] before each action."""
    goals: list[str]
    """[T] instructions."""


def export_lerobot(  # noqa: PLR0913 - all that a data set depends on
    folder: DemonstrationFolder,
    out: Path,
    env: ChunkEnv,
    config: FilterConfig,
    *,
    gripper: GripperUnits | None = None,
    image_px: int = 256,
    fps: int = 20,
) -> tuple[int, Counter[str]]:
    """Writes the episodes that pass the filter; returns their number, and the others by reason.

    Episodes that keep images are written as they are, if every step begins a chunk. Others are played again from their
    first state, an action at a time, and left out if they then come to other states.

    Args:
        folder: demonstrations in chunks.
        out: folder of the data set; new or empty.
        env: env of the task, with the settings of the folder.
        config: filter; of chunks, whole episodes are left out.
        gripper: units of the gripper in the data set; None: those of the imported data, else LIBERO's, in which LeRobot
            has its own.
        image_px: side of drawn images, pixels.
        fps: env steps per second.

    Raises:
        UsageError: the folder cannot be written in this form, or nothing of it passes.
        OSError: writing failed.
    """
    form = folder_form(folder)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there already, and not empty", "name a new folder with --out")
    said: Any = folder.chunks.get("gripper")
    units: GripperUnits = gripper or (said if said in OPENNESS else "minus_one_opens")
    factor, offset = OPENNESS[units]
    is_gripper = ~np.array(env.scaled_actions) & (env.action_low == 0) & (env.action_high == 1)
    names = {
        "action": [f"gripper_{units}" if held else f"action_{index}" for index, held in enumerate(is_gripper)],
        "observation.state": [f"state_{index}" for index in range(form.proprio_size)],
    }
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        writer, reasons = _Writer(partial, form.cameras, fps), Counter[str]()
        for record in folder.episodes():
            kept, left_out = select([record], config)
            reasons += left_out
            if not kept:
                continue
            rows = "damaged" if not is_whole(record, form) else _rows(folder, record, env, image_px)
            if isinstance(rows, str):
                reasons[rows] += 1
                continue
            actions = np.where(is_gripper, (rows.actions - offset) / factor, rows.actions).astype(np.float32)
            writer.add(replace(rows, actions=actions), record.success)
        if not writer.episodes:
            told = "; ".join(f"{number:,}: {reason}" for reason, number in reasons.most_common()) or "it is empty"
            raise UsageError(f"no episode of {folder.path} can be written ({told})", "collect or import others")
        writer.finish(names)
        replace_folder(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return len(writer.episodes), reasons


def _rows(folder: DemonstrationFolder, record: EpisodeRecord, env: ChunkEnv, image_px: int) -> _Rows | str:
    """Returns the steps of an episode in the env's units, or why they cannot be told."""
    arrays = record.arrays
    chunks, length = arrays["actions"], arrays["actions"].shape[1]
    steps = np.minimum(arrays.get("steps", np.full(len(chunks), length)), length).tolist()
    if "pictures" in arrays:
        if set(steps) != {1}:
            raise UsageError(
                f"{folder.path} keeps images of the steps that begin chunks, and LeRobot has one of every step",
                "import the data with --cut.stride 1",
            )
        goals = arrays.get("goals", np.array([record.goal] * len(chunks))).tolist()
        images = kept_images(folder, record)
        return _Rows(actions=chunks[:, 0], states=arrays["proprio"], images=images, goals=goals)
    obs, _ = env.reset_to(record.seed)
    actions, states, snapshots = [], [], []
    for chunk, count, start in zip(chunks, steps, arrays["snapshots"], strict=False):
        if np.abs(obs.snapshots[0] - start).max() > _SAME:
            return "comes to other states when it is played again"
        for action in chunk[:count]:
            actions.append(action)
            states.append(obs.proprio[0])
            snapshots.append(obs.snapshots[0])
            obs = env.step(action[None])[0]
    images = env.draw_cameras(np.stack(snapshots), image_px)
    goals = [record.goal] * len(actions)
    return _Rows(actions=np.stack(actions), states=np.stack(states), images=images, goals=goals)


class _Writer:
    """Writes the files of a data set, one episode after the other.

    Args:
        root: its empty folder.
        cameras: names of its cameras.
        fps: rows per second.
    """

    def __init__(self, root: Path, cameras: Iterable[str], fps: int) -> None:
        self._root, self._fps = root, fps
        self._cameras = [f"observation.images.{camera}" for camera in cameras]
        self.episodes: list[dict[str, Any]] = []
        """Rows of `meta/episodes`."""
        self._tasks: dict[str, int] = {}
        self._numbers: dict[str, list[np.ndarray]] = {}
        self._histograms = np.zeros((len(self._cameras), 3, 256), np.int64)
        self._num_rows, self._file = 0, -1
        self._side = (0, 0)
        self._writer: pq.ParquetWriter | None = None

    def add(self, rows: _Rows, success: bool) -> None:
        """Writes the rows of an episode."""
        num, number = len(rows.actions), len(self.episodes)
        tasks = [self._tasks.setdefault(goal, len(self._tasks)) for goal in rows.goals]
        is_last = np.arange(num) == num - 1
        numbers: dict[str, np.ndarray] = {
            "action": rows.actions.astype(np.float32),
            "observation.state": rows.states.astype(np.float32),
            "next.success": is_last & success,
            "next.done": is_last,
            "timestamp": (np.arange(num) / self._fps).astype(np.float32),
            "frame_index": np.arange(num),
            "episode_index": np.full(num, number),
            "index": self._num_rows + np.arange(num),
            "task_index": np.array(tasks),
        }
        columns = {name: _column(values) for name, values in numbers.items()}
        shown = [rows.images[:, camera] for camera in range(len(self._cameras))]
        for name, images in zip(self._cameras, shown, strict=True):
            columns[name] = pa.array([{"bytes": _png(image), "path": None} for image in images], _IMAGE)
        table = pa.table(columns)
        if self._writer is None or (self._root / self._path(_DATA)).stat().st_size > _FILE_BYTES:
            self._next_file(table.schema)
        assert self._writer is not None, "one was opened"
        self._writer.write_table(table)
        histograms = np.stack([_histogram(images) for images in shown])
        about = _statistics(numbers) | _image_statistics(dict(zip(self._cameras, histograms, strict=True)))
        place = dict(zip(("chunk_index", "file_index"), divmod(self._file, _FILES_PER_CHUNK), strict=True))
        self.episodes.append(
            {"episode_index": number, "tasks": list(dict.fromkeys(rows.goals)), "length": num}
            | {f"data/{name}": index for name, index in place.items()}
            | {"dataset_from_index": self._num_rows, "dataset_to_index": self._num_rows + num}
            | {f"stats/{name}/{key}": value for name, found in about.items() for key, value in found.items()}
            | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
        )
        for name, values in numbers.items():
            self._numbers.setdefault(name, []).append(values)
        self._histograms += histograms
        self._num_rows += num
        self._side = rows.images.shape[2:4]

    def finish(self, names: Mapping[str, list[str]]) -> None:
        """Writes `meta/`; `names` of the numbers by feature."""
        assert self._writer is not None, "there is an episode"
        self._writer.close()
        numbers = {name: np.concatenate(parts) for name, parts in self._numbers.items()}
        file = self._root / _EPISODES.format(0, 0)
        file.parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(self.episodes), file)
        # LeRobot reads it with pandas, whose index holds the instructions
        column = {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object"}
        index = {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"}
        about = {"index_columns": ["task"], "column_indexes": [], "columns": [index, column]}
        tasks = pa.table({"task_index": list(self._tasks.values()), "task": list(self._tasks)})
        pq.write_table(tasks.replace_schema_metadata({"pandas": json.dumps(about)}), self._root / "meta/tasks.parquet")
        histograms = dict(zip(self._cameras, self._histograms, strict=True))
        write_json(self._root / "meta/stats.json", _statistics(numbers) | _image_statistics(histograms))
        image = {"dtype": "image", "shape": [*self._side, 3], "names": ["height", "width", "channels"]}
        features = {
            name: {"dtype": str(values.dtype), "shape": list(values.shape[1:] or [1]), "names": names.get(name)}
            for name, values in numbers.items()
        }
        info = {
            "codebase_version": "v3.0",
            "robot_type": None,
            "fps": self._fps,
            "features": features | dict.fromkeys(self._cameras, image),
            "total_episodes": len(self.episodes),
            "total_frames": self._num_rows,
            "total_tasks": len(self._tasks),
            "chunks_size": _FILES_PER_CHUNK,
            "data_files_size_in_mb": _FILE_BYTES // 2**20,
            "video_files_size_in_mb": 200,
            "data_path": _DATA.replace("{0:", "{chunk_index:").replace("{1:", "{file_index:"),
            "video_path": None,
            "splits": {"train": f"0:{len(self.episodes)}"},
        }
        write_json(self._root / "meta/info.json", info)

    def _path(self, template: str) -> str:
        return template.format(*divmod(self._file, _FILES_PER_CHUNK))

    def _next_file(self, schema: pa.Schema) -> None:
        if self._writer is not None:
            self._writer.close()
        self._file += 1
        file = self._root / self._path(_DATA)
        file.parent.mkdir(parents=True, exist_ok=True)
        self._writer = pq.ParquetWriter(file, schema)


def _column(values: NDArray[Any]) -> pa.Array:
    """Returns [T] numbers, or [T, N] lists of N."""
    flat = pa.array(values.ravel())
    return flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _png(image: NDArray[np.uint8]) -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(data, "png")
    return data.getvalue()


def _histogram(images: Frames) -> NDArray[np.int64]:
    """Returns [3, 256], how often each channel of the images [T, H, W, 3] has each value."""
    return np.stack([np.bincount(images[..., channel].ravel(), minlength=256) for channel in range(3)])


def _statistics(numbers: Mapping[str, np.ndarray]) -> dict[str, dict[str, list[Any]]]:
    """Returns LeRobot's statistics of each feature [T] or [T, N], lists of N."""
    found = {}
    for name, values in numbers.items():
        rows = values.reshape(len(values), -1).astype(np.float64)
        about = {key: getattr(rows, key)(axis=0) for key in ("min", "max", "mean", "std")}
        about |= {key: np.quantile(rows, share, axis=0) for key, share in _QUANTILES.items()}
        found[name] = {key: value.tolist() for key, value in about.items()} | {"count": [len(rows)]}
    return found


def _image_statistics(histograms: Mapping[str, NDArray[np.int64]]) -> dict[str, dict[str, list[Any]]]:
    """Returns LeRobot's statistics of each camera, whose images are in [0, 1]: lists of [[one number]] per channel."""
    levels, found = np.arange(256) / 255, {}
    for name, counts in histograms.items():
        total = counts.sum(axis=1)
        mean = counts @ levels / total
        about = {"mean": mean, "std": np.sqrt(np.maximum(counts @ levels**2 / total - mean**2, 0))}
        shares = {"min": 0.0, "max": 1.0} | _QUANTILES
        for key, share in shares.items():
            wanted = np.maximum(np.ceil(share * total), 1)
            about[key] = levels[(counts.cumsum(axis=1) >= wanted[:, None]).argmax(axis=1)]
        found[name] = {key: value[:, None, None].tolist() for key, value in about.items()} | {"count": [int(total[0])]}
    return found
