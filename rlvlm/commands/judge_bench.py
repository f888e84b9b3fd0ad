"""`rlvlm judge-bench SUITE`, and `rlvlm judge-bench compare` and `freeze`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from rlvlm.core.console.arguments import parse
from rlvlm.core.errors import UsageError
from rlvlm.core.guests import guest_of, load, with_guests
from rlvlm.core.trust import check_folder, foreign_code
from rlvlm.reports.options import BenchOptions, FreezeOptions, parse_judged
from rlvlm.runs.files.folder import check_trust

_TABLE = "judge-bench table"
"""Command of a guest that makes a page of entries."""


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


def command(words: Sequence[str], prog: str) -> int:
    """Runs `judge-bench [SUITE] [--judge.* ...] [--out DIR]`, `judge-bench compare` or `freeze`."""
    if words and words[0] == "compare":
        arguments = parse(CompareArguments, words[1:], f"{prog} compare")
        if arguments.out is not None:
            if (page := with_guests("commands", {}).get(_TABLE)) is None:
                raise UsageError(f"--out writes a page of entries{guest_of('commands', _TABLE)}", "leave it out")
            return load(page.call)(words[1:], f"{prog} compare")
        from rlvlm.reports.compare_benches import compare_benches

        return compare_benches(arguments.rows)
    if words and words[0] == "freeze":
        frozen = parse(FreezeOptions, words[1:], f"{prog} freeze")
        _check_suite(frozen.suite, trust=False)
        from rlvlm.reports.judge_bench import freeze_bench

        return freeze_bench(frozen)
    bench = parse_judged(BenchOptions, words, prog)
    if bench.player is not None:
        check_trust([bench.player], trust=bench.trust)
    _check_suite(bench.suite, trust=bench.trust)
    from rlvlm.reports.judge_bench import bench_judge, bench_published

    return bench_published(bench) if bench.preset and bench.suite == "tiny" else bench_judge(bench)


def _check_suite(suite: str, *, trust: bool) -> None:
    """Raises UsageError if there is no such suite, or a file of hacked episodes names code that is not trusted."""
    if not Path(suite).is_file():
        from rlvlm.judge_bench.suites import find_suite

        find_suite(suite)  # a wrong name is reported before matplotlib and more are imported
    if suite.endswith(".json"):
        from rlvlm.judge_bench.hacked import read_suite  # numpy
        from rlvlm.judge_bench.suites import bench_form

        if bench_form(suite):  # recorded data, which name no code
            return

        task, _ = read_suite(Path(suite))
        check_folder(Path(suite), "", foreign_code([task]), {}, trust=trust)
