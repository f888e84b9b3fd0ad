"""A judge's labels of recorded episodes as one Parquet file, which says which data they are of; and as the table of
progress that LeRobot weights its examples by.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rlvlm.core.errors import UsageError
from rlvlm.core.foreign import open_regular
from rlvlm.core.steps import FloatArray
from rlvlm.demonstrations.lerobot import DAMAGES, read_table
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
        ("status", pa.string()),
        *_STAMP,
    ]
)
"""A row is one answer. Of a frame it has `progress` in [0, 1]; of an episode `success` in [0, 1], and no frame. Its
`status` is a judge's (ok, invalid, failed), or `unreadable` where there was nothing to show."""


PAIR_COLUMNS = pa.schema(
    [
        ("left_episode", pa.int64()),
        ("left_frame", pa.int64()),
        ("right_episode", pa.int64()),
        ("right_frame", pa.int64()),
        ("goal", pa.string()),
        ("label", pa.string()),
        ("status", pa.string()),
        *_STAMP,
    ]
)
"""A row is one comparison as it was shown: `label` is left, right or tie; null where nothing could be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedLabels:
    """What a file of labels holds."""

    judge: str
    """Name and prompt of the judge."""
    progress: Mapping[tuple[int, int], float]
    """By episode and frame; answers that could not be read are left out."""
    success: Mapping[int, float]
    """By episode, likewise."""


def write_labels(file: Path, dataset: str, rows: Iterable[Mapping[str, Any]], columns: pa.Schema = COLUMNS) -> int:
    """Writes a row for each answer and returns how many; raises as `write_parquet` does.

    Args:
        file: replaced where there is one.
        dataset: `recordings_digest` of the data.
        rows: of `columns`.
        columns: `COLUMNS` or `PAIR_COLUMNS`.
    """
    meta = json.dumps({"what": _WHAT, "schema": _SCHEMA, "dataset": dataset})
    return write_parquet(file, columns.with_metadata({"rlvlm": meta}), rows)


def read_labels(file: Path, dataset: str) -> RecordedLabels:
    """The labels in a file that `write_labels` wrote. Untrusted.

    Args:
        file: of the labels.
        dataset: `recordings_digest` of the data that they are wanted for.

    Raises:
        UsageError: it is no such file, is of other data, or has two labels for one frame or episode.
    """
    try:
        with open_regular(file) as stream:
            meta = json.loads((pq.read_schema(stream).metadata or {})[b"rlvlm"])
        if meta["what"] != _WHAT or meta["schema"] != _SCHEMA:
            raise ValueError(f"it says it is {meta['what']!r}, schema {meta['schema']!r}")
        rows = read_table(file, COLUMNS.names.__contains__).to_pylist()
        progress = _by_key(
            ((row["episode"], row["frame"]), row["progress"]) for row in rows if row["frame"] is not None
        )
        success = _by_key((row["episode"], row["success"]) for row in rows if row["frame"] is None)
        judge = next((" ".join(filter(None, (row["judge"], row["prompt"]))) for row in rows), "nobody")
    except DAMAGES as error:
        what = f"{file} is no file of labels that can be used: {type(error).__name__}: {error}"
        raise UsageError(what, "name the labels.parquet of `rlvlm score`") from error
    if meta["dataset"] != dataset:
        raise UsageError(
            f"{file} has labels of other data: it names {str(meta['dataset'])[:12]}, and these are {dataset[:12]}; "
            "an episode may have been added, removed, moved or changed",
            "score these data anew: rlvlm score",
        )
    return RecordedLabels(judge=judge, progress=progress, success=success)


def _by_key(labels: Iterable[tuple[Any, float | None]]) -> dict[Any, float]:
    """The labels that are numbers in [0, 1], by what they are of.

    Raises:
        ValueError: two are of the same, or one is out of range.
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
    """An episode of a LeRobot data set with the progress that some of its frames were given."""

    episode: int
    """LeRobot's `episode_index`."""
    indices: NDArray[np.int64]
    """[T] LeRobot's `index` of each frame."""
    frames: NDArray[np.int64]
    """[n] frames that were asked about, in order; n may be 0."""
    progress: FloatArray
    """[n] in [0, 1], NaN where there is no answer."""


_LEROBOT = pa.schema(
    [
        ("index", pa.int64()),
        ("episode_index", pa.int64()),
        ("frame_index", pa.int64()),
        ("progress_sparse", pa.float32()),
    ]
)


def write_lerobot_progress(file: Path, episodes: Iterable[EpisodeProgress], dataset: str, judge: str) -> int:
    """Writes a row for each frame of a data set, as LeRobot's `*_progress.parquet` has them, and returns how many.

    Frames between two answers have progress between theirs; frames before the first and behind the last have none
    (NaN), which LeRobot's weighting takes for unknown.

    Args:
        file: replaced where there is one.
        episodes: all of the data set, in order.
        dataset: `recordings_digest`, kept with the file; LeRobot does not look at it.
        judge: name of the judge, where LeRobot has the path of its reward model.

    Source: LeRobot 0.4.4, `policies/sarm/compute_rabc_weights.py` (columns) and `utils/rabc.py` (what is read).
    """

    def rows() -> Iterable[dict[str, Any]]:
        for episode in episodes:
            is_known = np.isfinite(episode.progress)
            filled = np.full(len(episode.indices), np.nan)
            if is_known.any():
                places = np.arange(len(filled))
                known = episode.frames[is_known], episode.progress[is_known]
                filled = np.interp(places, *known, left=np.nan, right=np.nan)
            for frame, (index, value) in enumerate(zip(episode.indices.tolist(), filled.tolist(), strict=True)):
                yield {"index": index, "episode_index": episode.episode, "frame_index": frame, "progress_sparse": value}

    meta = {"reward_model_path": judge, "rlvlm": json.dumps({"dataset": dataset})}
    return write_parquet(file, _LEROBOT.with_metadata(meta), rows())
