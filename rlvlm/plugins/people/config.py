"""Settings of people as judges, of their page, and of `rlvlm labels ask`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

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


@dataclass(frozen=True, kw_only=True)
class AskArguments:
    """Let people answer questions in a browser, on a page of this machine behind a token."""

    place: tyro.conf.Positional[Path]
    """Folder of a run, label store, or recorded data as for `rlvlm score`."""
    page: Annotated[PageConfig, tyro.conf.arg(name="")] = field(default_factory=PageConfig)
    questions: Literal["auto", "waiting", "answered"] = "auto"
    """waiting: questions that a run asks people, now and later; answered: those that other judges answered, to
    compare a person with them; auto: waiting if a run asks people, else answered. For recorded data the questions
    are pairs of frames and of ends of episodes."""
    max_questions: PositiveInt | None = None
    """Number of questions drawn at random from those that other judges answered, >= 1; by default all."""
    agreement: PositiveInt = 1
    """Number of different people who answer each of these questions, >= 1."""
    goal: str = ""
    """Goal in the questions, instead of recorded episodes' own sentences."""
    camera: str = ""
    """Camera of recorded data to show; by default the first that is not a wrist's."""
    every: PositiveInt = 10
    """Interval between frames of recorded data that may be shown, >= 1."""
    pairs: PositiveInt = 4
    """Pairs of frames per recorded episode, >= 1."""
    trust: bool = False
    """Trust the code, servers and files elsewhere that the folder names: its code is imported, and so executed."""
    seed: int = 0
    """Seed of the random draws."""

    def __post_init__(self) -> None:
        check_bounds(self, "--")
