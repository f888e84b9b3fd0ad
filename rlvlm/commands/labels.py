"""`rlvlm labels show | export | import`: label stores."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from rlvlm.core.console.arguments import HELP, run_form, value_of
from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.core.guests import guest_of, guests, load, with_guests

_LABEL_FILES = "pkl"
"""Form of `labels import` for files whose names do not say it."""


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
    """File to write; an existing one is replaced."""
    names: tyro.conf.FlagCreatePairsOff[bool] = False
    """Keep the names of people; otherwise they become human:person-1, human:person-2."""


def command(words: Sequence[str], prog: str) -> int:
    """Runs `labels show STORE`, `labels export STORE [--out FILE]` or `labels import FILES`."""
    if words and words[0] == "import":
        return import_labels(words[1:], f"{prog} import")
    forms = {
        "show": (ShowLabelsArguments, show),
        "export": (ExportLabelsArguments, export),
    }
    return run_form(words, prog, forms, {"import": "Import other people's labels into a label store."})


def import_labels(words: Sequence[str], prog: str) -> int:
    """Runs `labels import FILES [--form NAME]`: hands over to the guest that reads such files.

    Raises:
        UsageError: no guest does.
    """
    kinds = with_guests("imports", {})
    ending = Path(next((word for word in words if not word.startswith("-")), "")).suffix.removeprefix(".")
    form = value_of("--form", words) or (ending if ending in kinds else _LABEL_FILES)
    if words and words[0] in HELP and (form in kinds or not value_of("--form", words)):
        lines = "".join(f"  {prog} FILES --form {name:10} {kind.text}\n" for name, kind in kinds.items())
        sys.stdout.write(f"{lines}\noptions: {prog} --form {form if form in kinds else 'NAME'} --help\n")
        return EXIT_DONE
    if form not in kinds:
        what = f"--form is one of {', '.join(kinds) or 'those of guests'}, got {form}{guest_of('imports', form)}"
        raise UsageError(what, f"{prog} --help")
    return load(kinds[form].call)(words, prog)


def show(arguments: ShowLabelsArguments) -> str:
    """Returns the number of answers of each judge, and what guests say of the store."""
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
    for guest in guests().values():
        lines += load(guest.store_lines)(store) if guest.store_lines else []
    return "".join(lines)


def export(arguments: ExportLabelsArguments) -> str:
    """Exports answers, and returns how many were written."""
    from rlvlm.labels.export import export_parquet
    from rlvlm.labels.store import open_store

    count = export_parquet(open_store(arguments.store), arguments.out, with_names=arguments.names)
    return f"{count:,} answers in {arguments.out}\n"
