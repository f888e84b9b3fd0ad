"""Base of all reward sources, when they label, and how one is made by its name.

A source of your own is a class with `label`, or a plain function of images and a goal, in a file of yours; no fork and
no registration: `--reward.source my_file:MySource`. One with a short name has a line in `build.py` and in `config.py`.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

from rlvlm.core.state import Stateful
from rlvlm.core.steps import FloatArray, Transitions
from rlvlm.envs.images import FrameStore
from rlvlm.judges.judge import Judge


class Labelling(Enum):
    """When a source's rewards are computed."""

    ON_ARRIVAL = "on_arrival"
    """Once, as transitions enter the replay: the source never changes."""
    WHERE_ANSWERED = "where_answered"
    """Once, on arrival, where a judge gave an answer. NaN marks a transition whose reward is unknown: it
    never enters the replay, since any number in its place would be a guess."""
    ON_CHANGE = "on_change"
    """On arrival, and for the whole replay again whenever `version` moves (a reward model after a fit)."""
    ON_DRAW = "on_draw"
    """For each batch as it is drawn: the source moves with every step (novelty)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceContext:
    """Everything that a reward source may be made from."""

    env: Any
    """The task's env, which gives spaces and draws images; training does not step it."""
    frames: FrameStore
    """Draws images of `transitions.snapshots`, at the judge's size, and remembers them."""
    goal: str
    """Goal phrase of the task, or the user's own."""
    judge: Judge | None = None
    """The run's judge, where it has one."""
    novelty_neighbour: int = 5
    """k of the novelty reward."""


class RewardSource(Stateful):
    """Gives each transition its reward. Never falls back to the env's reward when a judge fails.

    `STATE` names what it remembers, see `Stateful`.
    """

    # the safe default for a source of one's own: a function of the transition alone
    labelling = Labelling.ON_ARRIVAL

    @classmethod
    def build(cls, context: SourceContext) -> Self:
        """The source of a run; sources that need something of `context` override this."""
        return cls()

    @property
    def version(self) -> int:
        """Rises by one each time the source's numbers change."""
        return 0

    def label(self, transitions: Transitions) -> FloatArray:
        """Rewards `[B]` for a batch."""
        raise NotImplementedError(f"{type(self).__name__} needs a method label(transitions) that gives [B] rewards")

    def label_leading(self, transitions: Transitions) -> FloatArray:
        """Rewards `[M]` of as many of the leading rows as can be labelled in a good half second on one core, M >= 1.

        What a source with `Labelling.ON_CHANGE` said before has to be said anew, a piece at a time.
        """
        return self.label(transitions)
