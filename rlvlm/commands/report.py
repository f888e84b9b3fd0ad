"""`rlvlm report DIR...`: compares runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from rlvlm.core.console.arguments import parse


@dataclass(frozen=True)
class ReportArguments:
    """Compare runs, or the sources of a sweep: a table here; report.html, report.csv and report.png in a folder."""

    paths: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs; runs that differ only in their seed form a group. Or the folder of one sweep."""
    out: Path | None = None
    """Folder for the page, the tables and the images; by default `report`, or the sweep's own folder."""
    bench: tuple[Path, ...] = ()
    """Rows of judges (bench.json of `rlvlm judge-bench`), or folders with some: a judge's figures and predictions
    are shown beside the results of the runs that asked it."""
    trust: bool = False
    """Trust the code, servers and files elsewhere that the folder names: its code is imported, and so executed."""


def command(words: Sequence[str], prog: str) -> int:
    """Runs `report DIR... [--out DIR]`: reports results of runs, or of a sweep."""
    arguments = parse(ReportArguments, words, prog)
    from rlvlm.sweeps.folder import check_trust

    check_trust(arguments.paths, trust=arguments.trust)
    from rlvlm.reports.compare import compare  # matplotlib, after everything that can be checked without it

    return compare(arguments.paths, arguments.out, arguments.bench)
