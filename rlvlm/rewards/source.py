"""Base class of all reward sources, the times at which they label, and the context that they are built from.

Your own source is a class with `label`, or a plain function of images and a goal, in your own file, without a fork or a
registration: `--reward.source my_file:MySource`. A source with a short name has a line in `build.py` and in
`config.py`.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Self

from rlvlm.core.state import Stateful
from rlvlm.core.steps import FloatArray, Transitions
from rlvlm.envs.env import StepEnv
from rlvlm.envs.images import FrameStore
from rlvlm.judges.judge import Judge


class Labelling(Enum):
    """Time at which a source's rewards are computed."""

    ON_ARRIVAL = "on_arrival"
    """Once, as transitions enter the replay: the source never changes."""
    WHERE_ANSWERED = "where_answered"
    """Once, on arrival, if a judge answers. NaN marks a transition with unknown reward: it never enters the replay,
    since any number in its place would be a guess."""
    ON_CHANGE = "on_change"
    """On arrival, and again for the whole replay whenever `version` changes (a reward model after a fit)."""
    ON_DRAW = "on_draw"
    """For each batch as it is drawn: the source changes with every step (novelty)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceContext:
    """Everything that a reward source may be built from."""

    env: StepEnv
    """The task's env, for its spaces and for drawing images; training does not step it."""
    frames: FrameStore
    """Draws and caches images of `transitions.snapshots`, at the judge's size."""
    goal: str
    """Goal phrase of the task, or the user's own."""
    judge: Judge | None = None
    """The run's judge, if it has one."""
    novelty_neighbour: int = 5
    """k of the novelty reward."""


class RewardSource(Stateful):
    """Gives each transition its reward. Never falls back to the env's reward if a judge fails.

    `STATE` names the attributes in its checkpoint, see `Stateful`.
    """

    # the safe default for a user's source: a function of the transition alone
    labelling = Labelling.ON_ARRIVAL

    @classmethod
    def build(cls, context: SourceContext) -> Self:
        """Builds the source of a run; sources that need something of `context` override this."""
        return cls()

    @property
    def version(self) -> int:
        """Number that rises by one each time the source's rewards change."""
        return 0

    def label(self, transitions: Transitions) -> FloatArray:
        """Returns rewards [B] for a batch."""
        raise NotImplementedError(f"{type(self).__name__} needs a method label(transitions) that gives [B] rewards")

    def label_leading(self, transitions: Transitions) -> FloatArray:
        """Returns rewards [M] of as many leading rows as can be labelled in about half a second on one core, M >= 1.

        Used to relabel the replay of a source with `Labelling.ON_CHANGE` in pieces.
        """
        return self.label(transitions)


class EnvironmentReward(RewardSource):
    """The env's true reward, unchanged: the baseline for learned and judged ones."""

    def label(self, transitions: Transitions) -> FloatArray:
        return transitions.env_rewards


class SuccessReward(RewardSource):
    """Reward of 1 if the env's own success test holds after the action, else 0."""

    def label(self, transitions: Transitions) -> FloatArray:
        return transitions.success
