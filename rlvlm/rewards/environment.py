"""The env's own rewards: its true reward, and success alone. Baselines for learned and judged rewards."""

from rlvlm.core.steps import FloatArray, Transitions
from rlvlm.rewards.source import RewardSource


class EnvironmentReward(RewardSource):
    """The env's true reward, unchanged."""

    def label(self, transitions: Transitions) -> FloatArray:
        """Returns the true rewards [B]."""
        return transitions.env_rewards


class SuccessReward(RewardSource):
    """Reward of 1 if the env's own success test holds after the action, else 0."""

    def label(self, transitions: Transitions) -> FloatArray:
        """Returns the success flags [B], 0 or 1."""
        return transitions.success
