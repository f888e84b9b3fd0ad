"""`rlvlm judge-bench compare`: the rows of several judges side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlvlm.core.console.tables import plain_console, plain_table
from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.judge_bench.rows import read_row
from rlvlm.pages.bench import TASK_HEADS, judge_name, task_lines
from rlvlm.pages.judge import cells, figure_tables

_TOLERANCE = 3.0
"""Tolerated difference in grey levels between two machines' fields: renderers round and smooth differently."""


def compare_benches(paths: Sequence[Path]) -> int:
    """Prints the rows of several judges side by side, and returns the exit code.

    Figures over all tasks are shown only if all judges were asked about the same tasks; then come those of each common
    task. `paths` are rows, or folders with one.

    Raises:
        UsageError: a file is no row.
    """
    rows = list(map(_printable, paths))
    if len(rows) < 2:
        raise UsageError("name at least two rows", "rlvlm judge-bench compare A/bench.json B/bench.json")
    console = plain_console(soft_wrap=True)
    for path, row in zip(paths[1:], rows[1:], strict=True):
        for line in differences(rows[0], row):
            console.print(f"{path} against {paths[0]}: {line}")
    # a figure over all tasks means nothing if one judge was asked about easier ones
    common = [task for task in rows[0]["tasks"] if all(task in row["tasks"] for row in rows)]
    if all(row["tasks"].keys() == rows[0]["tasks"].keys() for row in rows):
        named = {f"{judge_name(row)[:40]} [{number}]": row for number, row in enumerate(rows, start=1)}
        for table in figure_tables(named):
            console.print(plain_table(table.heads, table.rows, words=table.heads[:1]))
    elif not common:
        console.print("they have no task in common")
    by_task = [{task: figures for task, *figures in task_lines(row)} for row in rows]
    lines = [(task, f"[{number}]", *of[task]) for task in common for number, of in enumerate(by_task, start=1)]
    if lines:
        console.print(plain_table(("task", "judge", *TASK_HEADS), lines, words=("task", "judge")))
    for number, row in enumerate(rows, start=1):
        said = "; ".join(fault["name"] for fault in row["faults"]) or "no fault found"
        console.print(f"[{number}] {judge_name(row)}, {row['bench']['suite']}: {said}")
    return EXIT_DONE


def _printable(path: Path) -> Mapping[str, Any]:
    """Reads the row in a file or folder; raises UsageError if it cannot be read, or lacks a printed part."""
    row = read_row(path)
    try:
        shown = cells(row), task_lines(row), judge_name(row), differences(row, row), f"{row['bench']['suite']}"
        if not (shown and all(isinstance(fault["name"], str) for fault in row["faults"])):
            raise TypeError("a fault has no name")
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise UsageError(
            f"{path} is not a row of judge-bench: {error!r}", "make one with `rlvlm judge-bench`"
        ) from error
    return row


def differences(row: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Returns the differences in items between two rows, in words; empty if they agree, images within a tolerance."""
    found = []
    ours, theirs = row["manifest"], other["manifest"]
    if ours.keys() != theirs.keys():
        found.append(f"other tasks ({', '.join(sorted(ours.keys() ^ theirs.keys()))})")
    changed = [task for task in ours if task in theirs and ours[task]["digest"] != theirs[task]["digest"]]
    if changed:
        found.append(f"other items of {', '.join(changed)}: another number, form of score, seed, version or machine")
    for task in ours:
        if task in theirs and task not in changed:
            # items agree exactly; images only approximately, as each machine draws its own
            looks = np.array(ours[task]["looks"], float), np.array(theirs[task]["looks"], float)
            if looks[0].shape != looks[1].shape or (looks[0].size and np.abs(looks[0] - looks[1]).max() > _TOLERANCE):
                found.append(f"other images of {task}: another size, look or renderer")
    for name in ("frames", "score"):
        if row["bench"][name] != other["bench"][name]:
            found.append(f"{name} {other['bench'][name]} and not {row['bench'][name]}")
    return found
