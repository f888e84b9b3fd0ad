"""A judge's labels of recorded episodes as one Parquet file with the digest of its data; and as the progress table by
which LeRobot weights its examples.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

from rlvlm.core.errors import UsageError
from rlvlm.core.foreign import open_regular
from rlvlm.core.steps import FloatArray
from rlvlm.demonstrations.tables import DAMAGES, read_table
from rlvlm.labels.export import write_parquet

_WHAT, _SCHEMA = "rlvlm labels of recorded data", 1
_STAMP = [("judge", pa.string()), ("revision", pa.string()), ("prompt", pa.string()), ("decoding", pa.string())]
COLUMNS = pa.schema(
    [
        ("episode", pa.int64()),
        ("name", pa.string()),
        ("frame", pa.int64()),
        ("goal", pa.string()),
        ("progress", pa.float32()),
        ("success", pa.float32()),
        ("value", pa.float32()),
        ("upper_value", pa.float32()),
        ("corrected", pa.float32()),
        ("status", pa.string()),
        *_STAMP,
    ]
)
"""Columns of the labels; each row is one answer. For a frame it has `progress` in [0, 1]; for an episode `success` in
[0, 1], and no frame. `value` is the learned probability of success at a frame, `upper_value` its upper expectile, and
`value` of an episode the outcome that these were learned from; they are empty without `--value`. `corrected` is 1 where
a person had taken over, 0 where none had, and empty if the data do not say. `status` is the judge's (ok, invalid,
failed), `unreadable` if there was nothing to show, or empty if nothing was asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedLabels:
    """Contents of a file of labels."""

    dataset: str
    """`recordings_digest` of the data that were labelled."""
    judge: str
    """Name and prompt of the judge."""
    progress: Mapping[tuple[int, int], float]
    """Progress by episode and frame; unreadable answers are left out."""
    success: Mapping[int, float]
    """Success by episode; unreadable answers are left out."""
    values: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Learned probability of success by episode and frame; empty where none was learned."""
    upper_values: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Its upper expectile, likewise."""
    outcomes: Mapping[int, float] = field(default_factory=dict)
    """Outcome that these were learned from, by episode."""
    corrected: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """1 where a person had taken over, else 0, by episode and frame; empty if the data do not say."""


def write_labels(file: Path, dataset: str, rows: Iterable[Mapping[str, Any]], columns: pa.Schema = COLUMNS) -> int:
    """Writes a row for each answer and returns their number; raises as `write_parquet` does.

    Args:
        file: path of the file; replaced if it exists.
        dataset: `recordings_digest` of the data.
        rows: rows with the keys of `columns`.
        columns: `COLUMNS`, or those of `rlvlm.labels.export.SCHEMA`.
    """
    meta = json.dumps({"what": _WHAT, "schema": _SCHEMA, "dataset": dataset})
    return write_parquet(file, columns.with_metadata({"rlvlm": meta}), rows)


def read_labels(file: Path, dataset: str, *others: str) -> RecordedLabels:
    """Returns the labels in a file written by `write_labels`. Untrusted.

    Args:
        file: path of the labels.
        dataset: `recordings_digest` of the data to be labelled.
        others: further digests that it may be about, such as those of the data that were imported.

    Raises:
        UsageError: it is not such a file, is about other data, or has two labels for one frame or episode.
    """
    try:
        with open_regular(file) as stream:
            meta = json.loads((pq.read_schema(stream).metadata or {})[b"rlvlm"])
        if meta["what"] != _WHAT or meta["schema"] != _SCHEMA:
            raise ValueError(f"it says it is {meta['what']!r}, schema {meta['schema']!r}")
        rows = read_table(file, COLUMNS.names.__contains__).to_pylist()
        frames = [row for row in rows if row["frame"] is not None]
        wholes = [row for row in rows if row["frame"] is None]
        progress, values, upper, corrected = (
            _by_key(((row["episode"], row["frame"]), row.get(name)) for row in frames)
            for name in ("progress", "value", "upper_value", "corrected")
        )
        success, outcomes = (
            _by_key((row["episode"], row.get(name)) for row in wholes) for name in ("success", "value")
        )
        judge = next((" ".join(filter(None, (row["judge"], row["prompt"]))) for row in rows), "nobody")
    except DAMAGES as error:
        what = f"{file} is no file of labels that can be used: {type(error).__name__}: {error}"
        raise UsageError(what, "name the labels.parquet of `rlvlm score`") from error
    if meta["dataset"] not in (dataset, *others):
        raise UsageError(
            f"{file} has labels of other data: it names {str(meta['dataset'])[:12]}, and these are {dataset[:12]}; "
            "an episode may have been added, removed, moved or changed",
            "score these data anew: rlvlm score",
        )
    return RecordedLabels(
        dataset=meta["dataset"], judge=judge, progress=progress, success=success,
        values=values, upper_values=upper, outcomes=outcomes, corrected=corrected,
    )  # fmt: skip


def _by_key(labels: Iterable[tuple[Any, float | None]]) -> dict[Any, float]:
    """Returns the labels that are numbers in [0, 1], by key.

    Raises:
        ValueError: two labels share a key, or one is out of range.
    """
    found: dict[Any, float | None] = {}
    for key, value in labels:
        if key in found:
            raise ValueError(f"two labels for one {'frame' if isinstance(key, tuple) else 'episode'}: {key}")
        found[key] = value
    known = {key: value for key, value in found.items() if value is not None and not math.isnan(value)}
    if not all(0 <= value <= 1 for value in known.values()):
        raise ValueError("a label is in [0, 1]")
    return known


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeProgress:
    """An episode of a LeRobot data set, with the progress of some of its frames."""

    episode: int
    """LeRobot's `episode_index`."""
    indices: NDArray[np.int64]
    """[T] LeRobot's `index` of each frame."""
    frames: NDArray[np.int64]
    """[n] frames that were judged, in order; n may be 0."""
    progress: FloatArray
    """[n] progress in [0, 1], NaN for unreadable answers."""


_LEROBOT = pa.schema(
    [
        ("index", pa.int64()),
        ("episode_index", pa.int64()),
        ("frame_index", pa.int64()),
        ("progress_sparse", pa.float32()),
    ]
)


def write_lerobot_progress(file: Path, episodes: Iterable[EpisodeProgress], dataset: str, judge: str) -> int:
    """Writes a row for each frame of a data set, as in LeRobot's `*_progress.parquet`; returns their number.

    Frames between two answers get interpolated progress; frames before the first and after the last have none (NaN),
    which LeRobot's weighting treats as unknown.

    Args:
        file: path of the file; replaced if it exists.
        episodes: all episodes of the data set, in order.
        dataset: `recordings_digest`, stored in the file; LeRobot ignores it.
        judge: name of the judge, stored where LeRobot puts the path of its reward model.

    Source: LeRobot 0.4.4, `policies/sarm/compute_rabc_weights.py` (columns) and `utils/rabc.py` (what is read).
    """
    meta = {"reward_model_path": judge, "rlvlm": json.dumps({"dataset": dataset})}
    return write_parquet(file, _LEROBOT.with_metadata(meta), _frame_rows(episodes, "progress_sparse"))


def _frame_rows(episodes: Iterable[EpisodeProgress], name: str) -> Iterable[dict[str, Any]]:
    """Yields a row for each frame, with its progress as the column `name`."""
    for episode in episodes:
        curve = filled(np.arange(len(episode.indices)), episode.frames, episode.progress)
        for frame, (index, value) in enumerate(zip(episode.indices.tolist(), curve.tolist(), strict=True)):
            yield {"index": index, "episode_index": episode.episode, "frame_index": frame, name: value}


def filled(wanted: NDArray[np.int64], frames: ArrayLike, progress: ArrayLike) -> NDArray[np.float64]:
    """Returns [T], progress at the frames `wanted`: linearly interpolated between those that are known, elsewhere NaN.

    Args:
        wanted: [T] frames.
        frames: [n] frames that were judged, in order.
        progress: [n] their progress, NaN for unreadable answers.
    """
    frames, progress = np.asarray(frames), np.asarray(progress, np.float64)
    is_known = np.isfinite(progress)
    if not is_known.any():
        return np.full(len(wanted), np.nan)
    return np.interp(wanted, frames[is_known], progress[is_known], left=np.nan, right=np.nan)


_SIGNALS = pa.schema(
    [("index", pa.int64()), ("episode_index", pa.int64()), ("frame_index", pa.int64()), ("progress", pa.float32())]
)
_SIGNAL = {
    "description": "share of the task that is done, as judged; linear between the frames that were asked about",
    "direction": "higher",
    "bounds": [0.0, 1.0],
    "unit": None,
    "comparison_scope": "task",
    "allow_nan": True,
}


def write_frame_signals(file: Path, episodes: Sequence[EpisodeProgress], provenance: Mapping[str, str]) -> int:
    """Writes a row for each frame of a data set as `lerobot.frame_signals`, version 1; returns their number.

    Args:
        file: path of the file; replaced if it exists.
        episodes: all episodes of the data set, in order; see `write_lerobot_progress` about frames without answer.
        provenance: where the signal comes from, by name.

    Source: an open pull request, LeRobot 4554 at b7d78b49 (`rewards/scoring/schema.py`), which may still change.
    """
    about = {
        "provenance": dict(provenance),
        "descriptors": {"progress": _SIGNAL},
        "episode_indices": sorted(episode.episode for episode in episodes),
    }
    meta = {name: json.dumps(value, sort_keys=True, separators=(",", ":")) for name, value in about.items()}
    meta |= {"format": "lerobot.frame_signals", "schema_version": "1"}
    named = {f"lerobot.reward_scoring.{name}": value for name, value in meta.items()}
    return write_parquet(file, _SIGNALS.with_metadata(named), _frame_rows(episodes, "progress"))
