"""The learned reward as a source. Handed to algorithms by the loop."""

from rlvlm.preferences.dataset import Steps
from rlvlm.preferences.model.reward_model import RewardModel
from rlvlm.rewards.source import Labelling
from rlvlm.types.steps import FloatArray, Transitions


class LearnedReward:
    """Mean prediction of a reward model's members. Changes with every fit.

    Args:
        model: fitted elsewhere. Before its first fit the numbers mean nothing, and `version` is 0.
    """

    labelling = Labelling.ON_CHANGE

    def __init__(self, model: RewardModel) -> None:
        self._model = model

    @property
    def version(self) -> int:
        return self._model.num_fits

    @property
    def is_trusted(self) -> bool:
        """Whether the model has foretold enough answers to reward anybody."""
        return self._model.is_trusted

    def label(self, transitions: Transitions) -> FloatArray:
        """Rewards `[B]`."""
        return self._model.ensemble.rewards(Steps.of(transitions))

    def label_leading(self, transitions: Transitions) -> FloatArray:
        """Rewards `[M]` of as many of the leading rows as can be labelled within a good half second, M >= 1."""
        return self._model.ensemble.leading_rewards(Steps.of(transitions))
