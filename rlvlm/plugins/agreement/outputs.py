"""Per-frame outputs of judges as others write them: a CSV, or roboreason's files. All input is untrusted."""

import csv
import io
import math
from pathlib import Path
from typing import Literal

import numpy as np

from rlvlm.core.errors import UsageError
from rlvlm.core.foreign import MAX_JSON_BYTES, files_ending, read_json, read_text

Form = Literal["csv", "roboreason"]
Outputs = dict[tuple[str, int], dict[str, float]]
"""Values in [0, 1] by judge of each frame (episode, index) that a judge was asked about."""
FULL: dict[Form, float] = {"csv": 1.0, "roboreason": 100.0}
"""Value of a finished task, by form, unless it is said."""
_COLUMNS = ("episode", "frame", "judge", "value")
_DAMAGES = (OSError, ValueError, KeyError, TypeError, AttributeError, csv.Error)


def read_outputs(path: Path, form: Form, full: float | None = None) -> Outputs:
    """Returns the answers of all judges, in the order of episodes and frames.

    Args:
        path: csv: a file with the columns episode, frame, judge, value. roboreason: a folder of JSON files, one an
            episode, each a list of `{"model": NAME, "rewards": [T values]}`.
        form: see `path`.
        full: value of a finished task, in the file's own unit; None takes `FULL`.

    Raises:
        UsageError: it cannot be read, or a value is not in [0, full].
    """
    full = FULL[form] if full is None else full
    try:
        found = _from_csv(path) if form == "csv" else _from_roboreason(path)
    except _DAMAGES as error:
        what = f"{path} cannot be read as {form}: {type(error).__name__}: {error}"
        raise UsageError(what, f"a CSV has the columns {', '.join(_COLUMNS)}; see docs/labels.md") from error
    values = [value for frame in found.values() for value in frame.values()]
    if values and not 0 <= min(values) <= max(values) <= full:
        what = f"{path} has values from {min(values):g} to {max(values):g}, and a finished task is {full:g}"
        raise UsageError(what, "name the value of a finished task: --full 100; all judges share the scale from 0 to it")
    return {frame: {judge: v / full for judge, v in found[frame].items()} for frame in sorted(found)}


def asked_frames(curves: list[np.ndarray]) -> list[int]:
    """Returns the frames [K] at which judges were asked whose values in between were drawn as straight lines.

    Args:
        curves: [T] of each judge on one episode. All were asked at the same distance, which is the greatest that every
            bend of a curve is a multiple of, and at the last frame.
    """
    length = len(curves[0])
    bends = [np.flatnonzero(np.abs(np.diff(curve, 2)) > 1e-6 * max(1.0, np.abs(curve).max())) + 1 for curve in curves]
    distance = math.gcd(*map(int, np.concatenate(bends))) or max(length - 1, 1)
    return sorted({*range(0, length, distance), length - 1})


def _from_csv(path: Path) -> Outputs:
    found: Outputs = {}
    for row in csv.DictReader(io.StringIO(read_text(path), newline="")):
        values = found.setdefault((row["episode"], int(row["frame"])), {})
        value = float(row["value"])
        if not math.isfinite(value) or row["judge"] in values:
            raise ValueError(f"{row['judge']} has no finite value, or two, of {row['episode']}, frame {row['frame']}")
        values[row["judge"]] = value
    return found


def _from_roboreason(path: Path) -> Outputs:
    found: Outputs = {}
    for file in files_ending(path, ".json"):
        rows = read_json(file, MAX_JSON_BYTES, path)
        curves = {str(row["model"]): np.asarray(row["rewards"], float) for row in rows}
        lengths = {len(curve) for curve in curves.values()}
        if len(lengths) != 1 or not lengths - {0} or not all(np.isfinite(curve).all() for curve in curves.values()):
            raise ValueError(f"{file.name}: its judges have no values, or not the same number")
        for frame in asked_frames(list(curves.values())):
            found[file.stem, frame] = {judge: float(curve[frame]) for judge, curve in curves.items()}
    return found
