"""`rlvlm judge-bench table`, `asked-again` and `harvest`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from rlvlm.core.checks import Bound, check_bounds
from rlvlm.core.console.arguments import parse
from rlvlm.core.trust import check_folder, foreign_code
from rlvlm.runs.files.folder import check_trust


@dataclass(frozen=True)
class TableArguments:
    """Write a page of entries: one sortable table, one entry per row."""

    entries: tyro.conf.Positional[tuple[Path, ...]]
    """Files of entries (entry.json)."""
    out: Path
    """File for the page."""
    items: Path | None = None
    """File of the frozen suite that the entries are about, at least its questions; by default the only .zip beside
    the first entry."""


@dataclass(frozen=True)
class AskedAgainArguments:
    """Note beside an entry that a maintainer asked its judge again, about items that nobody else has."""

    entry: tyro.conf.Positional[Path]
    """The entry."""
    again: tyro.conf.Positional[Path]
    """Entry of the same judge about the second suite, as `judge-bench SECOND.zip` writes it."""
    second: Path
    """The second suite: `judge-bench freeze SUITE --seed NUMBER --out SECOND.zip`, with a number that is not public."""
    items: Path | None = None
    """File of the suite that the entry is about; by default the only .zip beside it."""


@dataclass(frozen=True)
class HarvestArguments:
    """Make a suite of the episodes that judged runs and rehearsals kept: successes for the judge, but not for the
    simulator.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs of one task, or folders that contain such runs, or folders of `judge-bench --rehearse`."""
    out: Path = Path("hacked")
    """Folder for TASK.hacked.json and tricks.png."""
    episodes: Annotated[int, Bound("[1, 150]")] = 150
    """Maximum number of episodes in the suite, 1 to 150."""
    frames: Annotated[int, Bound(">= 2")] = 8
    """Maximum number of images per episode, evenly spread, >= 2."""
    trust: bool = False
    """Trust the code, servers and files elsewhere that the folder names: its code is imported, and so executed."""

    def __post_init__(self) -> None:
        check_bounds(self, "--")


def table(words: Sequence[str], prog: str) -> int:
    """Runs `judge-bench table ENTRY... --out FILE`."""
    arguments = parse(TableArguments, words, prog)
    from rlvlm.plugins.judge_table.page import compare_entries  # numpy: not needed for help

    return compare_entries(arguments.entries, arguments.items, arguments.out)


def asked_again(words: Sequence[str], prog: str) -> int:
    """Runs `judge-bench asked-again ENTRY AGAIN --second FILE.zip`."""
    arguments = parse(AskedAgainArguments, words, prog)
    from rlvlm.plugins.judge_table.checks import note_asked_again  # numpy: not needed for help

    return note_asked_again(arguments.entry, arguments.again, arguments.items, arguments.second)


def harvest(words: Sequence[str], prog: str) -> int:
    """Runs `judge-bench harvest RUN... --out DIR`."""
    arguments = parse(HarvestArguments, words, prog)
    check_trust(arguments.runs, trust=arguments.trust)
    from rlvlm.judge_bench.hacked import read_suite  # numpy: not needed for help
    from rlvlm.plugins.judge_table.harvest import bench_suites, harvest_suite

    for file in (file for run in arguments.runs for file in bench_suites(run)):
        check_folder(file, "", foreign_code([read_suite(file)[0]]), {}, trust=arguments.trust)
    return harvest_suite(arguments.runs, arguments.out, arguments.episodes, arguments.frames)
