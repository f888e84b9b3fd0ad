"""What a folder may do that somebody else made: nothing but be read, until its reader says `--trust`.

A folder's files may name code that would be imported (`module:NAME`), and settings that lead out of it: a server, the
variable that holds its key, files elsewhere, a program. Such names pass `check_folder` before anything is done with
them. What the user named himself, or trusted once, is remembered on this machine by its content: a line with a digest
in `record_file()`. So one's own runs ask for nothing, a folder may be moved, and a file that has changed asks again.
"""

import hashlib
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path

from rlvlm.core.errors import UsageError
from rlvlm.core.plugins import GYMNASIUM

_OWN = re.compile(r"rlvlm(\.(?!py:)\w+)+:\w+")  # rlvlm.py:NAME would be a file of that name
_here: set[str] = set()
"""What was trusted in this process: counts also where no record can be kept."""


def record_file() -> Path:
    """Where this user's machine remembers: `$XDG_STATE_HOME/rlvlm/trusted.txt`, by default under `~/.local/state`."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "rlvlm" / "trusted.txt"


def foreign_code(names: Iterable[str]) -> list[str]:
    """Returns the `names` that refer to code as `module:NAME`, which is not rlvlm's own; `gym:ID` is Gymnasium's."""
    return [name for name in names if ":" in (bare := name.removeprefix(GYMNASIUM)) and not _OWN.fullmatch(bare)]


def code_digests(names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of the file that each reference would import, without importing it; empty where there is none."""
    files = {name: _file_of(name) for name in names}
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() if file else "" for name, file in files.items()}


def remember(text: str, code: Iterable[str]) -> None:
    """Notes that the user made or trusts a file of this text (if any), and the code named, as its files are now."""
    new = {_mark_of_text(text) if text else "", *map(_mark_of_code, code)} - _known() - {""}
    _here.update(new)
    with suppress(OSError):  # a read-only home: it is asked for again the next time
        file = record_file()
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(file, "a") as stream:
            stream.write("".join(f"{mark}\n" for mark in new))


def is_trusted(text: str, code: Iterable[str], ways_out: Mapping[str, str]) -> bool:
    """Whether nothing has to be asked; arguments as of `check_folder`."""
    known = _known()
    return all(_mark_of_code(name) in known for name in code) and (not ways_out or _mark_of_text(text) in known)


def check_folder(file: Path, text: str, code: Sequence[str], ways_out: Mapping[str, str], *, trust: bool) -> None:
    """Lets pass what a folder's file names, where it is trusted. Nothing is imported or opened here.

    Args:
        file: that names it.
        text: of the file; empty where it only names code.
        code: references to code that would be imported, as `foreign_code` picks them.
        ways_out: settings that lead out of the folder, by name.
        trust: whether the user gave --trust; it is remembered.

    Raises:
        UsageError: something is not trusted.
    """
    if trust:
        remember(text, code)
    known, fix = _known(), "inspect it; if you trust its author, add --trust (in Python: trust=True), once"
    for name in code:
        # what cannot be found has no mark, and will not be imported either
        if not trust and _mark_of_code(name) not in known:
            raise UsageError(
                f"{file} names code outside of rlvlm, {name}, which would be imported, and so executed", fix
            )
    if ways_out and not trust and _mark_of_text(text) not in known:
        named = ", ".join(f"{name} {value}" for name, value in ways_out.items())
        raise UsageError(f"{file} was not made by you on this machine, and leads out of its folder: {named}", fix)


def _known() -> set[str]:
    """All marks of this user and process."""
    with suppress(OSError, UnicodeDecodeError):
        return _here.union(record_file().read_text().splitlines()) - {""}
    return _here


def _mark_of_text(text: str) -> str:
    return f"{hashlib.sha256(text.encode()).hexdigest()} settings"


def _mark_of_code(name: str) -> str:
    """A line of the record; empty where nothing would be imported. The same file elsewhere has other files beside it,
    and another name in it does other things, so both count.
    """
    digest, file = code_digests([name])[name], _file_of(name)
    return f"{digest} {name!r} in {str(file)!r}" if digest else ""


def _file_of(reference: str) -> Path | None:
    """The file that `module:NAME`, `path/file.py:NAME` or `gym:MODULE:ID` would import, found without importing it."""
    module = reference.removeprefix(GYMNASIUM).partition(":")[0]
    if module.endswith(".py"):
        file = Path(module).expanduser().resolve()
        return file if file.is_file() else None
    top, *inner = module.split(".")
    try:
        # as the import will: the working folder comes last. `find_spec` of a dotted name would import its packages
        spec = importlib.util.find_spec(top) or PathFinder.find_spec(top, [str(Path.cwd())])
        for length in range(len(inner)):
            if spec is None or spec.submodule_search_locations is None:
                return None
            name = ".".join([top, *inner[: length + 1]])
            spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    except (ImportError, ValueError, OSError):  # `__main__` has no spec, and a name may be none
        return None
    file = Path(spec.origin).resolve() if spec and spec.origin else None
    return file if file and file.is_file() else None
