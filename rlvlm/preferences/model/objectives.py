"""What an ensemble is fitted to, when a fit is good enough and which answers it predicts: labels of pairs, or scores.

Pure functions first, then the two objectives that the reward model chooses between.
"""

import math
from collections.abc import Callable
from typing import Protocol

from torch import Tensor
from torch.nn.functional import softplus

from rlvlm.core import metrics
from rlvlm.preferences.config import RewardModelConfig
from rlvlm.rewards.judged import to_reward

_REWARD_PER_SCORE = to_reward(1.0) - to_reward(0.0)


def preference_loss(returns_left: Tensor, returns_right: Tensor, p_right: Tensor) -> Tensor:
    """Cross-entropy between labels and the Bradley-Terry model, in nats per comparison.

    Args:
        returns_left: [K, B] predicted undiscounted return of the left segments, reward units.
        returns_right: [K, B] likewise, right segments.
        p_right: [K, B] or [B] label in [0, 1]; 0.5 is a tie.

    Returns:
        [K] mean loss of each member.

    Raises:
        ValueError: the two returns differ in shape.

    Source: Christiano et al. 2017, arXiv:1706.03741, sec. 2.2.3. Departure: no 10 % random-answer term.
    """
    if returns_left.shape != returns_right.shape:
        raise ValueError(f"returns must share shape [K, B], got {returns_left.shape} and {returns_right.shape}")
    margin = returns_right - returns_left  # [K, B]
    return (softplus(margin) - p_right * margin).mean(-1)


def num_right(returns_left: Tensor, returns_right: Tensor, p_right: Tensor) -> int:
    """How many decided labels the members agree with, all members together; shapes as in `preference_loss`."""
    agrees = (returns_right > returns_left) == (p_right > 0.5)
    return int((agrees & (p_right != 0.5)).sum())


def score_loss(rewards: Tensor, scores: Tensor) -> Tensor:
    """Mean squared distance of predicted rewards from what the scores say, `to_reward`.

    Args:
        rewards: [K, B] predicted, reward units.
        scores: [K, B] or [B] in [0, 1].

    Returns:
        [K] of each member, in reward units squared.
    """
    return (rewards - to_reward(scores)).square().mean(-1)


class Objective(Protocol):
    """Between predicted returns `[..., B, S]` of the sides of examples and their targets `[..., B]`."""

    quality: str
    """Metric that `grade` adds up to."""
    ends_on_held_out: bool
    """Whether `is_reached` looks at answers that never train."""

    def loss(self, returns: Tensor, targets: Tensor, config: RewardModelConfig) -> Tensor:
        """[K] mean loss of each member; `returns` are [K, B, S], `targets` [K, B]."""
        ...

    def grade(self, returns: Tensor, targets: Tensor) -> tuple[float, int]:
        """A sum over all members and examples, and over how many: their quotient is the quality of an epoch."""
        ...

    def is_reached(self, quality: float, held_out: Callable[[], float], config: RewardModelConfig) -> bool:
        """Whether a fit may end.

        Args:
            quality: of the last epoch, on what it trained on.
            held_out: gives the same of the members' mean now, on what never trains; NaN where nothing is held out.
            config: says what is enough.
        """
        ...

    def predicted(self, returns: Tensor, targets: Tensor) -> list[bool]:
        """Whether the members' mean `[N, S]` ordered each pair right on which `targets` `[N]` decide.

        Of answers that have nothing to do with what is shown, half are right. A mean that says the same of both sides
        has told nothing and is not right: else one that is constant would agree with a judge who looks at places alone.
        """
        ...


class PreferenceObjective:
    """Labels of pairs by the Bradley-Terry model; a fit ends on training accuracy, as in PEBBLE's code."""

    quality = metrics.REWARD_ACCURACY
    ends_on_held_out = False

    def loss(self, returns: Tensor, targets: Tensor, config: RewardModelConfig) -> Tensor:
        """[K] nats per comparison."""
        return preference_loss(returns[..., 0], returns[..., 1], targets + config.label_smoothing * (0.5 - targets))

    def grade(self, returns: Tensor, targets: Tensor) -> tuple[float, int]:
        """How many decided labels are met, and how many there are."""
        return num_right(returns[..., 0], returns[..., 1], targets), int((targets != 0.5).sum())

    def is_reached(self, quality: float, held_out: Callable[[], float], config: RewardModelConfig) -> bool:
        """Whether the training accuracy is high enough."""
        return quality > config.stop_accuracy

    def predicted(self, returns: Tensor, targets: Tensor) -> list[bool]:
        """Whether the side that is called better has the larger return, for each label that decides."""
        margin, side = returns[:, 1] - returns[:, 0], targets - 0.5
        return (margin * side > 0)[side != 0].tolist()


class ScoreObjective:
    """Scores by least squares; a fit ends on the error of held-out scores.

    Source: the VLM Score baseline of Wang et al. 2024 (RL-VLM-F), arXiv:2402.03681. Departure: its code ends a fit when
    a squared error, which should fall, exceeds 0.97.
    """

    quality = metrics.REWARD_TRAIN_ERROR
    ends_on_held_out = True

    def loss(self, returns: Tensor, targets: Tensor, config: RewardModelConfig) -> Tensor:
        """[K] reward units squared."""
        return score_loss(returns[..., 0], targets)

    def grade(self, returns: Tensor, targets: Tensor) -> tuple[float, int]:
        """Sum of squared errors in units of the score, and how many."""
        errors = (returns[..., 0] - to_reward(targets)) / _REWARD_PER_SCORE
        return float(errors.square().sum()), errors.numel()

    def is_reached(self, quality: float, held_out: Callable[[], float], config: RewardModelConfig) -> bool:
        """Whether held-out scores are missed by little enough; scores in training where none are held out."""
        error = held_out()
        return (quality if math.isnan(error) else error) < config.stop_error**2

    def predicted(self, returns: Tensor, targets: Tensor) -> list[bool]:
        """Whether each score and the next one, no score in two pairs, are in the order of their returns."""
        even = len(targets) // 2 * 2
        gains, rises = returns[:even, 0].view(-1, 2).diff().squeeze(1), targets[:even].view(-1, 2).diff().squeeze(1)
        return (gains * rises > 0)[rises != 0].tolist()


PREFERENCE, SCORE = PreferenceObjective(), ScoreObjective()
