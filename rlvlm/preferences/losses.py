"""Objectives of an ensemble, for labels of pairs or scores: loss, stopping rule and predictions.

An objective compares predicted returns [..., B, S] of the S sides of examples with their targets [..., B].
"""

import math
from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import softplus

from rlvlm.core import metrics
from rlvlm.preferences.config import RewardModelConfig
from rlvlm.rewards.judged import to_reward

_REWARD_PER_SCORE = to_reward(1.0) - to_reward(0.0)


def preference_loss(returns_left: Tensor, returns_right: Tensor, p_right: Tensor) -> Tensor:
    """Returns the cross-entropy between labels and the Bradley-Terry model, in nats per comparison.

    Args:
        returns_left: [K, B] predicted undiscounted return of the left segments, reward units.
        returns_right: [K, B] predicted undiscounted return of the right segments, reward units.
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


class PreferenceObjective:
    """Labels of pairs by the Bradley-Terry model; a fit ends on training accuracy, as in PEBBLE's code."""

    quality = metrics.REWARD_ACCURACY
    """Metric of the quotient of the numbers from `grade`."""
    ends_on_held_out = False
    """Whether `is_reached` uses held-out answers."""

    def loss(self, returns: Tensor, targets: Tensor, config: RewardModelConfig) -> Tensor:
        """Returns [K] mean losses of the members, nats per comparison; `returns` are [K, B, 2], `targets` [K, B]."""
        # smoothing: p + s (1/2 - p), which moves every label by the share s towards a tie
        return preference_loss(returns[..., 0], returns[..., 1], targets + config.label_smoothing * (0.5 - targets))

    def grade(self, returns: Tensor, targets: Tensor) -> tuple[float, int]:
        """Returns how many decided labels the members agree with, in all, and how many there are.

        The quotient over an epoch is its quality.
        """
        is_decided = targets != 0.5  # a tie agrees with neither side
        agrees = (returns[..., 1] > returns[..., 0]) == (targets > 0.5)
        return int((agrees & is_decided).sum()), int(is_decided.sum())

    def is_reached(self, quality: float, held_out: Callable[[], float], config: RewardModelConfig) -> bool:
        """Returns whether a fit may end: the training accuracy is high enough.

        Args:
            quality: quality of the last epoch, on its training examples.
            held_out: returns the current quality of the members' mean on held-out examples; NaN without any.
            config: has the threshold.
        """
        return quality > config.stop_accuracy

    def predicted(self, returns: Tensor, targets: Tensor) -> list[bool]:
        """Returns, for each decided target of `targets` [N], whether the members' mean [N, 2] favours the same side.

        Random answers are right half of the time. Equal returns for both sides count as wrong: otherwise a constant
        mean would agree with a judge that looks at sides alone.
        """
        # margin and side have the same sign if the mean agrees with the label; ties have side 0
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
        """Returns [K] mean squared errors of the members' rewards, in reward units squared."""
        return (returns[..., 0] - to_reward(targets)).square().mean(-1)

    def grade(self, returns: Tensor, targets: Tensor) -> tuple[float, int]:
        """Returns the sum of squared errors in units of the score, and their number."""
        errors = (returns[..., 0] - to_reward(targets)) / _REWARD_PER_SCORE
        return float(errors.square().sum()), errors.numel()

    def is_reached(self, quality: float, held_out: Callable[[], float], config: RewardModelConfig) -> bool:
        """Returns whether the error on held-out scores is small enough; on training scores if none are held out."""
        # both are mean squares, so the bound on the root mean square is squared
        error = held_out()
        return (quality if math.isnan(error) else error) < config.stop_error**2

    def predicted(self, returns: Tensor, targets: Tensor) -> list[bool]:
        """Returns, for disjoint pairs of successive scores, whether the returns have their order; no ties."""
        # disjoint neighbours, so that each score counts once and answers are independent
        even = len(targets) // 2 * 2
        gains, rises = returns[:even, 0].view(-1, 2).diff().squeeze(1), targets[:even].view(-1, 2).diff().squeeze(1)
        return (gains * rises > 0)[rises != 0].tolist()


Objective = PreferenceObjective | ScoreObjective
PREFERENCE, SCORE = PreferenceObjective(), ScoreObjective()
