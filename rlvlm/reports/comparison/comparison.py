"""`rlvlm report DIR...`: compares runs, or the sources of a sweep, and says who wins."""

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlvlm.core.disk import write_whole
from rlvlm.core.errors import EXIT_DONE
from rlvlm.reports.comparison.figures import draw_curves, draw_scores
from rlvlm.reports.comparison.page import cell, comparison_page, overall
from rlvlm.reports.comparison.results import run_results, sweep_results
from rlvlm.reports.comparison.tables import group_rows, run_rows
from rlvlm.runs.artifacts.plots import STYLE, save
from rlvlm.runs.folder.tables import CsvTable
from rlvlm.sweeps.folder import find_sweep

WIDTH = 160
"""Columns of the table in a file or pipe."""


def compare(paths: Sequence[Path], out: Path | None = None) -> int:
    """Prints who wins, and writes report.html, report.png, report_curves.png, report.csv and report_runs.csv.

    Args:
        paths: the folder of one sweep; or folders of runs, or full of runs.
        out: folder of the files; by default the sweep's, or `report`.

    Raises:
        UsageError: no path, nothing to compare under one, or a file that cannot be read.
    """
    sweep = find_sweep(paths[0]) if len(paths) == 1 else None
    results = sweep_results(sweep) if sweep else run_results(paths)
    out = out or (sweep.path if sweep else Path("report"))
    out.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        scores = save(draw_scores(results), out / "report.png")
        curves = save(draw_curves(results), out / "report_curves.png")
    groups = [row for task in results.tasks for row in group_rows(results, task)]
    for name, rows in (("report.csv", groups), ("report_runs.csv", run_rows(results))):
        CsvTable(out / name, tuple(rows[0]), "task").write(rows)
    write_whole(out / "report.html", comparison_page(results, scores, curves))

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("task", "source", "finished", "score", "interval", "success", "labels right", "minutes"):
        table.add_column(name, justify="left" if name in ("task", "source") else "right", no_wrap=name != "source")
    for row in groups:
        is_one = row["score"] is None or row["score_low"] == row["score_high"]
        interval = "-" if is_one else f"{row['score_low']:.2f} to {row['score_high']:.2f}"
        facts = [cell(key, row[key]) for key in ("final_success_rate", "label_accuracy", "minutes")]
        table.add_row(
            Text(row["task"]), Text(row["title"]), row["finished"], cell("score", row["score"]), interval, *facts
        )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(table)
    console.print(Text(f"\n{overall(results)}\n"))
    console.print(Text(f"page, images and tables: {out / 'report.html'}"), soft_wrap=True)
    return EXIT_DONE
