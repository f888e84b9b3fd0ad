"""The env's own rewards: its true reward, and success alone. What learned and judged rewards are compared with."""

from rlvlm.core.steps import FloatArray, Transitions
from rlvlm.rewards.source import RewardSource


class EnvironmentReward(RewardSource):
    """The env's true reward, as the env gives it."""

    def label(self, transitions: Transitions) -> FloatArray:
        """The true rewards `[B]`."""
        return transitions.env_rewards


class SuccessReward(RewardSource):
    """1 where the env's own success test holds after the action, else 0."""

    def label(self, transitions: Transitions) -> FloatArray:
        """The success flags `[B]`, 0 or 1."""
        return transitions.success
