"""An ensemble that learns from comparisons which steps are better. Fitted by the loop, read by `source`."""

import math
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


def beats_chance(num_right: int, num: int) -> bool:
    """Whether `num_right` of `num` answers lie more than two standard deviations above what a coin would give."""
    return num_right > num / 2 + math.sqrt(num)


@dataclass(frozen=True, slots=True)
class _Lesson:
    """Comparisons as tensors."""

    rows: Tensor
    """[U, ...] what the networks read."""
    places: Tensor
    """[N, 2, L] which row each step shows; left, then right."""
    p_right: Tensor
    """[N]."""

    def part(self, chosen: Tensor) -> "_Lesson":
        """Those comparisons where `chosen` `[N]` is true."""
        return _Lesson(self.rows, self.places[chosen], self.p_right[chosen])


class RewardModel:
    """K networks that differ in their first weights and in the order in which they see the same comparisons.

    Weights and Adam's state live on from fit to fit.

    Source: Wang et al. 2024 (RL-VLM-F), arXiv:2402.03681, and the code of Lee et al. 2021 (PEBBLE): early stop on
    training accuracy, no bootstrap samples. Departures: a fit is also bounded in gradient steps, from above and from
    below. The lower bound matters when the teacher is good: its labels are ordered right within an epoch or two, and a
    fit that stops there leaves all rewards within a thousandth of one another, too flat for SAC to see. And some
    comparisons are held out: labels given by a coin can be fitted, and would send the agent after a reward that means
    nothing.

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
        self._is_trusted = False

    @property
    def num_fits(self) -> int:
        """Fits so far."""
        return self._num_fits

    def fit(self, comparisons: Comparisons) -> dict[str, float]:
        """Trains on all comparisons but those held out, at least one; returns what the last epoch and the test gave.

        Raises:
            NumericsError: the loss is not finite.
        """
        whole = self._prepare(comparisons)
        is_held_out = self._held_out(len(comparisons))
        lesson = whole.part(~is_held_out)
        if not self._num_fits:
            for member in self._members:
                member.calibrate(whole.rows)
        config, losses, accuracy, updates, epoch = self._config, [], 0.0, 0, 0
        while updates < config.min_updates or (
            epoch < config.max_epochs and updates < config.max_updates and accuracy <= config.stop_accuracy
        ):
            losses, accuracy = self._run_epoch(lesson, config.max_updates - updates)
            updates += len(losses)
            epoch += 1
        self._num_fits += 1
        return {
            metrics.REWARD_LOSS: float(np.mean(losses)),
            metrics.REWARD_ACCURACY: accuracy,
            metrics.REWARD_EPOCHS: float(epoch),
            **self._test(whole.part(is_held_out)),
        }

    def _held_out(self, num: int) -> Tensor:
        """[N] whether each comparison is kept from training; a comparison's lot never changes."""
        every = self._config.hold_out_every
        return torch.arange(num) % every == every - 1 if every else torch.zeros(num, dtype=torch.bool)

    @torch.no_grad()
    def _test(self, held_out: _Lesson) -> dict[str, float]:
        """Decides whether the rewards count: whether the members' mean tells the decided labels of `held_out`."""
        if not self._config.hold_out_every:
            self._is_trusted = True
            return {}
        is_decided = held_out.p_right != 0.5
        num, right = int(is_decided.sum()), 0
        if num:
            returns = torch.stack([self._returns(member, held_out.rows, held_out.places) for member in self._members])
            mean = returns.mean(dim=0)  # [N, 2]
            right = num_right(mean[:, 0], mean[:, 1], held_out.p_right)
        self._is_trusted = beats_chance(right, num)
        told = {metrics.REWARD_IS_TRUSTED: float(self._is_trusted)}
        return told | {metrics.REWARD_HELD_OUT_ACCURACY: right / num} if num else told

    def rewards(self, steps: Steps) -> FloatArray:
        """The members' mean `[N]`; zeros as long as the fit does no better than chance."""
        mean = self.predict(steps).mean(axis=0)
        return mean if self._is_trusted else np.zeros_like(mean)

    def num_affordable(self, steps: Steps) -> int:
        """How many of the leading steps can be read within a good half second, >= 1: counts what looks different."""
        first, _ = self._inputs.distinct(steps)
        kinds = self._inputs.affordable_kinds
        return len(steps) if len(first) <= kinds else int(first[kinds])

    @torch.no_grad()
    def predict(self, steps: Steps) -> FloatArray:
        """Each member's reward of each step, `[K, N]`; steps that look the same are read once."""
        first, kind = self._inputs.distinct(steps)
        parts = [
            torch.stack([member(rows) for member in self._members])
            for chosen in np.array_split(first, range(_ROWS_PER_PASS, len(first), _ROWS_PER_PASS))
            for rows in (self._inputs.rows(steps, chosen),)
        ]
        return torch.cat(parts, dim=1).numpy()[:, kind]

    def get_state(self) -> dict[str, Any]:
        """Weights, Adam's state and generator, as arrays and numbers."""
        adam = self._adam.state_dict()["state"]
        return {
            "members": [{name: weight.numpy().copy() for name, weight in member.state_dict().items()}
                        for member in self._members],
            "adam": {str(at): {name: value.numpy().copy() for name, value in slot.items()}
                     for at, slot in adam.items()},
            "rng": self._rng.get_state().numpy().copy(),
            "num_fits": self._num_fits,
            "is_trusted": self._is_trusted,
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
        self._is_trusted = bool(state["is_trusted"])

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
