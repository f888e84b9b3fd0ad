"""`rlvlm labels ask`: its arguments."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from rlvlm.core.checks import PositiveInt, check_bounds
from rlvlm.core.console.arguments import parse
from rlvlm.core.errors import EXIT_DONE
from rlvlm.core.foreign import visible
from rlvlm.plugins.people.config import PageConfig


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


def command(words: Sequence[str], prog: str) -> int:
    """Runs `labels ask PLACE`."""
    arguments = parse(AskArguments, words, prog)
    from rlvlm.plugins.people.asking import ask  # reads recordings, which help texts do not

    sys.stdout.write(visible(ask(arguments)))
    return EXIT_DONE
