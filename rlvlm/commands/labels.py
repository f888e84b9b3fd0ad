"""`rlvlm labels show | export | import`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from rlvlm.commands.arguments import run_form
from rlvlm.core.errors import UsageError


@dataclass(frozen=True)
class ShowLabelsArguments:
    """Summarise a label store, checking every line."""

    store: tyro.conf.Positional[Path]
    """Folder of the store, e.g. `labels` in a run's folder."""


@dataclass(frozen=True)
class ExportLabelsArguments:
    """Export a label store as one Parquet file."""

    store: tyro.conf.Positional[Path]
    """Folder of the store."""
    out: Path = Path("labels.parquet")
    """The file; one that is there is replaced."""


@dataclass(frozen=True, kw_only=True)
class ImportLabelsArguments:
    """Import the reference implementation's pickled label files into a store, without executing them."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """The files, or folders whose *.pkl are taken in the order of their names."""
    store: Path
    """Folder of the store; made where there is none."""
    goal: str
    """What the VLM was asked about, e.g. "open the drawer"; the files do not say."""
    judge: str = "unknown"
    """Which VLM it was; the files do not say."""


def command(words: Sequence[str], prog: str) -> int:
    """`labels show STORE`, `labels export STORE [--out FILE]`, `labels import FILES --store DIR --goal PHRASE`."""
    forms = {
        "show": (ShowLabelsArguments, show),
        "export": (ExportLabelsArguments, export),
        "import": (ImportLabelsArguments, import_files),
    }
    return run_form(words, prog, forms)


def show(arguments: ShowLabelsArguments) -> str:
    """How many answers there are, of which judges."""
    from rlvlm.labels.store import open_store

    store = open_store(arguments.store)
    counts = store.count_lines()
    lines = [
        f"{counts['verdict']:,} verdicts, {counts['score']:,} scores, {counts['truth']:,} truths, "
        f"{counts['damaged']:,} damaged and {counts['unfinished']:,} unfinished lines; "
        f"{len(store):,} distinct answers\n"
    ]
    lines += [
        f"{count:>8,}  {stamp.judge}, {stamp.prompt}, {stamp.decoding}, revision {stamp.revision[:12] or 'unknown'}\n"
        for stamp, count in store.stamps().most_common()
    ]
    return "".join(lines)


def export(arguments: ExportLabelsArguments) -> str:
    """How many answers were written."""
    from rlvlm.labels.export import export_parquet
    from rlvlm.labels.store import open_store

    return f"{export_parquet(open_store(arguments.store), arguments.out):,} answers in {arguments.out}\n"


def import_files(arguments: ImportLabelsArguments) -> str:
    """How many labels were taken over, and how right they are."""
    from rlvlm.judges.prompts import check_goal
    from rlvlm.labels.reference import import_reference
    from rlvlm.labels.store import LabelStore

    try:
        goal = check_goal(arguments.goal)
    except ValueError as error:
        raise UsageError(str(error), 'give the goal in a few words: --goal "open the drawer"') from error
    # by name, as the reference numbers its sessions
    files = [file for path in arguments.files for file in (sorted(path.glob("*.pkl")) if path.is_dir() else [path])]
    if not files:
        raise UsageError("no file to import", "name *.pkl files, or a folder that holds them")
    counts = import_reference(files, LabelStore(arguments.store), goal=goal, judge=arguments.judge)
    note = f"note: {counts['disagrees']:,} of the files' own true labels contradict their returns\n"
    return (
        f"{counts['labels']:,} labels from {len(files):,} files in {arguments.store}; of those that the true returns "
        f"decide, {counts['correct']:,} are right and {counts['wrong']:,} wrong\n"
    ) + (note if counts["disagrees"] else "")
