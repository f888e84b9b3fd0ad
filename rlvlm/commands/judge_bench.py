"""`rlvlm judge-bench SUITE`, and `rlvlm judge-bench compare`, `freeze` and `harvest`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from rlvlm.core.checks import check_interval, check_least
from rlvlm.core.console.arguments import parse
from rlvlm.core.trust import check_folder, foreign_code
from rlvlm.reports.options import BenchOptions, FreezeOptions
from rlvlm.runs.folder import check_trust


@dataclass(frozen=True)
class CompareArguments:
    """Compare several judges on the tasks that all were asked about; or, with --out, write a page of entries."""

    rows: tyro.conf.Positional[tuple[Path, ...]]
    """Files bench.json, or folders with one; with --out files of entries (entry.json)."""
    out: Path | None = None
    """File for a page with a sortable table, one entry per row."""
    items: Path | None = None
    """File of the frozen suite that the entries are about, at least its questions; by default the only .zip beside
    the first entry."""


@dataclass(frozen=True)
class HarvestArguments:
    """Make a suite of the episodes that judged runs kept: successes for the judge, but not for the simulator."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs of one task, or folders that contain such runs."""
    out: Path = Path("hacked")
    """Folder for TASK.hacked.json and tricks.png."""
    episodes: int = 150
    """Maximum number of episodes in the suite, 1 to 150."""
    frames: int = 8
    """Maximum number of images per episode, evenly spread, >= 2."""
    trust: bool = False
    """Trust the code, servers and files elsewhere that the folder names: its code is imported, and so executed."""

    def __post_init__(self) -> None:
        check_interval(self, "--", "[1, 150]", "episodes")
        check_least(self, "--", 2, "frames")


def command(words: Sequence[str], prog: str) -> int:
    """Runs `judge-bench [SUITE] [--judge.* ...] [--out DIR]`, `judge-bench compare`, `freeze` or `harvest`."""
    if words and words[0] == "compare":
        arguments = parse(CompareArguments, words[1:], f"{prog} compare")
        if arguments.out is not None:
            from rlvlm.reports.judges_page import compare_entries

            return compare_entries(arguments.rows, arguments.items, arguments.out)
        from rlvlm.reports.compare_benches import compare_benches

        return compare_benches(arguments.rows)
    if words and words[0] == "harvest":
        harvested = parse(HarvestArguments, words[1:], f"{prog} harvest")
        check_trust(harvested.runs, trust=harvested.trust)
        from rlvlm.reports.harvest import harvest

        return harvest(harvested.runs, harvested.out, harvested.episodes, harvested.frames)
    if words and words[0] == "freeze":
        frozen = parse(FreezeOptions, words[1:], f"{prog} freeze")
        _check_suite(frozen.suite, trust=False)
        from rlvlm.reports.judge_bench import freeze_bench

        return freeze_bench(frozen)
    bench = parse(BenchOptions, words, prog)
    if bench.player is not None:
        check_trust([bench.player], trust=bench.trust)
    _check_suite(bench.suite, trust=bench.trust)
    from rlvlm.reports.judge_bench import bench_judge

    return bench_judge(bench)


def _check_suite(suite: str, *, trust: bool) -> None:
    """Raises UsageError if a file of hacked episodes names code that is not trusted."""
    if suite.endswith(".json"):
        from rlvlm.judge_bench.hacked import read_suite  # numpy

        task, _ = read_suite(Path(suite))
        check_folder(Path(suite), "", foreign_code([task]), {}, trust=trust)
