"""An ensemble fitted to labels that say which steps are better, and whether its rewards count. Fitted by the loop."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlvlm import metrics
from rlvlm.errors import NumericsError
from rlvlm.preferences.config import RewardModelConfig
from rlvlm.preferences.dataset import Examples, Steps
from rlvlm.preferences.model.ensemble import Ensemble
from rlvlm.preferences.model.networks import RewardInput
from rlvlm.preferences.model.objectives import PREFERENCE, Objective
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
    """Fits an ensemble whose members see the same examples in different orders, and says whether its rewards count.

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
        self._config = config
        self._objective = objective
        self._rng = torch.Generator().manual_seed(seed)
        self.ensemble = Ensemble(inputs, config.ensemble, self._rng)
        self._adam = torch.optim.Adam(self.ensemble.parameters(), config.lr)
        self.num_fits = 0
        self._is_trusted = False

    def rewards(self, steps: Steps) -> FloatArray:
        """The members' mean `[N]`; zeros as long as the fit does no better than chance."""
        rewards = self.ensemble.rewards(steps)
        return rewards if self._is_trusted else np.zeros_like(rewards)

    def leading_rewards(self, steps: Steps) -> FloatArray:
        """`rewards` `[M]` of the leading steps, as many as are read within a good half second, M >= 1."""
        rewards = self.ensemble.leading_rewards(steps)
        return rewards if self._is_trusted else np.zeros_like(rewards)

    def fit(self, examples: Examples) -> dict[str, float]:
        """Trains on all examples but those held out, at least one; returns what the last epoch and the test gave.

        Raises:
            NumericsError: the loss is not finite.
        """
        self.ensemble.forget()
        whole = _Lesson(*self.ensemble.rows(examples), torch.from_numpy(examples.targets))
        every = self._config.hold_out_every
        # By its place in the list, so an example that is held out once is held out in every later fit.
        is_held_out = torch.arange(len(examples)) % every == every - 1 if every else torch.zeros(len(examples)).bool()
        lesson, test = whole.part(~is_held_out), whole.part(is_held_out)
        if not self.num_fits:
            for member in self.ensemble.members:
                member.calibrate(whole.rows)
        config, losses, is_reached, quality, updates, epoch = self._config, [], False, 0.0, 0, 0
        while updates < config.min_updates or (
            epoch < config.max_epochs and updates < config.max_updates and not is_reached
        ):
            losses, quality = self._run_epoch(lesson, config.max_updates - updates)
            updates += len(losses)
            epoch += 1
            is_reached = self._objective.is_reached(quality, partial(self._quality, test), config)
        self.num_fits += 1
        return {
            metrics.REWARD_LOSS: float(np.mean(losses)),
            self._objective.quality: quality,
            metrics.REWARD_EPOCHS: float(epoch),
            **self._test(test),
        }

    def get_state(self) -> dict[str, Any]:
        """Weights, Adam's state and generator, as arrays and numbers."""
        adam = self._adam.state_dict()["state"]
        return {
            "members": self.ensemble.get_state(),
            "adam": {
                str(at): {name: value.numpy().copy() for name, value in slot.items()} for at, slot in adam.items()
            },
            "rng": self._rng.get_state().numpy().copy(),
            "num_fits": self.num_fits,
            "is_trusted": self._is_trusted,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned."""
        self.ensemble.set_state(state["members"])
        slots = {
            int(at): {name: torch.tensor(value) for name, value in slot.items()} for at, slot in state["adam"].items()
        }
        self._adam.load_state_dict({**self._adam.state_dict(), "state": slots})
        self._rng.set_state(torch.tensor(state["rng"]))
        self.num_fits = int(state["num_fits"])
        self._is_trusted = bool(state["is_trusted"])

    def _test(self, held_out: _Lesson) -> dict[str, float]:
        """Decides whether the rewards count: whether the members' mean says anything about `held_out`."""
        if not self._config.hold_out_every:
            self._is_trusted = True
            return {}
        self._is_trusted, told = False, {}
        if len(held_out.targets):
            returns = self.ensemble.mean_returns(held_out.rows, held_out.places)
            self._is_trusted, told = self._objective.test(returns, held_out.targets)
        return {metrics.REWARD_IS_TRUSTED: float(self._is_trusted)} | told

    def _quality(self, lesson: _Lesson) -> float:
        """The objective's quality of the members' mean on `lesson`; NaN where that is empty."""
        if not len(lesson.targets):
            return math.nan
        total, num = self._objective.grade(self.ensemble.mean_returns(lesson.rows, lesson.places), lesson.targets)
        return total / num if num else math.nan

    def _run_epoch(self, lesson: _Lesson, max_updates: int) -> tuple[list[float], float]:
        """One pass over the examples, each member in its own order.

        Returns:
            The members' mean loss of each update, and the epoch's quality, each batch's taken before its update.
        """
        members = self.ensemble.members
        self.ensemble.train(True)
        orders = torch.stack([torch.randperm(len(lesson.targets), generator=self._rng) for _ in members])  # [K, N]
        epoch_losses, total, counted = [], 0.0, 0
        for chosen in orders.split(self._config.batch_size, dim=1)[:max_updates]:
            returns = []
            for member, which in zip(members, chosen, strict=True):
                # Each row that the batch shows is read once, in however many steps it is shown.
                shown, place = lesson.places[which].unique(return_inverse=True)  # [V], [B, S, L]
                rewards = member(lesson.rows[shown])
                returns.append(rewards.index_select(0, place.flatten()).view(place.shape).sum(-1))
            predicted, targets = torch.stack(returns), lesson.targets[chosen]  # [K, B, S], [K, B]
            losses = self._objective.loss(predicted, targets)  # [K]
            epoch_losses.append(float(losses.detach().mean()))
            if not math.isfinite(epoch_losses[-1]):
                raise NumericsError(f"the reward model's loss is {epoch_losses[-1]}", "try a smaller --reward-model.lr")
            self._adam.zero_grad(set_to_none=True)
            losses.sum().backward()
            self._adam.step()
            grade, num_graded = self._objective.grade(predicted.detach(), targets)
            total, counted = total + grade, counted + num_graded
        self.ensemble.train(False)
        return epoch_losses, total / max(counted, 1)
