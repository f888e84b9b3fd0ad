"""The bearer token of a gateway: random, in a file that only its owner can read. Configs name the file, no value."""

import os
import re
import secrets
import stat
from pathlib import Path

from rlvlm.core.errors import MachineError

MIN_CHARS = 32
_ALLOWED = re.compile(rb"[A-Za-z0-9._~+/=-]+")


def make_token(path: Path) -> bool:
    """Writes a random token to `path`, mode 0600, unless the file is there; returns whether it was made now.

    Raises:
        MachineError: the file cannot be written.
    """
    if os.path.lexists(path):
        return False
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as stream:
            stream.write(secrets.token_urlsafe(32) + "\n")
        try:
            os.link(draft, path)  # fails where another process was faster: its token counts
        except FileExistsError:
            return False
        finally:
            draft.unlink()
    except OSError as error:
        raise MachineError(
            f"the token file {path} cannot be written: {error.strerror}", "name another place: --token-file FILE"
        ) from error
    return True


def read_token(path: Path) -> bytes:
    """The token in `path`, without its line end.

    Raises:
        MachineError: the file is missing or no regular file, another user could read or write it, or what it holds is
            no token. The message never quotes what it holds.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise MachineError(
            f"the token file {path} cannot be read: {error.strerror}", "name another: --token-file FILE"
        ) from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise MachineError(f"the token file {path} is no regular file", "name another: --token-file FILE")
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise MachineError(
                f"the token file {path} must be yours alone, its mode is {found.st_mode & 0o777:03o}",
                f"chmod 600 {path}",
            )
        token = os.read(descriptor, 4_097).strip()
    finally:
        os.close(descriptor)
    if not MIN_CHARS <= len(token) <= 4_096 or not _ALLOWED.fullmatch(token):
        raise MachineError(
            f"the token file {path} must hold one line of at least {MIN_CHARS} letters and digits",
            f"delete it, and a new one is made: rm {path}",
        )
    return token
