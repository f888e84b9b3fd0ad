"""Files that grow by whole rows: CSV tables and JSON lines, safe against truncation, and cut exactly on resume."""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvlm.core.disk import append_whole, write_whole
from rlvlm.core.errors import UsageError

MAX_CELL = 100_000
"""Maximum characters of a text: a server may answer without end, and Python's csv refuses to read cells above
131,072."""


class CsvTable:
    """A CSV file with fixed columns, one line per row.

    Args:
        path: path of the file; created with its header at the first row.
        columns: the names of the columns, in order.
        step_columns: columns that may contain the row's env step; the first non-empty one counts.
    """

    def __init__(self, path: Path, columns: Sequence[str], *step_columns: str) -> None:
        self.path = path
        self.columns = tuple(columns)
        self.step_columns = step_columns

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        r"""Appends whole rows in one write. None becomes an empty cell; line breaks in text become `\n`, and text
        beyond `MAX_CELL` is cut off.

        Raises:
            ValueError: a row has a column that the table does not have.
        """
        # one write per batch of rows: a crash truncates at most the last line, which readers ignore
        append_whole(self.path, self._lines(rows, has_header=not self.path.exists()))

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replaces the whole table by these rows, atomically; cells and errors as in `append`."""
        write_whole(self.path, self._lines(rows, has_header=True))

    def read(self) -> list[dict[str, str]]:
        """Returns all whole rows, as text."""
        if not self.path.exists():
            return []
        return list(csv.DictReader(_whole_lines(self.path)))

    def cut(self, last_step: int) -> None:
        """Drops rows of later steps than `last_step`, and a truncated last line."""
        # rewritten as a whole: a table that was cut is identical to one that never went further
        rows = [row for row in self.read() if _step_of(row, self.step_columns) <= last_step]
        if rows:
            self.write(rows)
        else:
            self.path.unlink(missing_ok=True)

    def _lines(self, rows: Iterable[Mapping[str, Any]], *, has_header: bool) -> bytes:
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        if has_header:
            writer.writeheader()
        for row in rows:
            writer.writerow({key: _cell(value) for key, value in row.items()})
        # a model may write half of a surrogate pair, which has no UTF-8
        return text.getvalue().encode(errors="replace")


class JsonLines:
    """A file with one JSON object per line, each with its env step.

    Args:
        path: path of the file.
        step_keys: keys that may contain the env step; the first that exists counts.
    """

    def __init__(self, path: Path, *step_keys: str) -> None:
        self.path = path
        self.step_keys = step_keys

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends whole lines in one write. Numbers must be finite: JSON has no others."""
        append_whole(self.path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode())

    def read(self) -> list[dict[str, Any]]:
        """Returns all whole lines.

        Raises:
            UsageError: one is corrupt.
        """
        try:
            return [json.loads(line) for line in _whole_lines(self.path)] if self.path.exists() else []
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{self.path} is damaged: {error}", "restore it from a copy, or remove it") from error

    def cut(self, last_step: int) -> None:
        """Drops lines of later steps than `last_step`, and a truncated last line."""
        if self.path.exists():
            # rewritten from the parsed values: Python's floats are written with the same digits
            kept = [row for row in self.read() if _step_of(row, self.step_keys) <= last_step]
            write_whole(self.path, "".join(json.dumps(row) + "\n" for row in kept))


def _step_of(row: Mapping[str, Any], names: Sequence[str]) -> int:
    # an older rlvlm did not write this column
    return next(int(row[name]) for name in names if row.get(name) not in (None, ""))


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return value.replace("\r", "").replace("\n", "\\n")[:MAX_CELL]
    return "" if value is None else value


def _whole_lines(path: Path) -> list[str]:
    """Returns the lines that end with a line break; a tail without one was truncated by a crash."""
    text = path.read_bytes().decode(errors="replace")
    # Not str.splitlines, which also splits at other characters that a judge's text may contain.
    return text.split("\n")[:-1]
