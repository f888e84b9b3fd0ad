"""The learned reward as a source, and how little is known of it. Handed to algorithms by the loop."""

from rlvlm.core.steps import FloatArray, Transitions
from rlvlm.preferences.dataset import Steps
from rlvlm.preferences.model.reward_model import RewardModel
from rlvlm.rewards.source import Labelling


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
        """Whether the model has predicted enough answers to reward anybody."""
        return self._model.is_trusted

    def label(self, transitions: Transitions) -> FloatArray:
        """Rewards `[B]`."""
        return self._model.ensemble.rewards(Steps.of(transitions))

    def label_leading(self, transitions: Transitions) -> FloatArray:
        """Rewards `[M]` of as many of the leading rows as can be labelled within a good half second, M >= 1."""
        return self._model.ensemble.leading_rewards(Steps.of(transitions))


class Disagreement:
    """Standard deviation of a reward model's members, over all K: large where nothing like it was asked about.

    Comparisons leave a constant of each member's reward open, so that a part of it says nothing about the step.

    Source: Liang et al. 2022 (RUNE), arXiv:2205.12401, sec. 4, the intrinsic reward.

    Args:
        model: fitted elsewhere; K >= 2.
    """

    labelling = Labelling.ON_CHANGE

    def __init__(self, model: RewardModel) -> None:
        self._model = model

    @property
    def version(self) -> int:
        return self._model.num_fits

    def label(self, transitions: Transitions) -> FloatArray:
        """Bonuses `[B]`, >= 0, in reward units."""
        return self._model.ensemble.predict(Steps.of(transitions)).std(axis=0)
