"""The page of many judges: one sortable table of entries, in one file that loads nothing else."""

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlvlm.core.console.tables import plain_console
from rlvlm.core.disk import write_whole
from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.core.foreign import visible
from rlvlm.plugins.judge_table.checks import doubt_about, read_notes
from rlvlm.plugins.judge_table.entries import ALL, Entry, Questions, read_entry, read_questions, suite_beside
from rlvlm.templates import render

_COLUMNS = {
    "accuracy": "pairs right",
    "undecided": "undecided",
    "consistent": "order kept",
    "auc": "AUC of success",
    "voc": "VOC",
}
_TASK_COLUMNS = {"accuracy": "pairs", "auc": "scores"}
"""Figures of each task, with the kind of question behind each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Head:
    """A column; `first` is low if the smallest value, or the first word, comes first."""

    name: str
    task: str = ""
    first: str = "high"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cell:
    value: float | str = ""
    """Sort key of the column; empty if nothing was asked."""
    shown: str = "-"
    low: float | None = None
    high: float = 0.0
    """Bounds of the interval, in percent of the scale from 0 to 1."""
    note: str = ""
    grade: str = ""
    warning: str = ""
    details: Sequence[str] = ()
    is_text: bool = False


def compare_entries(paths: Sequence[Path], items: Path | None, out: Path) -> int:
    """Writes the page of several entries, and returns the exit code; a bad entry is a line of its own.

    Args:
        paths: files of entries, all about one frozen suite.
        items: the suite's file, with or without its images; None for the only .zip beside the first entry.
        out: file of the page.

    Raises:
        UsageError: the suite's file is damaged.
    """
    questions, console = read_questions(items or suite_beside(paths[0])), plain_console(soft_wrap=True)
    shown, refused, notes = [], {}, {folder: read_notes(folder) for folder in {path.parent for path in paths}}
    for path in paths:
        try:
            entry = read_entry(path, questions)
            shown.append(Shown(entry=entry, is_asked_again=entry.asked in notes[path.parent]))
        except UsageError as error:  # the others are shown
            refused[path.name] = visible(str(error)).removeprefix(f"{path}")
            console.print(f"refused: {visible(str(error))}")
    write_whole(out, judges_page(shown, refused, questions))
    count = f"{len(shown)} judges" if not refused else f"{len(shown)} judges, {len(refused)} refused"
    console.print(f"{count}: {out}")
    return EXIT_DONE


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """An entry, and whether a maintainer asked its judge again; if not, all is as its author says."""

    entry: Entry
    is_asked_again: bool

    @property
    def doubt(self) -> str:
        """Why the answers look written from the truth; empty if they do not, or the judge was asked again."""
        return "" if self.is_asked_again else doubt_about(self.entry)


def judges_page(entries: Sequence[Shown], refused: Mapping[str, str], questions: Questions) -> str:
    """Returns the page's HTML: a row of each entry, those with the fewest faults first, and a line of each refused one.

    Entries that are too near the truth come after the others.

    Args:
        entries: the entries.
        refused: reasons by file.
        questions: questions of the suite.
    """
    tasks = list(questions.tasks)
    heads = [
        _Head(name="judge", first="low"),
        _Head(name="answers", first="low"),
        *(_Head(name=name) for name in _COLUMNS.values()),
    ]
    heads += [
        _Head(name="faults", first="low"),
        _Head(name="labels a second"),
        _Head(name="USD per 1,000", first="low"),
    ]
    heads += [_Head(name=_COLUMNS[figure], task=task) for task in tasks for figure in _TASK_COLUMNS]
    # a judge that a policy can fool may well have the highest figures
    ordered = sorted(
        entries,
        key=lambda shown: (
            bool(shown.doubt),
            len(shown.entry.figures["faults"]),
            -_area(shown.entry),
            shown.entry.name,
        ),
    )
    folder = Path(__file__).parent
    script = render(folder / "judges.js")
    return render(
        folder / "judges.html.j2",
        title=f"Judges on {questions.archive.suite}",
        suite=questions.archive.suite,
        digest=questions.archive.digest,
        heads=heads,
        rows=[_row(shown, tasks) for shown in ordered],
        refused=refused,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _area(entry: Entry) -> float:
    found = entry.figures[ALL]["auc"]
    return -math.inf if found is None else found[0]


def _row(shown: Shown, tasks: Sequence[str]) -> list[_Cell]:
    entry = shown.entry
    faults = entry.figures["faults"]
    asked = "asked again" if shown.is_asked_again else "self-reported"
    row = [_Cell(value=entry.name, shown=entry.name, note=_stamp(entry), is_text=True)]
    row.append(_Cell(value=asked, shown=asked, warning=shown.doubt, is_text=True))
    row += [_figure_cell(entry, ALL, figure) for figure in _COLUMNS]
    row.append(_Cell(value=len(faults), shown=f"{len(faults)}", details=faults))
    for cost, digits in (("answers_per_s", 1), ("usd_per_1000", 2)):
        number = entry.cost[cost]
        row.append(_Cell() if number is None else _Cell(value=number, shown=f"{number:,.{digits}f}"))
    return row + [_figure_cell(entry, task, figure) for task in tasks for figure in _TASK_COLUMNS]


def _stamp(entry: Entry) -> str:
    judge = entry.row["judge"]
    said = " ".join(part for part in (judge["judge"], judge["prompt"]) if part not in ("", "none"))
    return "" if said == entry.name else said


def _figure_cell(entry: Entry, task: str, figure: str) -> _Cell:
    found = entry.figures[task][figure]
    grade = entry.figures[task].get(f"grade of {_TASK_COLUMNS[figure]}", "") if figure in _TASK_COLUMNS else ""
    if found is None:
        return _Cell(grade=grade)
    value, low, high = found
    # a rank correlation is in [-1, 1]
    ends = [100 * (end + 1) / 2 if figure == "voc" else 100 * end for end in (low, high)]
    if figure in ("auc", "voc"):
        shown, note = f"{value:.2f}", f"{low:.2f} to {high:.2f}"
    else:
        shown, note = f"{100 * value:.1f} %", f"{100 * low:.0f} to {100 * high:.0f}"
    return _Cell(value=value, shown=shown, note=note, low=ends[0], high=ends[1], grade=grade)
