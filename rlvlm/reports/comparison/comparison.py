"""`rlvlm report SWEEP`: reads a sweep, writes its page, pictures and tables, and says who wins."""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlvlm.disk import write_whole
from rlvlm.errors import EXIT_DONE
from rlvlm.reports.comparison.figures import draw_curves, draw_scores
from rlvlm.reports.comparison.page import comparison_page, overall
from rlvlm.reports.comparison.results import Results, read_results
from rlvlm.reports.comparison.tables import GROUP_COLUMNS, RUN_COLUMNS, group_rows, run_rows, write_csv
from rlvlm.runs.artifacts.plots import STYLE, save
from rlvlm.sweeps.folder import SweepFolder

WIDTH = 160
"""Columns of the table in a file or pipe."""


def compare_sweep(folder: SweepFolder, out: Path) -> int:
    """Writes report.html, report.png, report_curves.png, report.csv and report_runs.csv into `out`, and says who wins.

    Raises:
        UsageError: the sweep's file cannot be read.
    """
    results = read_results(folder)
    out.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        scores = save(draw_scores(results), out / "report.png")
        curves = save(draw_curves(results), out / "report_curves.png")
    groups = [row for task in results.sweep.tasks for row in group_rows(results, task)]
    write_csv(out / "report.csv", GROUP_COLUMNS, groups)
    write_csv(out / "report_runs.csv", RUN_COLUMNS, run_rows(results))
    write_whole(out / "report.html", comparison_page(results, scores, curves))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(_table(results))
    console.print(Text(f"\n{overall(results)}\n"))
    console.print(Text(f"page, pictures and tables: {out / 'report.html'}"), soft_wrap=True)
    return EXIT_DONE


def _table(results: Results) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("task", "source", "finished", "score", "interval", "success", "labels right", "minutes"):
        table.add_column(name, justify="left" if name in ("task", "source") else "right", no_wrap=True)
    for task in results.sweep.tasks:
        for row in group_rows(results, task):
            is_scored = row["score"] is not None
            table.add_row(
                task,
                row["title"],
                row["finished"],
                f"{row['score']:.2f}" if is_scored else "-",
                f"{row['score_low']:.2f} to {row['score_high']:.2f}" if is_scored else "-",
                f"{row['final_success_rate']:.0%}" if is_scored else "-",
                "-" if row["label_accuracy"] is None else f"{row['label_accuracy']:.1%}",
                "-" if row["minutes"] is None else f"{row['minutes']:.1f}",
            )
    return table
