"""V(s): the probability that an episode will be called a success, learned from judged or true outcomes.

The state critic and shaping of policy gradients use it (`policy_gradient.critic`), and `rlvlm score --value`. It sees
rows of features, one before each turn, whatever they were made from.

Sources: Sutton and Barto 2018, ch. 12 (TD(lambda)); Patrini et al. 2017, arXiv:1609.03683 (noisy labels, forward
correction); Lakshminarayanan et al. 2017, arXiv:1612.01474 (ensembles); Kostrikov et al. 2022, arXiv:2110.06169
(expectiles). Departures:

1. Outcomes are in [0, 1], so the value is a classifier of them (cross-entropy) and not a regression.
2. It is fitted in rounds: a round's targets are computed once, by the weights at its start, for all of its steps.
3. The rates of wrong outcomes are those of a judge on known items, the same for every state and goal.
4. An expectile weighs the cross-entropy as it weighs a squared error in the paper.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rlvlm.core.episodes import IntArray
from rlvlm.core.state import Stateful
from rlvlm.core.steps import FloatArray
from rlvlm.rewards.config import ValueConfig

_WIDE = 5.0
"""Maximum of features, in standard deviations; larger ones are clipped."""
_MIN_STD = 1e-4
"""Minimum standard deviation of a feature, in its own units; one that varies less counts as constant."""
_WEIGHT_DECAY = 1e-3
_PIXELS_COUNT = 16
MIN_DIFFERENCE = 1e-3
"""Difference between the largest and the smallest outcome below which there is nothing to learn."""
_MIN_TOLD = 0.1
"""Share of outcomes, 1 minus both rates of wrong ones, below which outcomes say too little to be corrected."""


class OutcomeValue(Stateful):
    """An ensemble of classifiers of outcomes.

    Args:
        config: sizes, step sizes and targets.
        num_features: F, numbers in a row of features.
        seed: seed of weights and minibatches.
        num_flags: number of features, the last ones, that are 0 or 1 and are not scaled.
        num_pixels: number of features, the first ones, that are an image's, of which many say the same.
        expectile: in (0, 1); above 0.5 the value leans towards the better outcomes that follow a state.
        leaves_out: whether each head is trained without its own share of the episodes, every K-th, so that it can
            predict them without having seen how they ended.
    """

    STATE = ("_network", "adam=_optimizer", "_generator", "_num_rounds")

    def __init__(
        self, config: ValueConfig, num_features: int, seed: int, *,
        num_flags: int = 0, num_pixels: int = 0, expectile: float = 0.5, leaves_out: bool = False,
    ) -> None:  # fmt: skip
        self._config, self._expectile, self._leaves_out = config, expectile, leaves_out
        self._first_flag, self._num_pixels = num_features - num_flags, num_pixels
        self._generator = torch.Generator().manual_seed(seed)
        width = config.hidden
        # forked, so that the policy's random numbers are the same with and without a value
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._network = nn.ModuleList(
                nn.Sequential(
                    nn.Linear(num_features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
                )
                for _ in range(config.heads)
            )
        self._optimizer = torch.optim.AdamW(
            self._network.parameters(), config.lr, weight_decay=_WEIGHT_DECAY, foreach=False
        )
        self._middle, self._spread = torch.zeros(num_features), torch.ones(num_features)
        self._features = np.empty((0, num_features), np.float32)
        self._outcomes = np.empty(0, np.float32)
        self._lengths = np.empty(0, np.int64)
        self._num_rounds = 0

    @property
    def is_fitted(self) -> bool:
        """Whether it has learned from any episode."""
        return self._num_rounds > 0

    @property
    def tells_apart(self) -> bool:
        """Whether it has learned from outcomes that differ; if not, what it predicts says nothing about a state."""
        return self.is_fitted and float(np.ptp(self._outcomes)) > MIN_DIFFERENCE

    def predict(self, features: FloatArray) -> FloatArray:
        """Returns [K, M], each head's value in [0, 1] of the states with `features` [M, F]."""
        with torch.no_grad():
            scaled = self._scaled(features)
            return torch.stack([head(scaled)[:, 0].sigmoid() for head in self._network]).numpy()

    def learn(
        self, episodes: Sequence[FloatArray], outcomes: FloatArray, rates: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        """Adds episodes, if any, drops the oldest ones, and trains for one round.

        Args:
            episodes: E arrays [T, F] of features before each turn.
            outcomes: [E] in [0, 1].
            rates: share of failures that are called successes, and of successes called failures. With them the value
                is the probability of a true success, not of one that is called so.
        """
        if not self.is_fitted:
            self._scale(np.concatenate(episodes))
        most = self._config.episodes
        # features are stored turn by turn: keep as many rows as the kept episodes have turns
        self._outcomes = np.concatenate([self._outcomes, np.asarray(outcomes, np.float32)])[-most:]
        self._lengths = np.concatenate([self._lengths, np.array([len(rows) for rows in episodes], np.int64)])[-most:]
        self._features = np.concatenate([self._features, *episodes])[-int(self._lengths.sum()) :]
        self._fit(rates)
        self._num_rounds += 1

    def _fit(self, rates: tuple[float, float]) -> None:
        config = self._config
        false, told = rates[0], 1.0 - sum(rates)
        if told < _MIN_TOLD:  # dividing by it would only amplify the noise
            false, told = 0.0, 1.0
        scaled = self._scaled(self._features)
        lam = 1.0 if self._num_rounds < config.monte_carlo else config.td_lambda
        values = self.predict(self._features) if lam < 1 else np.zeros((config.heads, len(scaled)), np.float32)
        # P(called a success) = false + told P(success): a target of that is in [0, 1] whatever the rates, while that of
        # the success itself, (outcome - false) / told, is not
        targets = td_targets((self._outcomes - false) / told, self._lengths, values, config.gamma, lam)
        wanted = torch.from_numpy((false + told * targets).clip(0.0, 1.0).astype(np.float32))
        owners = np.arange(len(self._lengths)).repeat(self._lengths) % config.heads
        seen = [
            torch.from_numpy(np.flatnonzero((owners != head) | (not self._leaves_out or config.heads == 1)))
            for head in range(config.heads)
        ]
        for _ in range(config.steps):
            loss = torch.zeros(())
            for head, network in enumerate(self._network):
                rows = seen[head][torch.randint(len(seen[head]), (config.batch_size,), generator=self._generator)]
                loss = loss + self._loss(network(scaled[rows])[:, 0], wanted[head, rows], false, told)
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()

    def _loss(self, logits: Tensor, wanted: Tensor, false: float, told: float) -> Tensor:
        """Returns the mean cross-entropy of `wanted` [B], in nats."""
        called, weights = false + told * logits.sigmoid(), None
        if self._expectile != 0.5:  # |tau - 1(target below the value)|, 1 on average at tau = 0.5
            weights = 2 * (self._expectile - (wanted < called.detach()).float()).abs()
        if told == 1.0:
            return functional.binary_cross_entropy_with_logits(logits, wanted, weights)
        return functional.binary_cross_entropy(called, wanted, weights)

    def _scale(self, features: FloatArray) -> None:
        """Sets the scale of features, once: a changing one would change the meaning of the weights."""
        self._middle, self._spread = (torch.from_numpy(part(features, axis=0)) for part in (np.mean, np.std))
        # divided by infinity, so that a constant feature is 0 and its noise is not amplified
        self._spread[self._spread < _MIN_STD] = torch.inf
        # a step of Adam moves the weights of alike pixels alike: together they count as _PIXELS_COUNT other features
        self._spread[: self._num_pixels] *= max(1.0, self._num_pixels / _PIXELS_COUNT) ** 0.5
        self._middle[self._first_flag :], self._spread[self._first_flag :] = 0.0, 1.0  # other ones may be set later

    def _scaled(self, features: FloatArray) -> Tensor:
        return ((torch.from_numpy(features) - self._middle) / self._spread).clamp(-_WIDE, _WIDE)

    def get_state(self) -> dict[str, Any]:
        """Returns everything needed to resume exactly."""
        return super().get_state() | {
            "scale": [self._middle.numpy(), self._spread.numpy()],
            "memory": [self._outcomes, self._lengths, self._features],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._middle, self._spread = (torch.from_numpy(np.array(value)) for value in state["scale"])
        self._outcomes, self._lengths, self._features = (np.array(value) for value in state["memory"])


def td_targets(outcomes: FloatArray, lengths: IntArray, values: FloatArray, gamma: float, lam: float) -> FloatArray:
    """Returns [K, M], the lambda-return of each of M turns, of episodes that are paid their outcome after their last
    turn and nothing before.

    Args:
        outcomes: [E] outcomes.
        lengths: [E] turns of each episode, M in all.
        values: [K, M] predicted values before the turns, episode after episode; not read with `lam` 1.
        gamma: discount per turn, in [0, 1].
        lam: in [0, 1]; 1 is Monte Carlo, 0 trusts the next value.

    Source: Sutton and Barto 2018, eq. 12.18.
    """
    targets = np.tile(np.repeat(outcomes, lengths), (len(values), 1))
    to_go = np.concatenate([np.arange(length)[::-1] for length in lengths.tolist()])  # turns after this one
    # G_t = gamma ((1 - lam) V(s_t+1) + lam G_t+1), and the outcome after the last turn
    for distance in range(1, int(lengths.max())):
        rows = np.flatnonzero(to_go == distance)
        targets[:, rows] = gamma * ((1 - lam) * values[:, rows + 1] + lam * targets[:, rows + 1])
    return targets
