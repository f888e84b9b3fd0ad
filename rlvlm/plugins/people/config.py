"""Settings of people as judges."""

from dataclasses import dataclass
from pathlib import Path

from rlvlm.core.checks import PositiveInt, check_bounds
from rlvlm.core.leads import Address, FilePath

LABEL_PORT = 8731
"""Default port of the page on which people answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HumanConfig:
    """Questions to people: backend human."""

    agreement: PositiveInt = 1
    """Number of people who answer each question, >= 1; the answer of more than half of them counts."""

    def __post_init__(self) -> None:
        check_bounds(self, "judge.human")


@dataclass(frozen=True, kw_only=True, slots=True)
class PageConfig:
    """Address of the labelling page, and the people who answer on it."""

    people: tuple[str, ...] = ("me",)
    """Names of the people; each gets a link."""
    host: Address = "127.0.0.1"
    """Address to listen on."""
    port: int = LABEL_PORT
    """Port to listen on; if it is taken, the next free one."""
    allowed_hosts: tuple[str, ...] = ()
    """Further host names under which browsers may call, besides those of this machine."""
    token_file: FilePath = ""
    """File with the token of the links, mode 0600; created with a random token if missing. Empty:
    `~/.rlvlm/ask_token`."""

    def __post_init__(self) -> None:
        if not self.people:
            raise ValueError("--people needs at least one name, got none")
        from rlvlm.plugins.people.queue import check_name  # help texts should not wait for numpy

        for name in self.people:
            check_name(name)

    @property
    def token_path(self) -> Path:
        """Path of the token's file, another than the HTTP server's, because this token is part of links."""
        return Path(self.token_file).expanduser() if self.token_file else Path.home() / ".rlvlm" / "ask_token"
