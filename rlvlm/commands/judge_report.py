"""`rlvlm judge-report RUN|STORE...`: reports on judges' answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from rlvlm.core.checks import NonNegativeInt, check_bounds
from rlvlm.core.console.arguments import parse


@dataclass(frozen=True)
class JudgeReportArguments:
    """Report how right, sure, consistent and fast a judge was: figures here, a page with tables in a folder."""

    paths: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs or of label stores; several are compared."""
    out: Path = Path("judge_report")
    """Folder for the page, the images and the tables."""
    ask_swapped: NonNegativeInt = 0
    """Number of questions of each run that are put to its judge again in the other order; loads the judge here."""
    trust: bool = False
    """Trust the code, servers and files elsewhere that the folder names: its code is imported, and so executed."""

    def __post_init__(self) -> None:
        check_bounds(self, "--")


def command(words: Sequence[str], prog: str) -> int:
    """Runs `judge-report RUN|STORE... [--out DIR] [--ask-swapped N]`: prints figures, and writes a page of them."""
    arguments = parse(JudgeReportArguments, words, prog)
    from rlvlm.sweeps.folder import check_trust

    check_trust(arguments.paths, trust=arguments.trust)
    from rlvlm.reports.judge_report import report_judges  # matplotlib, after everything that can be checked without it

    return report_judges(arguments.paths, arguments.out, arguments.ask_swapped)
