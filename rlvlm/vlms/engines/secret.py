"""The key of a paid API: read from a place that only its owner can read, and never written anywhere."""

import codecs
import os
import stat
from pathlib import Path
from typing import NoReturn

from rlvlm.core.errors import ModelUnavailable
from rlvlm.vlms.config import ApiConfig

MASK = "[key]"
_MAX_BYTES = 4_096
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class Secret:
    """A value that is only shown on request: not in a repr, a log, a pickle or a traceback's message."""

    __slots__ = ("__value",)

    def __init__(self, value: str) -> None:
        self.__value = value

    def reveal(self) -> str:
        """Returns the value, for the one call that needs it."""
        return self.__value

    def scrub(self, text: str) -> str:
        """Returns `text` with every occurrence of the value masked: servers like to repeat what they were sent."""
        return text.replace(self.__value, MASK) if self.__value else text

    def __bool__(self) -> bool:
        return bool(self.__value)

    def __repr__(self) -> str:
        return MASK

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret does not travel; send the name of the file or variable that holds it")


def read_key(config: ApiConfig, *, usual: tuple[str, ...], is_needed: bool) -> Secret:
    """Returns the key that the config points to; an empty one if none is needed.

    A server of your own (`base_url`) never gets the key in the provider's usual variable, which is meant for the
    provider only.

    Args:
        config: settings that name a file or a variable, or neither.
        usual: variables that the provider's own tools read; the first that is set counts.
        is_needed: whether the server requires a key.

    Raises:
        ModelUnavailable: a required key is missing, or the file is readable by others or unreadable.
    """
    if config.key_file:
        return read_secret(Path(config.key_file).expanduser())
    names = (config.key_env,) if config.key_env else () if config.base_url else usual
    value = next((os.environ[name].strip() for name in names if os.environ.get(name, "").strip()), "")
    if not value and (is_needed or config.key_env):
        raise ModelUnavailable(
            f"the API needs a key and {' or '.join(names) or 'no place to look for one'} is not set",
            f"write the key to a file that only you can read (chmod 600) and name it with --{config.section}.key-file",
        )
    return Secret(value)


def read_secret(file: Path) -> Secret:
    """Returns the single line in `file`, which only its owner may read."""
    try:
        with file.open("rb") as stream:
            # mode of the open file: its name may refer to another file a moment later
            mode = os.fstat(stream.fileno()).st_mode
            if stat.S_ISREG(mode) and mode & _OTHERS:
                raise ModelUnavailable(
                    f"the key in {file} can be read by others (mode {stat.S_IMODE(mode):o})", f"chmod 600 {file}"
                )
            data = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ModelUnavailable(
            f"the key file {file} cannot be read: {error.strerror or error}",
            "name a file that holds the key with key_file",
        ) from error
    key = data.removeprefix(codecs.BOM_UTF8).decode("ascii", errors="replace").strip()  # Notepad writes such a mark
    if not key or len(data) > _MAX_BYTES or not key.isprintable() or " " in key or "\ufffd" in key:
        raise ModelUnavailable(
            f"{file} does not hold a key: one word of plain characters is expected", "write the key alone into the file"
        )
    return Secret(key)
