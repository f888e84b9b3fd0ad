"""An ensemble that learns from comparisons which steps are better. Fitted by the loop, read by `source`."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from rlvlm import metrics
from rlvlm.errors import NumericsError
from rlvlm.preferences.config import RewardModelConfig
from rlvlm.preferences.dataset import Comparisons, Steps
from rlvlm.preferences.networks import RewardInput
from rlvlm.types import FloatArray

_ROWS_PER_PASS = 512
"""Rows read at once when predicting: bounds the memory of activations."""
_SMALLEST_SPREAD = 1e-4
"""Predictions that differ by less are noise, and are not blown up to a reward."""


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


@dataclass(frozen=True, slots=True)
class _Lesson:
    """The comparisons of one fit as tensors."""

    rows: Tensor
    """[U, ...] what the networks read."""
    places: Tensor
    """[N, 2, L] which row each step shows; left, then right."""
    p_right: Tensor
    """[N]."""


class RewardModel:
    """K networks that differ in their first weights and in the order in which they see the same comparisons.

    Weights and Adam's state live on from fit to fit.

    Source: Wang et al. 2024 (RL-VLM-F), arXiv:2402.03681, and the code of Lee et al. 2021 (PEBBLE): early stop on
    training accuracy, no bootstrap samples. Departures: a fit is also bounded in gradient steps; and rewards have mean
    0 and standard deviation 1 over the compared steps, as in Christiano et al. 2017, arXiv:1706.03741, sec. 2.2.
    Comparisons fix neither, and a good judge makes it matter: its labels are learned within an epoch or two, the fit
    ends with all predictions within a thousandth of one another, and SAC cannot see a reward so flat.

    Args:
        inputs: what the networks look at.
        config: ensemble, optimiser, when to stop.
        seed: of weights and shuffling; the global generator is not touched.
    """

    def __init__(self, inputs: RewardInput, config: RewardModelConfig, seed: int) -> None:
        self._inputs = inputs
        self._config = config
        self._rng = torch.Generator().manual_seed(seed)
        self._members = [inputs.build_network(self._rng) for _ in range(config.ensemble)]
        self._adam = torch.optim.Adam([weight for member in self._members for weight in member.parameters()], config.lr)
        self._num_fits = 0
        self._centre, self._spread = 0.0, 1.0

    @property
    def num_fits(self) -> int:
        """Fits so far."""
        return self._num_fits

    def fit(self, comparisons: Comparisons) -> dict[str, float]:
        """Trains on all comparisons, at least one, and returns loss and accuracy of the last epoch.

        Raises:
            NumericsError: the loss is not finite.
        """
        lesson = self._prepare(comparisons)
        if not self._num_fits:
            for member in self._members:
                member.calibrate(lesson.rows)
        config, losses, accuracy, updates, epoch = self._config, [], 0.0, 0, 0
        while epoch < config.max_epochs and updates < config.max_updates and accuracy <= config.stop_accuracy:
            losses, accuracy = self._run_epoch(lesson, config.max_updates - updates)
            updates += len(losses)
            epoch += 1
        self._num_fits += 1
        compared = self.predict(comparisons.steps()).mean(axis=0)
        self._centre, self._spread = float(compared.mean()), max(float(compared.std()), _SMALLEST_SPREAD)
        return {
            metrics.REWARD_LOSS: float(np.mean(losses)),
            metrics.REWARD_ACCURACY: accuracy,
            metrics.REWARD_EPOCHS: float(epoch),
        }

    @torch.no_grad()
    def predict(self, steps: Steps) -> FloatArray:
        """Each member's reward of each step, `[K, N]` in [-1, 1]; steps that look the same are read once."""
        first, kind = self._inputs.distinct(steps)
        parts = [
            torch.stack([member(rows) for member in self._members])
            for chosen in np.array_split(first, range(_ROWS_PER_PASS, len(first), _ROWS_PER_PASS))
            for rows in (self._inputs.rows(steps, chosen),)
        ]
        return torch.cat(parts, dim=1).numpy()[:, kind]

    def rewards(self, steps: Steps) -> FloatArray:
        """The members' mean `[N]`, with mean 0 and standard deviation 1 over the steps compared at the last fit."""
        return (self.predict(steps).mean(axis=0) - np.float32(self._centre)) / np.float32(self._spread)

    def get_state(self) -> dict[str, Any]:
        """Weights, Adam's state, scale and generator, as arrays and numbers."""
        adam = self._adam.state_dict()["state"]
        return {
            "members": [{name: weight.numpy().copy() for name, weight in member.state_dict().items()}
                        for member in self._members],
            "adam": {str(at): {name: value.numpy().copy() for name, value in slot.items()}
                     for at, slot in adam.items()},
            "rng": self._rng.get_state().numpy().copy(),
            "num_fits": self._num_fits,
            "centre": self._centre,
            "spread": self._spread,
        }  # fmt: skip

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned."""
        for member, weights in zip(self._members, state["members"], strict=True):
            member.load_state_dict({name: torch.tensor(weight) for name, weight in weights.items()})
        slots = {int(at): {name: torch.tensor(value) for name, value in slot.items()}
                 for at, slot in state["adam"].items()}  # fmt: skip
        self._adam.load_state_dict({**self._adam.state_dict(), "state": slots})
        self._rng.set_state(torch.tensor(state["rng"]))
        self._num_fits = int(state["num_fits"])
        self._centre, self._spread = float(state["centre"]), float(state["spread"])

    def _prepare(self, comparisons: Comparisons) -> _Lesson:
        steps = comparisons.steps()
        first, kind = self._inputs.distinct(steps)
        places = torch.from_numpy(kind).view(len(comparisons), 2, comparisons.segment_steps)
        return _Lesson(self._inputs.rows(steps, first), places, torch.from_numpy(comparisons.p_right))

    def _run_epoch(self, lesson: _Lesson, max_updates: int) -> tuple[list[float], float]:
        """One pass over the comparisons, each member in its own order.

        Returns:
            The members' mean loss of each update, and their mean accuracy, each batch's taken before its update.
        """
        num = len(lesson.p_right)
        orders = torch.stack([torch.randperm(num, generator=self._rng) for _ in self._members])  # [K, N]
        losses, right, decided = [], 0, 0
        for chosen in orders.split(self._config.batch_size, dim=1)[:max_updates]:
            returns = torch.stack([self._returns(member, lesson.rows, lesson.places[which])
                                   for member, which in zip(self._members, chosen, strict=True)])  # [K, B, 2]
            p_right = lesson.p_right[chosen]  # [K, B]
            loss = preference_loss(returns[..., 0], returns[..., 1], p_right)
            losses.append(self._update(loss))
            right += num_right(returns[..., 0], returns[..., 1], p_right)
            decided += int((p_right != 0.5).sum())
        return losses, right / max(decided, 1)

    @staticmethod
    def _returns(member: nn.Module, rows: Tensor, places: Tensor) -> Tensor:
        """Predicted returns `[B, 2]` of both sides; each row that the batch `places` `[B, 2, L]` shows is read once."""
        shown, place = places.unique(return_inverse=True)
        rewards = member(rows[shown])
        return rewards.index_select(0, place.flatten()).view(places.shape).sum(-1)

    def _update(self, losses: Tensor) -> float:
        """One Adam step on the sum of the members' losses `[K]`; returns their mean."""
        mean = float(losses.detach().mean())
        if not np.isfinite(mean):
            raise NumericsError(f"the reward model's loss is {mean}", "try a smaller --reward-model.lr")
        self._adam.zero_grad(set_to_none=True)
        losses.sum().backward()
        self._adam.step()
        return mean
