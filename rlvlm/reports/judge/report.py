"""Puts a judge report together: a table on the terminal; a page, images, JSON and CSV in a folder."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlvlm.core.disk import write_json, write_whole
from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.core.judging import Query, Status
from rlvlm.judges.build import build_judge
from rlvlm.judges.cache import CachedJudge
from rlvlm.labels.images import MissingImage
from rlvlm.labels.records import Question
from rlvlm.labels.store import LabelStore, is_store
from rlvlm.reports.judge.answers import read_sources
from rlvlm.reports.judge.figures import draw_all
from rlvlm.reports.judge.measures import NUM_BINS, OUTCOMES, by_bin, summarise
from rlvlm.reports.judge.page import report_page, table_cells
from rlvlm.runs.folder.run_folder import find_folder
from rlvlm.runs.folder.tables import CsvTable

BIN_COLUMNS = ("source", "bin", *(name.replace(" ", "_") for name in OUTCOMES))


def report_judges(paths: Sequence[Path], out: Path, ask_swapped: int = 0) -> int:
    """Reports on the answers in runs and label stores; returns the exit code.

    Args:
        paths: folders of runs, of label stores, or full of runs.
        out: folder of judge_report.html, .json and .csv, and the images.
        ask_swapped: questions of each run that are put to its judge again, with the images exchanged.

    Raises:
        UsageError: there is nothing to report.
        JudgeUnavailable: a judge is to be asked and cannot be loaded.
    """
    if ask_swapped:
        for path in paths:
            ask_in_other_order(path, ask_swapped)
    sources = read_sources(paths)
    rows = [summarise(source) for source in sources]
    out.mkdir(parents=True, exist_ok=True)
    pictures = draw_all(sources, out)
    write_json(out / "judge_report.json", rows)
    bins = [(source, by_bin(source), place) for source in sources for place in range(NUM_BINS)]
    CsvTable(out / "judge_report.csv", BIN_COLUMNS, "bin").write(
        {"source": source.name, "bin": place + 1}
        | {name.replace(" ", "_"): int(counts[name][place]) for name in OUTCOMES}
        for source, counts, place in bins
    )
    write_whole(out / "judge_report.html", report_page(sources, rows, pictures, "Judge report"))
    console = Console(highlight=False)
    for row in rows:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), title=None)
        for name, cell in table_cells(row).items():
            if cell != "-":
                table.add_row(name, cell)
        console.print(Text(str(row["source"]), style="bold"), soft_wrap=True)
        console.print(table)
    console.print(Text(f"page and images: {out / 'judge_report.html'}"), soft_wrap=True)
    return EXIT_DONE


def ask_in_other_order(path: Path, count: int) -> int:
    """Puts up to `count` questions of a run to its judge again with left and right exchanged; returns how many.

    The answers go into the run's store, under the same stamp, so they are asked once.

    Raises:
        UsageError: `path` is no run with a judge and a store.
        JudgeUnavailable: the judge cannot be loaded.
    """
    folder = find_folder(path)
    config = folder.config()
    place = config.labels(folder.labels)
    if not config.asks_judge or not is_store(place):
        raise UsageError(f"{path} has no judge's answers to ask again", "leave out --ask-swapped")
    store = LabelStore(place)
    judge = CachedJudge(build_judge(config.judge), store)
    wanted = {row["question"] for row in folder.queries.read() if row.get("question")}
    asked = [
        item.question
        for item in store.answers()
        if item.question.id in wanted and item.answer.stamp == judge.stamp and item.answer.status is not Status.FAILED
    ]
    if not asked:
        raise UsageError(
            f"no answer in {place} is of the judge that {path} describes: {judge.stamp}",
            "ask with the weights and settings of the run, or leave out --ask-swapped",
        )
    judge.compare(list(_queries(store, asked[:: -(-len(asked) // count)])))
    return min(count, len(asked))


def _queries(store: LabelStore, questions: Sequence[Question]) -> list[Query]:
    """The questions in the other order, as far as their images can be read."""
    found = []
    for question in questions:
        try:
            left, right, goal = (
                [store.image(digest) for digest in side]
                for side in (question.right, question.left, question.goal_picture)
            )
        except MissingImage:
            continue
        query = Query(goal=question.goal, left=np.stack(left), right=np.stack(right))
        found.append(replace(query, goal_picture=np.stack(goal)) if goal else query)
    return found
