"""The env's own rewards, dense and sparse: the sources that a learned reward is compared with."""

from rlvlm.core.steps import FloatArray, Transitions
from rlvlm.rewards.source import Labelling


class EnvironmentReward:
    """The env's true reward, as the env gives it."""

    labelling = Labelling.ON_ARRIVAL

    @property
    def version(self) -> int:
        return 0

    def label(self, transitions: Transitions) -> FloatArray:
        """The true rewards `[B]`."""
        return transitions.env_rewards


class SparseSuccess:
    """1 where the env's own success test holds after the action, else 0."""

    labelling = Labelling.ON_ARRIVAL

    @property
    def version(self) -> int:
        return 0

    def label(self, transitions: Transitions) -> FloatArray:
        """The success flags `[B]`, 0 or 1."""
        return transitions.success
