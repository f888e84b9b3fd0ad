"""Rows of judges (`bench.json`): read, matched to a judge, and compared with figures of runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlvlm.core.errors import UsageError
from rlvlm.core.foreign import read_json
from rlvlm.judge_bench.figures import Figures

ROW_FILE = "bench.json"
PAIR_NAMES = {
    "accuracy": "accuracy on decided pairs",
    "undecided": "undecided",
    "unread": "unread pairs",
    "said_left": "said left",
    "consistent": "label swaps with the order",
    "ece": "calibration error of pairs",
}
"""Figures of pairs that a bench and a run's labels have in common, with their names in tables."""
SCORE_NAMES = {
    "auc": "AUC of success",
    "ece": "calibration error of scores",
    "false_positives": "failures called successes",
}
"""Figures of scores that a bench and a run's labels have in common, with their names in tables."""


def read_row(path: Path) -> dict[str, Any]:
    """Reads the row in a file or folder.

    Raises:
        UsageError: there is no readable row.
    """
    file = path / ROW_FILE if path.is_dir() else path
    try:
        row = read_json(file)
        if not all(name in row for name in ("bench", "judge", "figures", "tasks", "manifest")):
            raise ValueError("it lacks parts of a row")
        is_of(row, "", "")
        for task, kind in [(task, kind) for task in (*row["tasks"], "") for kind in ("pairs", "scores")]:
            figures = task_figures(row, task, kind)
            beside(kind, figures, figures)  # a malformed figure raises here, and not half way through a report
    except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise UsageError(f"{file} is not a row of judge-bench: {error}", "make one with `rlvlm judge-bench`") from error
    return row


def is_of(row: Mapping[str, Any], judge: str, prompt: str) -> bool:
    """Returns whether a row belongs to a stamp's judge and prompt; references and numeric teachers have no prompt."""
    nothing = ("", "none")
    ours, theirs = row["judge"]["prompt"], prompt
    return row["judge"]["judge"] == judge and (ours == theirs or (ours in nothing and theirs in nothing))


def task_figures(row: Mapping[str, Any], task: str, kind: str) -> Figures:
    """Returns the figures of `kind` (pairs or scores) on a task, or on all together if it was not asked about the task.

    Empty if nothing of that kind was asked.
    """
    figures = dict(row["tasks"].get(task, row["figures"])[kind])
    # a table of runs has room for one number, and runs show no controls
    if kind == "scores":
        figures["false_positives"] = figures.get("false_positives", {}).get("all cases")
    return figures


def beside(kind: str, run: Mapping[str, Any], bench: Mapping[str, Any]) -> list[list[str]]:
    """Returns rows of a table: name, value in a run, value in the bench; rows unknown to both are left out."""
    names = PAIR_NAMES if kind == "pairs" else SCORE_NAMES
    rows = []
    for key, name in names.items():
        cell = share_cell if key in _SHARES else number_cell
        both = [cell(run.get(key)), cell(bench.get(key))]
        rows += [[name, *both]] if set(both) != {"-"} else []
    return rows


_SHARES = ("accuracy", "undecided", "unread", "said_left", "consistent", "false_positives")


def share_cell(figure: Mapping[str, Any] | float | None) -> str:
    """Returns a share in percent, with its interval if it has one; `-` for None."""
    if not isinstance(figure, Mapping):
        return "-" if figure is None else f"{100 * figure:.1f} %"
    return f"{100 * figure['value']:.1f} % ({100 * figure['low']:.0f} to {100 * figure['high']:.0f})"


def number_cell(figure: Mapping[str, Any] | float | None, digits: int = 2) -> str:
    """Returns a number, with its interval if it has one; `-` for None."""
    if figure is None or figure == {}:
        return "-"
    if isinstance(figure, Mapping):
        return f"{figure['value']:.{digits}f} ({figure['low']:.{digits}f} to {figure['high']:.{digits}f})"
    return f"{figure:.{digits}f}"
