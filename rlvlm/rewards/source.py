"""What every source of reward has in common, and when its numbers are taken."""

from enum import Enum
from typing import Protocol

from rlvlm.core.steps import FloatArray, Transitions


class Labelling(Enum):
    """When a source's rewards are computed."""

    ON_ARRIVAL = "on_arrival"
    """Once, as transitions enter the replay: the source never changes."""
    WHERE_ANSWERED = "where_answered"
    """Once, on arrival, where a judge gave an answer. NaN marks a transition that nobody can say anything about: it
    never enters the replay, since any number in its place would be a guess."""
    ON_CHANGE = "on_change"
    """On arrival, and for the whole replay again whenever `version` moves (a reward model after a fit)."""
    ON_DRAW = "on_draw"
    """For each batch as it is drawn: the source moves with every step (novelty)."""


class RewardSource(Protocol):
    """Gives each transition its reward. Never falls back to the env's reward when a judge fails."""

    labelling: Labelling

    @property
    def version(self) -> int:
        """Rises by one each time the source's numbers change."""
        ...

    def label(self, transitions: Transitions) -> FloatArray:
        """Rewards `[B]` for a batch."""
        ...


class ChangingSource(RewardSource, Protocol):
    """A source with `Labelling.ON_CHANGE`: what it said before has to be said anew, a piece at a time."""

    def label_leading(self, transitions: Transitions) -> FloatArray:
        """Rewards `[M]` of as many of the leading rows as can be labelled in a good half second on one core, M >= 1."""
        ...
