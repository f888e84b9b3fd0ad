"""Trust in foreign folders: a folder that somebody else made may only be read, until its reader says `--trust`.

A folder's files may name code that would be imported (`module:NAME`), and settings that lead out of it: a server, the
variable that holds its key, files elsewhere, a program. The types of the settings say which do (`rlvlm.core.leads`).
Such names pass `check_folder` before they are used. Names that the user gave himself, or trusted once, are remembered
on this machine by content: a line with a digest in `record_file()`. So one's own runs need no confirmation, a folder
may be moved, and a changed file must be confirmed again.
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
from rlvlm.core.leads import Lead, Leading, find_leads
from rlvlm.core.own_code import note_digest
from rlvlm.core.references import GYMNASIUM

_OWN = re.compile(r"rlvlm(\.(?!py:)\w+)+:\w+")  # rlvlm.py:NAME would be a file of that name
USUAL_KEYS = ("OPENAI_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY")
"""Variables with keys that go to their own provider if no server is named."""
_here: set[str] = set()
"""Marks that were trusted in this process: they count even if no record can be kept."""


def record_file(name: str = "trusted.txt") -> Path:
    """Returns a record of the user's on this machine: `$XDG_STATE_HOME/rlvlm/NAME`, by default in ~/.local/state."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "rlvlm" / name


def foreign_code(names: Iterable[str]) -> list[str]:
    """Returns the `names` that refer to code as `module:NAME`, which is not rlvlm's own; `gym:ID` is Gymnasium's."""
    return [name for name in names if ":" in (bare := name.removeprefix(GYMNASIUM)) and not _OWN.fullmatch(bare)]


def names_of(*configs: object) -> tuple[list[str], dict[str, str]]:
    """Returns what config trees refer to outside of their folder: code outside of rlvlm, and all else by setting.

    A model is one of them where its name is a folder of this machine, not where it is a name on the hub. A key in its
    provider's usual variable is none, as long as no server is named beside it.
    """
    leads = [lead for config in configs for lead in find_leads(config)]
    servers = {_section(lead) for lead in leads if lead.kind is Lead.ADDRESS}
    code: list[str] = []
    out: dict[str, str] = {}
    for lead in leads:
        is_usual_key = lead.kind is Lead.KEY and lead.value in USUAL_KEYS and _section(lead) not in servers
        is_hub_model = lead.kind is Lead.MODEL and not _is_local(lead.value)
        if lead.kind is Lead.CODE:
            code += [name for name in foreign_code([lead.value]) if name not in code]
        elif not is_usual_key and not is_hub_model:
            out[lead.name] = lead.value
    return code, out


def _section(lead: Leading) -> str:
    return lead.name.rpartition(".")[0]


def _is_local(model: str) -> bool:
    """Returns whether a model's name is a path: of an existing folder, or one that no hub name can look like."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model or Path(model).is_dir()


def code_digests(names: Iterable[str]) -> dict[str, str]:
    """Returns the SHA-256 of the file that each reference would import, without importing it; empty if missing."""
    digests: dict[str, str] = {}
    for name in names:
        file = _file_of(name)
        digests[name] = hashlib.sha256(file.read_bytes()).hexdigest() if file else ""
        if file and file.suffix == ".py":
            note_digest(file, digests[name])  # what is imported must be what was compared
    return digests


def remember(text: str, code: Iterable[str]) -> None:
    """Records that the user made or trusts a file of this text (if any), and the named code with its current files."""
    new = {_mark_of_text(text) if text else "", *map(_mark_of_code, code)} - _known() - {""}
    _here.update(new)
    with suppress(OSError):  # a read-only home: confirmation is needed again the next time
        file = record_file()
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(file, "a") as stream:
            stream.write("".join(f"{mark}\n" for mark in new))


def is_trusted(text: str, code: Iterable[str], out: Mapping[str, str]) -> bool:
    """Returns whether no confirmation is needed for a file of this text; `code` and `out` as from `names_of`."""
    known = _known()
    return all(_mark_of_code(name) in known for name in code) and (not out or _mark_of_text(text) in known)


def check_folder(file: Path, text: str, code: Sequence[str], out: Mapping[str, str], *, trust: bool) -> None:
    """Checks that everything that a folder's file names is trusted. Nothing is imported or opened here.

    Args:
        file: file with the names.
        text: content of the file; empty if it only names code.
        code: references to code that would be imported, as from `names_of` or `foreign_code`.
        out: settings that lead out of the folder, by name.
        trust: whether the user gave --trust; it is remembered.

    Raises:
        UsageError: something is not trusted.
    """
    if trust:
        remember(text, code)
    known, fix = _known(), "inspect it; if you trust its author, add --trust (in Python: trust=True), once"
    for name in code:
        # missing files have no mark, and will not be imported either
        if not trust and _mark_of_code(name) not in known:
            raise UsageError(
                f"{file} names code outside of rlvlm, {name}, which would be imported, and so executed", fix
            )
    if out and not trust and _mark_of_text(text) not in known:
        named = ", ".join(f"{name} {value}" for name, value in out.items())
        raise UsageError(f"{file} was not made by you on this machine, and leads out of its folder: {named}", fix)


def _known() -> set[str]:
    """Returns all marks of this user and process."""
    with suppress(OSError, UnicodeDecodeError):
        return _here.union(record_file().read_text().splitlines()) - {""}
    return _here


def _mark_of_text(text: str) -> str:
    return f"{hashlib.sha256(text.encode()).hexdigest()} settings"


def _mark_of_code(name: str) -> str:
    """Returns a line of the record; empty if nothing would be imported.

    The same file elsewhere has other files beside it, and another name in it does other things, so both count.
    """
    digest, file = code_digests([name])[name], _file_of(name)
    return f"{digest} {name!r} in {str(file)!r}" if digest else ""


def _file_of(reference: str) -> Path | None:
    """Returns the file that `module:NAME`, `path/file.py:NAME` or `gym:MODULE:ID` would import, without importing."""
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
    except (ImportError, ValueError, OSError):  # `__main__` has no spec, and a name may be invalid
        return None
    file = Path(spec.origin).resolve() if spec and spec.origin else None
    return file if file and file.is_file() else None
