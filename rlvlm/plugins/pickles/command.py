"""`rlvlm labels import`: labels from the files of the reference implementation."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from rlvlm.core.console.arguments import parse
from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.core.foreign import visible


@dataclass(frozen=True, kw_only=True)
class ImportLabelsArguments:
    """Import the reference implementation's pickled label files into a store, without executing them."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """Files, or folders whose *.pkl are read in the order of their names."""
    form: Literal["pkl"] = "pkl"
    """Kind of the files; there are others."""
    store: Path
    """Folder of the store; created if missing."""
    goal: str
    """Goal in the VLM's questions, e.g. "open the drawer"; the files do not say."""
    judge: str = "unknown"
    """Name of the VLM; the files do not say."""


def command(words: Sequence[str], prog: str) -> int:
    """Runs `labels import FILES --store DIR --goal PHRASE`: prints how many there are, and how many are right."""
    arguments = parse(ImportLabelsArguments, words, prog)
    from rlvlm.judges.prompts import check_goal  # numpy: not needed for help
    from rlvlm.labels.store import LabelStore
    from rlvlm.plugins.pickles.reference import import_reference

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
    text = (
        f"{counts['labels']:,} labels from {len(files):,} files in {arguments.store}; of those that the true returns "
        f"decide, {counts['correct']:,} are right and {counts['wrong']:,} wrong\n"
    ) + (note if counts["disagrees"] else "")
    sys.stdout.write(visible(text))
    return EXIT_DONE
