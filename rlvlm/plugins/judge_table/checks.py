"""What is known of an entry beyond its own file: whether a maintainer asked the judge again, about items of his own.

The truth of a published suite is public, so answers can be written without any judge. A maintainer therefore freezes
the suite with another seed, asks the judge about it, and notes what came out in `NOTES` beside the entries, which no
entry can do for itself: a note holds for one judge and its answers, by their hash.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlvlm.core.console.tables import plain_console
from rlvlm.core.disk import write_whole
from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.core.foreign import parse_json, read_text
from rlvlm.plugins.judge_table.entries import ALL, SHOWN, Entry, read_entry, read_questions, suite_beside

NOTES = "asked_again.jsonl"
"""File of the notes, beside the entries: a line for each judge that was asked again."""
NEAR_TRUTH = 0.95
"""Share of pairs that are right, or AUC, from which answers are too near the truth to be believed unasked."""
_SLACK = 0.02
"""What figures of two seeds may differ by beyond their 95 % intervals, which may have no width at 0 and 1."""


def note_asked_again(entry_file: Path, again_file: Path, items: Path | None, second: Path) -> int:
    """Notes beside an entry that its judge was asked again, and returns the exit code.

    Args:
        entry_file: the entry.
        again_file: entry of the same judge about the second suite.
        items: suite's file that the entry is about; None for the only one beside it.
        second: the same suite, frozen with another seed.

    Raises:
        UsageError: an entry is none, they are of two judges or about the same items, or a figure does not hold.
    """
    questions = read_questions(items or suite_beside(entry_file)), read_questions(second)
    suites = [each.archive for each in questions]
    if suites[0].digest == suites[1].digest or suites[0].suite != suites[1].suite:
        what = f"{second} has to be {suites[0].suite} with items of its own"
        raise UsageError(what, f"rlvlm judge-bench freeze {suites[0].suite} --seed NUMBER --out FILE.zip")
    entry, again = read_entry(entry_file, questions[0]), read_entry(again_file, questions[1])
    if entry.row["judge"] != again.row["judge"]:
        raise UsageError(
            f"{again_file} is of {again.row['judge']}, and {entry_file} of {entry.row['judge']}",
            "ask the same judge in the same way",
        )
    for name in SHOWN:
        first, own = entry.figures[ALL][name], again.figures[ALL][name]
        if (first is None) != (own is None) or (
            first is not None and (first[1] > own[2] + _SLACK or own[1] > first[2] + _SLACK)
        ):
            what = f"{entry_file} does not hold: {name} {_said(first)}, and asked again {_said(own)}"
            raise UsageError(what, "leave the entry out, or ask its author how it was made")
    notes = read_notes(entry_file.parent)
    figures = {name: again.figures[ALL][name] for name in SHOWN}
    notes[entry.asked] = {"asked": entry.asked, "name": entry.name, "second": suites[1].digest, "figures": figures}
    write_whole(entry_file.parent / NOTES, "".join(f"{json.dumps(note)}\n" for note in notes.values()))
    plain_console(soft_wrap=True).print(f"{entry.name} was asked again: {entry_file.parent / NOTES}")
    return EXIT_DONE


def _said(figure: list[float] | None) -> str:
    return "nothing" if figure is None else "{:.2f} ({:.2f} to {:.2f})".format(*figure)


def read_notes(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Returns the notes beside entries by the hash of what was asked again; empty without any.

    Raises:
        UsageError: the file is damaged.
    """
    file = folder / NOTES
    if not file.exists():
        return {}
    try:
        notes = [parse_json(line) for line in read_text(file, root=folder).splitlines()]
        return {str(note["asked"]): note for note in notes}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{file} has no notes: {error}", "fetch it anew") from error


def doubt_about(entry: Entry) -> str:
    """Returns why the answers of an entry that nobody asked again look written from the truth; empty if they do not."""
    found = entry.figures[ALL]
    near = [
        f"{said} {figure[0]:.3f}"
        for said, figure in (("pairs right", found["accuracy"]), ("AUC", found["auc"]))
        if figure is not None and figure[0] >= NEAR_TRUTH
    ]
    return f"too near the truth ({', '.join(near)})" if near else ""
