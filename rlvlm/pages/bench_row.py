"""Formats a row of judge-bench for the terminal and the page, and compares the rows of several judges."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlvlm.core.console.tables import plain_console, plain_table
from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.judge_bench.prediction import ExpectedSuccess
from rlvlm.judge_bench.rows import PAIR_NAMES, SCORE_NAMES, number_cell, read_row, share_cell
from rlvlm.pages.bench_charts import ASKED_FOR

TASK_HEADS = ("pairs right", "undecided", "order kept", "AUC of success", "VOC")
"""Columns of the tables with a line per task."""
GRADE_HEADS = ("task", "asked for", "for training", "worth", "expected success")
"""Columns of the table that says whether to train; the grade comes early, where a phone shows it."""
_TAKEN = {"assumed": "all are taken for successes", "none": "none is taken for a success"}
_TOLERANCE = 3.0
"""Tolerated difference in grey levels between two machines' fields: renderers round and smooth differently."""


def print_row(row: Mapping[str, Any]) -> None:
    """Prints a row: figures over all tasks, one line per task, and the faults."""
    console = plain_console(soft_wrap=True)
    console.print(f"\n{judge_name(row)} on {row['bench']['suite']}", style="bold")
    if not row["bench"]["is_whole"]:
        console.print("stopped before the end: the figures below cover the answers given until then")
    facts = [fact for table in cells(row).values() for fact in table.items() if fact[1] != "-"]
    console.print(plain_table(("", ""), facts, words=("",)))
    console.print(plain_table(("task", *TASK_HEADS), task_lines(row), words=("task",)))
    for fault in row["faults"]:
        console.print(f"fault: {fault['name']} ({fault['evidence']})", style="bold")
    if not row["faults"]:
        console.print("no known fault was found")
    for place, way in enumerate(row["remedies"]):
        # the best comes first, and only the best is worth its settings
        advice = f" ({way['settings']})" if way["settings"] and not place else ""
        console.print(f"{way_of_asking(way)}{advice}")
    console.print("\nGood enough to train with?", style="bold")
    if row["prediction"]:
        console.print(plain_table(GRADE_HEADS, grade_lines(row), words=GRADE_HEADS))
    for line in grade_notes(row):
        console.print(line)


def grade_lines(row: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns the predictions as cells under `GRADE_HEADS`, one line per task and kind of question."""
    found = []
    for expected in (ExpectedSuccess(**prediction) for prediction in row["prediction"]):
        success = "-"
        if expected.success is not None:
            interval = f"({expected.low:.2f} to {expected.high:.2f})"
            success = f"{expected.success:.2f} {interval}, from {expected.before:.2f}, {expected.count} runs"
        worth = f"{100 * expected.worth:.0f} % ({100 * expected.worth_low:.0f} to {100 * expected.worth_high:.0f})"
        found.append((expected.task, ASKED_FOR[expected.kind], expected.grade, worth, success))
    return found


def grade_notes(row: Mapping[str, Any]) -> list[str]:
    """Returns notes on the columns of `grade_lines`, and on the grades of tasks without runs."""
    rule = row["bench"].get("success")  # rows of older benches have none
    notes = [f"The data do not say which episodes succeeded: with --success {rule}, {_TAKEN[rule]}."] if rule else []
    if not row["prediction"]:
        return [*notes, "Nothing can be said: neither pairs nor successes beside failures were asked about."]
    notes += [
        "Worth, with its 90 % interval: how often a judge is right that always decides and says as much; 50 % is "
        "chance, below it misleads."
    ]
    if any(prediction["grade"] == "can be fooled" for prediction in row["prediction"]):
        notes.append("Can be fooled: it pays for what a policy can do without reaching the goal, see its faults.")
    for fault in (fault for fault in row["faults"] if fault.get("is_limiting")):  # rows of older benches have none
        where = f" on {', '.join(fault['tasks'])}" if fault["tasks"] else ""
        notes.append(
            f"Uncertain at best{where}: it {fault['name']}, and no run is known with a judge that errs like this."
        )
    for kind, name in ASKED_FOR.items():
        grades = ("probably good enough", "uncertain", "probably too weak")  # the others do not rest on other tasks
        unproven = [
            prediction
            for prediction in row["prediction"]
            if prediction["kind"] == kind and prediction["success"] is None
        ]
        unproven = [prediction for prediction in unproven if prediction["grade"] in grades]
        if not unproven:
            continue
        never, always = unproven[0]["never"], unproven[0]["always"]
        limits = [] if never is None else [f"none learned up to a worth of {100 * never:.0f} %"]
        limits += [] if always is None else [f"all learned from {100 * always:.0f} % on"]
        of_all = f"of all runs known {', '.join(limits)}" if limits else "nor of another task"
        what = f"{name.capitalize()} without an expected success"
        notes.append(f"{what}: no training runs of the task are known with such a judge; {of_all}.")
    return notes


def way_of_asking(way: Mapping[str, Any]) -> str:
    """Returns a sentence on the cost and worth of a label for one way of asking (`judge_bench.remedies`)."""
    says = (
        f"labels worth those of a judge that is right in {100 * way['worth']:.0f} %, {way['undecided']:.0%} undecided"
    )
    if way["calls"] is None:
        return f"asking {way['name']}: {says}: no number of questions teaches"
    return f"asking {way['name']}: {says}: {way['calls']:.1f} questions say as much as a label that is certain"


def judge_name(row: Mapping[str, Any]) -> str:
    """Returns the name of the measured judge, with its prompt."""
    judge = row["judge"]
    path = "with the hand's path" if row["bench"].get("draw_path") else ""
    return " ".join(filter(None, (judge["judge"], judge["prompt"], path)))


def cells(row: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Returns a row's figures as text, by table and name; `-` if nothing was asked."""
    pairs, scores, cost = (row["figures"][name] for name in ("pairs", "scores", "cost"))
    # [10, 3] right, wrong and other answers by tenths of the gap, the hardest first
    bins = np.array(pairs.get("by_difficulty", np.zeros((10, 3))))
    hard, easy = bins[:3].sum(0), bins[7:].sum(0)
    false = scores.get("false_positives", {})
    compared = {
        PAIR_NAMES["accuracy"]: share_cell(pairs.get("accuracy")),
        "  the hardest, gaps below 0.3": percent(hard[0], hard[0] + hard[1]),
        "  the easiest, from 0.7 on": percent(easy[0], easy[0] + easy[1]),
        PAIR_NAMES["undecided"]: share_cell(pairs.get("undecided")),
        PAIR_NAMES["unread"]: share_cell(pairs.get("unread")),
        PAIR_NAMES["said_left"]: share_cell(pairs.get("said_left")),
        PAIR_NAMES["consistent"]: share_cell(pairs.get("consistent")),
        "chooses between equal images": share_cell(pairs.get("same_image")),
        "same label for another task": share_cell(pairs.get("other_task")),
        **{f"same label: {case}": share_cell(value) for case, value in pairs.get("steady", {}).items()},
        PAIR_NAMES["ece"]: number_cell(pairs.get("ece")),
    }
    scored = {
        SCORE_NAMES["auc"]: number_cell(scores.get("auc")),
        "AUC against hacked episodes": number_cell(scores.get("hacked_auc")),
        "best threshold": number_cell(scores.get("threshold")),
        SCORE_NAMES["ece"]: number_cell(scores.get("ece")),
        "unread scores": share_cell(scores.get("unread")),
        **{f"called success: {case}": share_cell(value) for case, value in false.items()},
        **{f"still a success: {case}": share_cell(value) for case, value in scores.get("kept", {}).items()},
        **{f"same verdict: {case}": share_cell(value) for case, value in scores.get("steady", {}).items()},
        "VOC, order along an episode": number_cell(scores.get("voc")),
        "rank correlation with progress": number_cell(scores.get("progress")),
    }
    spent = {
        "answers per second": number_cell(cost["answers_per_s"], 3),
        "tokens per answer": number_cell(cost["tokens"], 0),
        "USD per 1,000 answers": number_cell(cost["usd_per_1000"]),
        "memory": f"{cost['memory_bytes'] / 2**30:.1f} GiB",
        "memory of the GPU": "-" if not cost["gpu_bytes"] else f"{cost['gpu_bytes'] / 2**30:.1f} GiB",
    }
    named = row["figures"].get("published", {})  # rows of older benches have none
    published = {
        "MAE of ratings 1 to 5": number_cell(named.get("mae")),
        "Kendall's tau, mean over tasks": number_cell(named.get("kendall_tau")),
        "preference accuracy by scores": share_cell(named.get("preference")),
        "preference accuracy by comparisons": share_cell(named.get("compared")),
    }
    return {"comparisons": compared, "scores": scored, "by others' definitions": published, "cost": spent}


def task_lines(row: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns one line of cells per task."""
    return [
        (
            task,
            share_cell(figures["pairs"].get("accuracy")),
            share_cell(figures["pairs"].get("undecided")),
            share_cell(figures["pairs"].get("consistent")),
            number_cell(figures["scores"].get("auc")),
            number_cell(figures["scores"].get("voc")),
        )
        for task, figures in row["tasks"].items()
    ]


def percent(hits: float, count: float) -> str:
    """Returns `hits` / `count` in percent; `-` if the count is 0."""
    return f"{100 * hits / count:.1f} %" if count else "-"


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
        tables = [{name: cell for table in cells(row).values() for name, cell in table.items()} for row in rows]
        names = dict.fromkeys(name for table in tables for name in table)
        heads = ("", *(f"{judge_name(row)[:40]} [{number}]" for number, row in enumerate(rows, start=1)))
        lines = [(name, *(table.get(name, "-") for table in tables)) for name in names]
        console.print(plain_table(heads, [line for line in lines if set(line[1:]) != {"-"}], words=("",)))
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
        assert shown and all(isinstance(fault["name"], str) for fault in row["faults"])
    except (AssertionError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
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
