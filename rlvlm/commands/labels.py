"""The commands about labels: judge-report, labels show | export | import, distill."""

import difflib
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from rlvlm.errors import EXIT_DONE, UsageError
from rlvlm.pocket.judge.config import DistillConfig


@dataclass(frozen=True)
class JudgeReportArguments:
    """How right, sure, consistent and fast a judge was: figures here, a page with pictures and tables in a folder."""

    paths: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs or of label stores; several are compared."""
    out: Path = Path("judge_report")
    """Folder for the page, the pictures and the tables."""
    ask_swapped: int = 0
    """Questions of each run that are put to its judge again in the other order; loads the judge here."""

    def __post_init__(self) -> None:
        if self.ask_swapped < 0:
            raise ValueError(f"--ask-swapped must be >= 0, got {self.ask_swapped}")


@dataclass(frozen=True)
class ShowArguments:
    """Count what a label store holds, and read every line and checksum of it."""

    store: tyro.conf.Positional[Path]
    """Folder of the store, e.g. `labels` in a run's folder."""


@dataclass(frozen=True)
class ExportArguments:
    """Write a label store as one Parquet file."""

    store: tyro.conf.Positional[Path]
    """Folder of the store."""
    out: Path = Path("labels.parquet")
    """The file; one that is there is replaced."""


@dataclass(frozen=True, kw_only=True)
class ImportArguments:
    """Add the reference implementation's pickled label files to a store; nothing in them is executed."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """The files, or folders whose *.pkl are taken in the order of their names."""
    store: Path
    """Folder of the store; made where there is none."""
    goal: str
    """What the VLM was asked about, e.g. "open the drawer"; the files do not say."""
    judge: str = "unknown"
    """Which VLM it was; the files do not say."""


@dataclass(frozen=True, kw_only=True)
class DistillArguments:
    """Train a pocket judge on another judge's labels, and report how far the two agree."""

    store: Annotated[Path, tyro.conf.arg(name="from")]
    """Folder of the label store to learn from."""
    out: Path
    """New folder of the weights and their card."""
    settings: Annotated[DistillConfig, tyro.conf.arg(name="")] = field(default_factory=DistillConfig)


def judge_report_command(words: Sequence[str], prog: str) -> int:
    """`judge-report RUN|STORE... [--out DIR] [--ask-swapped N]`."""
    arguments = tyro.cli(JudgeReportArguments, args=words, prog=prog)
    from rlvlm.reports.judge.report import report_judges

    return report_judges(arguments.paths, arguments.out, arguments.ask_swapped)


def labels_command(words: Sequence[str], prog: str) -> int:
    """`labels show | export | import`."""
    wanted = words[0] if words else ""
    if wanted not in _LABELS:
        near = difflib.get_close_matches(wanted, _LABELS, n=1) or ["show"]
        raise UsageError(
            f"{prog} is followed by {', '.join(_LABELS)}; got {wanted or 'nothing'}", f"{prog} {near[0]} --help"
        )
    return _LABELS[wanted](words[1:], f"{prog} {wanted}")


def distill_command(words: Sequence[str], prog: str) -> int:
    """`distill --from STORE --out DIR [options]`."""
    try:
        arguments = tyro.cli(DistillArguments, args=words, prog=prog)
    except ValueError as error:  # a rule of the settings
        raise UsageError(str(error), f"{prog} --help") from error
    from rlvlm.pocket.judge.distill import distill, graded_table

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    outcome = distill(arguments.store, arguments.out, arguments.settings)
    sys.stdout.write(graded_table(outcome))
    sys.stdout.write(f"\nuse it with: --judge.backend pocket --judge.model {arguments.out}\n")
    return EXIT_DONE


def _show(words: Sequence[str], prog: str) -> int:
    arguments = tyro.cli(ShowArguments, args=words, prog=prog)
    from rlvlm.labels.store import open_store

    store = open_store(arguments.store)
    counts = store.census()
    lines = [
        f"{counts['verdict']:,} verdicts, {counts['score']:,} scores, {counts['truth']:,} truths, "
        f"{counts['damaged']:,} damaged and {counts['unfinished']:,} unfinished lines; "
        f"{len(store):,} distinct answers"
    ]
    lines += [
        f"{count:>8,}  {stamp.judge}, {stamp.prompt}, {stamp.decoding}, revision {stamp.revision[:12] or 'unknown'}"
        for stamp, count in store.stamps().most_common()
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return EXIT_DONE


def _export(words: Sequence[str], prog: str) -> int:
    arguments = tyro.cli(ExportArguments, args=words, prog=prog)
    from rlvlm.labels.export import export_parquet
    from rlvlm.labels.store import open_store

    count = export_parquet(open_store(arguments.store), arguments.out)
    sys.stdout.write(f"{count:,} answers in {arguments.out}\n")
    return EXIT_DONE


def _import(words: Sequence[str], prog: str) -> int:
    arguments = tyro.cli(ImportArguments, args=words, prog=prog)
    from rlvlm.judges.prompts import check_goal
    from rlvlm.labels.reference import import_reference
    from rlvlm.labels.store import LabelStore

    try:
        goal = check_goal(arguments.goal)
    except ValueError as error:
        raise UsageError(str(error), 'give the goal in a few words: --goal "open the drawer"') from error
    files = [file for path in arguments.files for file in (sorted(path.glob("*.pkl")) if path.is_dir() else [path])]
    if not files:
        raise UsageError("no file to import", "name *.pkl files, or a folder that holds them")
    counts = import_reference(files, LabelStore(arguments.store), goal=goal, judge=arguments.judge)
    sys.stdout.write(
        f"{counts['labels']:,} labels from {len(files):,} files in {arguments.store}; of those that the true returns "
        f"decide, {counts['correct']:,} are right and {counts['wrong']:,} wrong\n"
    )
    if counts["disagrees"]:
        sys.stdout.write(f"note: {counts['disagrees']:,} of the files' own true labels contradict their returns\n")
    return EXIT_DONE


_LABELS: dict[str, Callable[[Sequence[str], str], int]] = {"show": _show, "export": _export, "import": _import}
