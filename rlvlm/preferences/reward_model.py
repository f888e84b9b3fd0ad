"""An ensemble fitted to a teacher's answers about steps, a test of its predictions, and the rewards made of it.

Fitted by the loop, and given to algorithms as the source `LearnedReward`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.special import betaincc, betaln
from torch import Tensor

from rlvlm.core import metrics
from rlvlm.core.errors import NumericsError
from rlvlm.core.finite import check_finite
from rlvlm.core.state import Stateful
from rlvlm.core.steps import FloatArray, Transitions
from rlvlm.preferences.config import RewardModelConfig
from rlvlm.preferences.dataset import Examples, Steps
from rlvlm.preferences.ensemble import Ensemble
from rlvlm.preferences.losses import PREFERENCE, Objective
from rlvlm.preferences.networks import RewardInput, bounded
from rlvlm.rewards.source import Labelling, RewardSource

_FIX = "lower reward_model.lr in the run's config.yaml, then `rlvlm resume`"


_MIN_SPREAD = 1e-3
"""Smallest standard deviation by which rewards are divided; below it the model is uninformative."""
ENOUGH = math.log(100)
"""Log odds above which answers count as better than chance; random answers ever reach them in one run of a hundred."""


def log_odds(num_right: int, num: int) -> float:
    """Returns the log odds of `num_right` of `num` right answers: predictable answers against random ones.

    Predictable answers are right with a probability drawn uniformly from (1/2, 1]. Under random answers the odds are a
    martingale that starts at 1, so the probability that they ever reach 100 is at most 1 / 100, however often they are
    computed.

    In statistical terms: a test martingale (an e-process) for the null hypothesis that the answers are random.

    Source: Ville's inequality; Shafer 2021, "Testing by betting", sec. 2.
    """
    upper_half = float(betaincc(num_right + 1, num - num_right + 1, 0.5))  # underflows where chance is far likelier
    if upper_half == 0:
        return -math.inf
    # log of 2^n * 2 * B(r + 1, n - r + 1) * P(Beta > 1/2): the mean likelihood over p in (1/2, 1], by 2^-n
    return (num + 1) * math.log(2) + float(betaln(num_right + 1, num - num_right + 1)) + math.log(upper_half)


class Evidence(Stateful):
    """Counts answers that a model predicted before it trained on them, and whether they ever sufficed.

    Once they have sufficed this stays so: later answers can be harder without being random.
    """

    STATE = ("num_right", "num", "is_enough")

    def __init__(self) -> None:
        self.num_right = self.num = 0
        self.is_enough = False

    def add(self, is_right: Iterable[bool]) -> None:
        """Counts whether each of some answers was predicted."""
        for right in is_right:
            self.num_right, self.num = self.num_right + bool(right), self.num + 1
            # checked after every answer: Ville's inequality holds for the whole path
            self.is_enough = self.is_enough or log_odds(self.num_right, self.num) >= ENOUGH


@dataclass(frozen=True, slots=True)
class _ExampleTensors:
    """Examples as tensors."""

    rows: Tensor
    """[U, ...] inputs of the networks."""
    indices: Tensor
    """[N, S, L] index of the row of each step of each side."""
    targets: Tensor
    """[N] targets."""

    def part(self, chosen: Tensor) -> "_ExampleTensors":
        """Returns the examples for which `chosen` [N] is true."""
        return _ExampleTensors(self.rows, self.indices[chosen], self.targets[chosen])


class RewardModel(Stateful):
    """Fits an ensemble whose members see the same examples in different orders, and tests whether it can be trusted.

    Weights and Adam's state persist from fit to fit.

    Source: Wang et al. 2024 (RL-VLM-F), arXiv:2402.03681, and the code of Lee et al. 2021 (PEBBLE): early stop on
    training accuracy, no bootstrap samples. Departures:

    1. A fit is also bounded in gradient steps, from above and from below. The lower bound matters when the teacher is
       good: its labels are ordered right within an epoch or two, and a fit that stops there leaves all rewards within a
       thousandth of one another, too flat for SAC to see.
    2. It is trusted only once it has predicted answers: random labels can be fitted, and would send the agent
       after a reward that means nothing. Each answer is predicted once, by the model as it was before it trained on it
       (a prequential test), so that asking again in every session does not make chance likelier to pass.
    3. Of the first session one half is predicted by a fit to the other, from which the fit to all goes on: the first
       labels are few, and with half the steps the rewards were too flat to learn from on one seed of the drawer
       (docs/experiments/).
    4. With `output` normalised, inputs are centred and scaled anew before each fit: the first labels show an agent that
       moves at random, later ones show places near the goal, which are close together on the first scale.

    Args:
        inputs: inputs of the networks.
        config: ensemble, optimiser, stopping rule.
        seed: seed of weights and shuffling; the global generator is not touched.
        objective: relation between examples and rewards.
        device: device for fits and predictions.
    """

    STATE = ("members=ensemble", "_adam", "_rng", "num_fits", "evidence", "_num_seen", "_scale")

    def __init__(
        self,
        inputs: RewardInput,
        config: RewardModelConfig,
        seed: int,
        objective: Objective = PREFERENCE,
        device: torch.device | str = "cpu",
    ) -> None:
        self._config = config
        self._objective = objective
        self._rng = torch.Generator().manual_seed(seed)
        self.ensemble = Ensemble(inputs, config.ensemble, self._rng, device)
        self._is_normalised = config.output == "normalised"
        for member in self.ensemble.members:
            member.is_bounded = not self._is_normalised
        self._scale = [0.0, 1.0]  # subtracted from the networks' rewards, and then their divisor
        self._adam = torch.optim.Adam(self.ensemble.parameters(), config.lr)
        self.num_fits = 0
        self.evidence = Evidence()
        self._num_seen = 0

    @property
    def is_trusted(self) -> bool:
        """Whether its rewards predict the teacher's answers better than chance."""
        return self.num_fits > 0 and (self.evidence.is_enough or not self._config.hold_out_every)

    def agent_rewards(self, rewards: FloatArray) -> FloatArray:
        """Returns the agent's rewards for the members' mean rewards [N], in [-BOUND, BOUND]."""
        if not self._is_normalised:
            return rewards
        centre, spread = self._scale
        return bounded(torch.from_numpy((rewards - centre) / spread)).numpy()

    @property
    def spread(self) -> float:
        """Scale of the networks' rewards relative to the agent's."""
        return self._scale[1]

    def fit(self, examples: Examples) -> dict[str, float]:
        """Predicts the new examples, then trains on all examples, at least one, except for held-out ones.

        Returns:
            Metrics of the last epoch, and of the predictions.

        Raises:
            NumericsError: the loss is not finite.
        """
        targets = torch.from_numpy(examples.targets).to(self.ensemble.device)
        whole = _ExampleTensors(*self.ensemble.rows(examples), targets)
        every, numbers = self._config.hold_out_every, torch.arange(len(examples))
        is_held_out = torch.zeros(len(examples), dtype=torch.bool)
        if every and self._objective.ends_on_held_out:
            # by its place in the list, so an example that is held out once is held out in every later fit
            is_held_out = numbers % every == every - 1
        # before it trains on them: only then do its predictions count
        report = self._predict(whole.part(numbers >= self._num_seen)) if self.num_fits else {}
        if self._is_normalised or not self.num_fits:
            # departure 4: anew before each fit, by all labels so far
            for member in self.ensemble.members:
                member.calibrate(whole.rows)
        if not self.num_fits and every and len(examples) > 1:
            # departure 3: the half that this fit has not seen is predicted, then the fit goes on with all
            is_even, nothing = numbers % 2 == 0, whole.part(numbers < 0)
            self._train(whole.part(is_even & ~is_held_out), held_out=nothing)
            report = self._predict(whole.part(~is_even))
        self.ensemble.forget()  # features read before belong to other weights
        held_out = whole.part(is_held_out)
        report |= self._train(whole.part(~is_held_out), held_out)
        if self._is_normalised:
            labelled = self.ensemble.mean_returns(whole.rows, torch.arange(len(whole.rows))[:, None, None])
            self._scale = [float(labelled.mean()), max(float(labelled.std(correction=0)), _MIN_SPREAD)]
        # a finite loss can still lead to weights that are not: the last step is checked too
        weights = {f"weights {number}": weight for number, weight in enumerate(self.ensemble.parameters())}
        check_finite("the fitted reward model", _FIX, weights)
        if len(held_out.targets):
            report[metrics.REWARD_HELD_OUT_ERROR] = math.sqrt(self._quality(held_out))
        self.num_fits += 1
        self._num_seen = len(examples)
        return report | {
            metrics.REWARD_IS_TRUSTED: float(self.is_trusted),
            metrics.REWARD_NUM_PREDICTED: float(self.evidence.num),
            metrics.REWARD_NUM_PREDICTED_RIGHT: float(self.evidence.num_right),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state({"scale": [0.0, 1.0]} | state)

    def _train(self, given: _ExampleTensors, held_out: _ExampleTensors) -> dict[str, float]:
        """Trains epochs on `given` until the objective or the limit is reached; returns the last one's metrics."""
        config = self._config
        updates = epoch = 0
        losses, quality, is_reached = [], 0.0, False
        # departure 1: good labels are ordered right within an epoch or two, when rewards are still too flat for SAC to
        # see, so `min_updates` are made whatever the quality
        while updates < config.min_updates or (
            epoch < config.max_epochs and updates < config.max_updates and not is_reached
        ):
            losses, quality = self._run_epoch(given, config.max_updates - updates)
            updates += len(losses)
            epoch += 1
            is_reached = self._objective.is_reached(quality, partial(self._quality, held_out), config)
        return {
            metrics.REWARD_LOSS: float(np.mean(losses)),
            self._objective.quality: quality,
            metrics.REWARD_EPOCHS: float(epoch),
        }

    def _predict(self, unseen: _ExampleTensors) -> dict[str, float]:
        """Counts which answers of `unseen` the members' mean predicts; returns their share, if any was decided."""
        if not len(unseen.targets):
            return {}
        is_right = self._objective.predicted(self.ensemble.mean_returns(unseen.rows, unseen.indices), unseen.targets)
        self.evidence.add(is_right)
        return {metrics.REWARD_PREDICTED: sum(is_right) / len(is_right)} if is_right else {}

    def _quality(self, given: _ExampleTensors) -> float:
        """Returns the objective's quality of the members' mean on `given`; NaN if it is empty."""
        if not len(given.targets):
            return math.nan
        total, num = self._objective.grade(self.ensemble.mean_returns(given.rows, given.indices), given.targets)
        return total / num if num else math.nan

    def _run_epoch(self, given: _ExampleTensors, max_updates: int) -> tuple[list[float], float]:
        """Trains one pass over the examples, each member in its own order.

        Returns:
            The members' mean loss of each update, and the epoch's quality, with each batch graded before its update.
        """
        members = self.ensemble.members
        self.ensemble.train(True)
        # a separate order for each member: besides their initial weights it is their only difference
        orders = torch.stack([torch.randperm(len(given.targets), generator=self._rng) for _ in members])  # [K, N]
        epoch_losses, total, counted = [], 0.0, 0
        for chosen in orders.split(self._config.batch_size, dim=1)[:max_updates]:
            returns = []
            for member, which in zip(members, chosen, strict=True):
                # each row that the batch shows is read once, in however many steps it is shown
                shown, index = given.indices[which].unique(return_inverse=True)  # [V], [B, S, L]
                rewards = member(given.rows[shown])
                returns.append(rewards.index_select(0, index.flatten()).view(index.shape).sum(-1))
            predicted, targets = torch.stack(returns), given.targets[chosen]  # [K, B, S], [K, B]
            losses = self._objective.loss(predicted, targets, self._config)  # [K]
            epoch_losses.append(float(losses.detach().mean()))
            if not math.isfinite(epoch_losses[-1]):
                raise NumericsError(
                    f"the reward model's loss is {epoch_losses[-1]}", _FIX, {"targets": targets.cpu().numpy()}
                )
            self._adam.zero_grad(set_to_none=True)
            # summed and not averaged: each member's gradient is that of its own loss alone
            losses.sum().backward()
            self._adam.step()
            # with the weights before the step, so the quality needs no pass of its own
            grade, num_graded = self._objective.grade(predicted.detach(), targets)
            total, counted = total + grade, counted + num_graded
        self.ensemble.train(False)
        return epoch_losses, total / max(counted, 1)


class LearnedReward(RewardSource):
    """Reward by the mean prediction of a reward model's members. Changes with every fit.

    Args:
        model: fitted elsewhere. Before its first fit the rewards mean nothing, and `version` is 0.
    """

    labelling = Labelling.ON_CHANGE

    def __init__(self, model: RewardModel) -> None:
        self._model = model

    @property
    def version(self) -> int:
        return self._model.num_fits

    @property
    def is_trusted(self) -> bool:
        """Whether the model has predicted enough answers to give rewards."""
        return self._model.is_trusted

    def label(self, transitions: Transitions) -> FloatArray:
        return self._model.agent_rewards(self._model.ensemble.rewards(Steps.of(transitions)))

    def label_leading(self, transitions: Transitions) -> FloatArray:
        return self._model.agent_rewards(self._model.ensemble.leading_rewards(Steps.of(transitions)))


class Disagreement(RewardSource):
    """Bonus by the standard deviation of a reward model's members, over all K: large far from all questions.

    Comparisons leave a constant in each member's reward open, so that a part of it is independent of the step.

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
        """Returns bonuses [B], >= 0, in reward units."""
        return self._model.ensemble.predict(Steps.of(transitions)).std(axis=0) / self._model.spread
