"""An ensemble that learns from labels which steps are better. Fitted by the loop, read by `source`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlvlm import metrics
from rlvlm.errors import NumericsError
from rlvlm.preferences.config import RewardModelConfig
from rlvlm.preferences.dataset import Examples, Steps
from rlvlm.preferences.model.networks import RewardInput
from rlvlm.preferences.model.objectives import PREFERENCE, Objective
from rlvlm.preferences.model.readings import Readings, read_in_passes
from rlvlm.types.steps import FloatArray


@dataclass(frozen=True, slots=True)
class _Lesson:
    """Examples as tensors."""

    rows: Tensor
    """[U, ...] what the networks read."""
    places: Tensor
    """[N, S, L] which row each step of each side shows."""
    targets: Tensor
    """[N]."""

    def part(self, chosen: Tensor) -> "_Lesson":
        """Those examples where `chosen` `[N]` is true."""
        return _Lesson(self.rows, self.places[chosen], self.targets[chosen])


class RewardModel:
    """K networks that differ in their first weights and in the order in which they see the same examples.

    Weights and Adam's state live on from fit to fit.

    Source: Wang et al. 2024 (RL-VLM-F), arXiv:2402.03681, and the code of Lee et al. 2021 (PEBBLE): early stop on
    training accuracy, no bootstrap samples. Departures: a fit is also bounded in gradient steps, from above and from
    below. The lower bound matters when the teacher is good: its labels are ordered right within an epoch or two, and a
    fit that stops there leaves all rewards within a thousandth of one another, too flat for SAC to see. And some
    examples are held out: labels given by a coin can be fitted, and would send the agent after a reward that means
    nothing.

    Args:
        inputs: what the networks look at.
        config: ensemble, optimiser, when to stop.
        seed: of weights and shuffling; the global generator is not touched.
        objective: what the examples say about rewards.
    """

    def __init__(
        self, inputs: RewardInput, config: RewardModelConfig, seed: int, objective: Objective = PREFERENCE
    ) -> None:
        self._inputs = inputs
        self._config = config
        self._objective = objective
        self._rng = torch.Generator().manual_seed(seed)
        self._members = [inputs.build_network(self._rng).train(False) for _ in range(config.ensemble)]
        self._adam = torch.optim.Adam([weight for member in self._members for weight in member.parameters()], config.lr)
        self._readings = Readings(config.ensemble)
        self._num_fits = 0
        self._is_trusted = False

    @property
    def num_fits(self) -> int:
        """Fits so far."""
        return self._num_fits

    def fit(self, examples: Examples) -> dict[str, float]:
        """Trains on all examples but those held out, at least one; returns what the last epoch and the test gave.

        Raises:
            NumericsError: the loss is not finite.
        """
        self._readings.forget()
        whole = self._prepare(examples)
        is_held_out = self._held_out(len(examples))
        lesson, test = whole.part(~is_held_out), whole.part(is_held_out)
        if not self._num_fits:
            for member in self._members:
                member.calibrate(whole.rows)
        config, losses, is_reached, quality, updates, epoch = self._config, [], False, 0.0, 0, 0
        while updates < config.min_updates or (
            epoch < config.max_epochs and updates < config.max_updates and not is_reached
        ):
            losses, quality = self._run_epoch(lesson, config.max_updates - updates)
            updates += len(losses)
            epoch += 1
            is_reached = self._objective.is_reached(quality, partial(self._quality, test), config)
        self._num_fits += 1
        return {
            metrics.REWARD_LOSS: float(np.mean(losses)),
            self._objective.quality: quality,
            metrics.REWARD_EPOCHS: float(epoch),
            **self._test(test),
        }

    def _held_out(self, num: int) -> Tensor:
        """[N] whether each example is kept from training; an example's lot never changes."""
        every = self._config.hold_out_every
        return torch.arange(num) % every == every - 1 if every else torch.zeros(num, dtype=torch.bool)

    def _test(self, held_out: _Lesson) -> dict[str, float]:
        """Decides whether the rewards count: whether the members' mean says anything about `held_out`."""
        if not self._config.hold_out_every:
            self._is_trusted = True
            return {}
        self._is_trusted, told = False, {}
        if len(held_out.targets):
            self._is_trusted, told = self._objective.test(self._mean_returns(held_out), held_out.targets)
        return {metrics.REWARD_IS_TRUSTED: float(self._is_trusted)} | told

    def _quality(self, lesson: _Lesson) -> float:
        """The objective's quality of the members' mean on `lesson`; NaN where that is empty."""
        if not len(lesson.targets):
            return math.nan
        total, num = self._objective.grade(self._mean_returns(lesson), lesson.targets)
        return total / num if num else math.nan

    def _mean_returns(self, lesson: _Lesson) -> Tensor:
        """The members' mean return of each side, `[N, S]`."""
        shown, place = lesson.places.unique(return_inverse=True)
        rewards = read_in_passes(
            self._every_member, lambda part: lesson.rows[shown[part]], len(shown), self._inputs.rows_per_pass
        )
        return rewards.mean(dim=1)[place].sum(-1)

    def rewards(self, steps: Steps) -> FloatArray:
        """The members' mean `[N]`; zeros as long as the fit does no better than chance."""
        first, kind = self._inputs.distinct(steps)
        return self._mean(steps, first)[kind]

    def leading_rewards(self, steps: Steps) -> FloatArray:
        """`rewards` `[M]` of the leading steps, as many as are read within a good half second, M >= 1."""
        first, kind = self._inputs.distinct(steps)
        num_kinds = self._inputs.affordable_kinds
        num_steps = len(steps) if len(first) <= num_kinds else int(first[num_kinds])
        return self._mean(steps, first[:num_kinds])[kind[:num_steps]]

    def predict(self, steps: Steps) -> FloatArray:
        """Each member's reward of each step, `[K, N]`; steps that look the same are read once."""
        first, kind = self._inputs.distinct(steps)
        return self._look_up(steps, first)[kind].T

    def features(self, steps: Steps) -> FloatArray:
        """`[N, E]` what the first member sees in each step: its last layer's input, or its scaled state."""
        first, kind = self._inputs.distinct(steps)
        return self._read(self._members[0].features, steps, first)[kind]

    def _mean(self, steps: Steps, chosen: NDArray[np.int64]) -> FloatArray:
        """The members' mean `[U]` of chosen steps `[U]` that all look different; zeros while it is not trusted."""
        mean = self._look_up(steps, chosen).mean(axis=1)
        return mean if self._is_trusted else np.zeros_like(mean)

    def _look_up(self, steps: Steps, chosen: NDArray[np.int64]) -> FloatArray:
        """Each member's reward `[U, K]` of chosen steps `[U]`; pictures are read when first met after a fit."""
        names = self._inputs.names(steps, chosen)
        if names is None:
            return self._read(self._every_member, steps, chosen)
        return self._readings.of(names, lambda places: self._read(self._every_member, steps, chosen[places]))

    def _read(self, read: Callable[[Tensor], Tensor], steps: Steps, chosen: NDArray[np.int64]) -> FloatArray:
        """`[M, ...]` what `read` makes of the chosen steps `[M]`."""
        return read_in_passes(
            read, lambda part: self._inputs.rows(steps, chosen[part]), len(chosen), self._inputs.rows_per_pass
        ).numpy()

    def _every_member(self, rows: Tensor) -> Tensor:
        """`[M, K]` what each member makes of `rows` `[M, ...]`."""
        return torch.stack([member(rows) for member in self._members], dim=1)

    def get_state(self) -> dict[str, Any]:
        """Weights, Adam's state and generator, as arrays and numbers."""
        adam = self._adam.state_dict()["state"]
        return {
            "members": [
                {name: weight.numpy().copy() for name, weight in member.state_dict().items()}
                for member in self._members
            ],
            "adam": {
                str(at): {name: value.numpy().copy() for name, value in slot.items()} for at, slot in adam.items()
            },
            "rng": self._rng.get_state().numpy().copy(),
            "num_fits": self._num_fits,
            "is_trusted": self._is_trusted,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned."""
        for member, weights in zip(self._members, state["members"], strict=True):
            member.load_state_dict({name: torch.tensor(weight) for name, weight in weights.items()})
        slots = {
            int(at): {name: torch.tensor(value) for name, value in slot.items()} for at, slot in state["adam"].items()
        }
        self._adam.load_state_dict({**self._adam.state_dict(), "state": slots})
        self._rng.set_state(torch.tensor(state["rng"]))
        self._num_fits = int(state["num_fits"])
        self._readings.forget()
        self._is_trusted = bool(state["is_trusted"])

    def _prepare(self, examples: Examples) -> _Lesson:
        steps = examples.steps()
        first, kind = self._inputs.distinct(steps)
        places = torch.from_numpy(kind).view(len(examples), examples.num_sides, examples.segment_steps)
        return _Lesson(self._inputs.rows(steps, first), places, torch.from_numpy(examples.targets))

    def _run_epoch(self, lesson: _Lesson, max_updates: int) -> tuple[list[float], float]:
        """One pass over the examples, each member in its own order.

        Returns:
            The members' mean loss of each update, and the epoch's quality, each batch's taken before its update.
        """
        for member in self._members:
            member.train()
        num = len(lesson.targets)
        orders = torch.stack([torch.randperm(num, generator=self._rng) for _ in self._members])  # [K, N]
        losses, total, counted = [], 0.0, 0
        for chosen in orders.split(self._config.batch_size, dim=1)[:max_updates]:
            returns = torch.stack(
                [
                    self._returns(member, lesson.rows, lesson.places[which])
                    for member, which in zip(self._members, chosen, strict=True)
                ]
            )  # [K, B, S]
            targets = lesson.targets[chosen]  # [K, B]
            losses.append(self._update(self._objective.loss(returns, targets)))
            grade, num_graded = self._objective.grade(returns.detach(), targets)
            total, counted = total + grade, counted + num_graded
        for member in self._members:
            member.train(False)
        return losses, total / max(counted, 1)

    @staticmethod
    def _returns(member: nn.Module, rows: Tensor, places: Tensor) -> Tensor:
        """Predicted returns `[B, S]` of all sides; each row that the batch `places` `[B, S, L]` shows is read once."""
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
