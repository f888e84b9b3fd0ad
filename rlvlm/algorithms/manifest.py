"""What a finished folder holds, as SHA-256 of each file: damage is found before anything is restored from it.

Light: whoever only looks for a sound checkpoint loads neither torch nor Ray.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from rlvlm.core.errors import RunError

MANIFEST = "manifest.json"
_OLDER = "`rlvlm resume` goes on from the newest sound checkpoint of the run; others can be named as its folder"


class CorruptCheckpoint(RunError):  # noqa: N818 - named for what is found, as in the other rooms
    """A checkpoint's file is missing or differs from what was written."""

    exit_code = 3


def write_manifest(folder: Path, names: Iterable[str]) -> None:
    """Writes down the files `names` of `folder` as they are now; the caller syncs."""
    (folder / MANIFEST).write_text(json.dumps({name: _digest(folder / name) for name in names}, indent=1))


def read_manifest(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 by name of the files that `folder` was written with.

    Args:
        folder: of the manifest.
        names: files that must be listed; others are listed in a folder that somebody else has written.

    Raises:
        CorruptCheckpoint: there is no manifest, or it lists other files.
    """
    file = folder / MANIFEST
    try:
        digests = json.loads(file.read_bytes())
    except OSError as error:
        raise CorruptCheckpoint(f"cannot read {file}: {error.strerror}", _OLDER) from error
    except ValueError:
        digests = None
    if not isinstance(digests, dict) or not set(names) <= set(digests):
        raise CorruptCheckpoint(f"{file} is not a manifest that lists the checkpoint's files", _OLDER)
    return digests


def check_file(path: Path, digest: str) -> None:
    """Passes where a file is the one that was written.

    Raises:
        CorruptCheckpoint: it is missing, or another.
    """
    try:
        found = _digest(path)
    except OSError as error:
        raise CorruptCheckpoint(f"cannot read {path}: {error.strerror}", _OLDER) from error
    if found != digest:
        raise CorruptCheckpoint(f"{path} is not what was written: its SHA-256 differs from the manifest's", _OLDER)


def check_folder(folder: Path) -> None:
    """Passes where every file that the manifest of `folder` lists is there as it was written.

    Raises:
        CorruptCheckpoint: says which is not.
    """
    for name, digest in read_manifest(folder, ()).items():
        check_file(folder / name, digest)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
