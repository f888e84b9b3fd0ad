"""`rlvlm data show`: demonstrations."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from rlvlm.core.console.arguments import run_form
from rlvlm.core.errors import MachineError


@dataclass(frozen=True)
class ShowArguments:
    """Summarise a folder of demonstrations, and rewrite its card and contact sheet."""

    folder: tyro.conf.Positional[Path]
    """Folder made by `rlvlm collect`."""
    trust: bool = False
    """Trust the code, servers and files elsewhere that the folder names: its code is imported, and so executed."""


def command(words: Sequence[str], prog: str) -> int:
    """Runs `data show DIR`."""
    return run_form(words, prog, {"show": (ShowArguments, show)})


def show(arguments: ShowArguments) -> str:
    """Rewrites the folder's card and the contact sheet of chunks, and returns the card's text."""
    from rlvlm.demonstrations.card import write_card
    from rlvlm.demonstrations.folder import open_folder

    folder = open_folder(arguments.folder)
    note = ""
    if folder.has_chunks:
        from rlvlm.reports.contact_sheet import folder_env, write_sheet

        try:
            sheet = write_sheet(folder, lambda: folder_env(folder, trust=arguments.trust))
            note = f"look at {sheet}\n" if sheet else ""
        except MachineError as error:  # the counts need no renderer
            note = f"no contact sheet: {error}\n"
    write_card(folder)
    return (arguments.folder / "README.md").read_text() + note
