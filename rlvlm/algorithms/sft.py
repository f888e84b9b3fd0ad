"""The supervised start of any policy: imitation of demonstrations in the learners, sharded or not.

`sft_replies` and `sft_chunks` collect the demonstrations; the policy itself defines the loss of an answer.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlvlm.algorithms.learners import add_up_gradients, all_reduce, largest, local_shard, own_stream
from rlvlm.algorithms.sft_config import ChunkSFTConfig, ReplySFTConfig
from rlvlm.algorithms.sft_preferences import SegmentPairs, losses_of_rows, preference_loss
from rlvlm.algorithms.sharding import clip_gradients, is_sharded, load_optimizer_tree, optimizer_tree
from rlvlm.core.episodes import IntArray, TokenEpisode
from rlvlm.core.errors import NumericsError, UsageError
from rlvlm.core.progress import count_progress
from rlvlm.core.state import Stateful
from rlvlm.demonstrations.weighting import Weights
from rlvlm.envs.env import Env
from rlvlm.policies.protocol import Imitation, Policy
from rlvlm.policies.vla.policy import Demonstrations
from rlvlm.vlms.devices import gradient_settings

_RECENT = 10
"""Number of updates in the displayed mean loss."""
_MEGA = 8
"""Number of batches sorted by length together: more save padding, fewer mix better."""


class Imitator(Stateful):
    """Teaches `policy` to imitate demonstrations, with the loss of `Policy.imitation`.

    Several learners take each step together, with equal policies, demonstrations and random numbers.

    Args:
        policy: policy to train; its value head stays unchanged.
        env: draws the policy's images.
        shown: demonstrations in the form of `Policy.imitation`.
        sft: steps, batches and step sizes.
        rng: generator of batches and all other random choices.
        log: receives progress messages.
        weights: weight of each answer, in the order of `shown`; None: all 1. Answers are drawn in proportion to their
            weights: the expected gradient is that of a weighted loss, and a batch is full of useful answers, however
            few they are.
        at_once: splits each learner's share, units of answers [U, A], into micro-batches; a unit is an answer or, with
            the weighting preference, a pair of segments.

    Raises:
        UsageError: see `Policy.imitation`; or the policy can use none of them, or all weights are 0.
    """

    STATE = ("num_updates", "_losses", "_rng", "_epoch")
    is_deterministic = False
    """Whether gradients on a GPU are to be the same to the bit each time, see `vlms.devices.gradient_settings`."""

    def __init__(  # noqa: PLR0913 - all that a supervised start depends on
        self,
        policy: Policy,
        env: Env,
        shown: Sequence[TokenEpisode] | Demonstrations,
        sft: ReplySFTConfig | ChunkSFTConfig,
        rng: np.random.Generator,
        log: Callable[[str], None],
        *,
        weights: Weights | None = None,
        at_once: Callable[[Tensor, Imitation], list[Tensor]] = lambda units, _: [units],
    ) -> None:
        self.policy, self._sft, self._rng, self._log, self._at_once = policy, sft, rng, log, at_once
        self._prepared = prepared = policy.imitation(shown, env, sft, own_stream(rng), log)
        if not len(prepared):
            raise UsageError(
                "the policy has a use for none of the demonstrated answers; an action head learns actions that can be "
                "read, and nothing else",
                "look at them with rlvlm data show DIR, and collect others with rlvlm collect",
            )
        self._counts: NDArray[np.float64] | None = None
        self._pairs: SegmentPairs | None = None
        if weights is not None and sft.weighting == "preference":
            own = weights.at(prepared.shown)
            self._pairs = SegmentPairs(own.judged, own.episodes)
        elif weights is not None:
            self._counts = weights.values[prepared.shown].astype(np.float64)
            if not self._counts.sum() > 0:
                raise UsageError(
                    f"none of the {len(prepared):,} answers that are learned from counts by the labels",
                    "look at the page of `rlvlm score`, or choose another --sft.weighting",
                )
            self._counts /= self._counts.mean()
        self._parameters = policy.acting_parameters()
        # one call cannot handle slices and whole tensors, and needs memory for all of them at once
        self._optimizer = torch.optim.AdamW(
            self._parameters, betas=sft.betas, weight_decay=sft.weight_decay, foreach=False
        )
        self._epoch: list[list[int]] = []
        self._losses: list[float] = []
        self.num_updates = 0

    def train(self, until: int) -> float:
        """Makes the updates up to number `until`; returns the mean loss of the last ten, NaN if there was none.

        Raises:
            NumericsError: the loss is not finite.
        """
        sft, parameters = self._sft, self._parameters
        while self.num_updates < until:
            for group in self._optimizer.param_groups:
                group["lr"] = sft.lr_at(self.num_updates)
            self._optimizer.zero_grad()
            loss = self._backward(self._draw())
            add_up_gradients(parameters)
            if sft.max_grad_norm < math.inf:
                clip_gradients(parameters, sft.max_grad_norm)
            self._optimizer.step()
            count_progress()
            self.num_updates += 1
            self._losses = [*self._losses[1 - _RECENT :], loss]
            # after the step, whose weights are useless if the loss was not finite
            if not math.isfinite(loss):
                raise NumericsError(
                    f"the loss of update {self.num_updates} of the supervised start is {loss}",
                    "start anew with a smaller --sft.lr",
                )
        self.policy.forget_stale_images()
        return self.loss

    @property
    def loss(self) -> float:
        """Mean loss of the last ten updates."""
        return sum(self._losses) / len(self._losses) if self._losses else math.nan

    def _draw(self) -> Tensor:
        """Returns [U, A], rows of the next update: pairs of segments, or single rows, from epochs of batches of similar
        length if lengths differ, else drawn anew.
        """
        lengths, size, counts = self._prepared.lengths, self._sft.batch_size, self._counts
        if self._pairs is not None:
            num = max(1, size // (2 * self._pairs.length))
            return torch.from_numpy(self._pairs.draw(num, self._rng)).flatten(1)
        if not lengths:
            num = len(self._prepared)
            rows = self._rng.integers(num, size=size) if counts is None else self._rng.choice(num, size, p=counts / num)
            return torch.from_numpy(rows)[:, None]
        if not self._epoch:
            rows = np.arange(len(lengths)) if counts is None else rows_by_weight(counts, self._rng)
            self._epoch = list(grouped_by_length(lengths, size, self._rng, rows))
        return torch.tensor(self._epoch.pop(0))[:, None]

    def _loss(self, units: Tensor) -> Tensor:
        """Returns the mean loss of `units` [U, A]."""
        rows = units.flatten()
        if self._pairs is None:
            return self._prepared.loss(rows, None)
        losses, beside = losses_of_rows(self._prepared.loss, rows)
        return preference_loss(losses.view(len(units), 2, -1)) + beside

    def _backward(self, units: Tensor) -> float:
        """Leaves this learner's part of the gradient in the parameters; returns the loss over all learners."""
        total = torch.zeros((), dtype=torch.float64)
        parts = [part for part in self._at_once(local_shard(units), self._prepared) if len(part)]
        # learners that gather weights together make equally many passes: the last ones of some have no effect
        for number in range(largest(len(parts)) if is_sharded(self._parameters) else len(parts)):
            is_own = number < len(parts)
            part = parts[number] if is_own else units[:1]
            with gradient_settings(self.policy.device, self.is_deterministic):
                loss = self._loss(part) * (is_own * len(part) / len(units))
                loss.backward()
            total += loss.detach().cpu()
        return float(all_reduce(total))

    def get_state(self) -> dict[str, Any]:
        """Returns everything needed to resume exactly besides the policy's weights, as a state tree; if learners draw
        their own random numbers (a flow's noise), each continues with other ones.
        """
        own = {"num_shown": len(self._prepared), "adam": optimizer_tree(self._optimizer)}
        return super().get_state() | own

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned.

        Raises:
            UsageError: it belongs to other demonstrations.
        """
        if state["num_shown"] != len(self._prepared):
            raise UsageError(
                f"it stopped with {state['num_shown']:,} demonstrated answers to learn from, and there are "
                f"{len(self._prepared):,} now",
                "go on with the same demonstrations and settings, or start anew in another folder",
            )
        load_optimizer_tree(self._optimizer, state["adam"], self._parameters)
        super().set_state(state)


def rows_by_weight(weights: NDArray[np.float64], rng: np.random.Generator) -> IntArray:
    """Returns [M] rows of one epoch, in order: each as often as its weight says, rounded up or down at random, so that
    it occurs that often on average (systematic resampling).

    Args:
        weights: [M] >= 0, mean 1.
        rng: draws the single offset common to all.
    """
    # row i is taken once for each integer between the sum of the weights before it and the sum including it
    ends = np.floor(np.cumsum(weights) + rng.random()).astype(np.int64)
    return np.repeat(np.arange(len(weights)), np.diff(ends, prepend=0))


def grouped_by_length(
    lengths: Sequence[int], batch: int, rng: np.random.Generator, rows: IntArray
) -> Iterator[list[int]]:
    """Yields one epoch: `rows`, indices of examples of similar `lengths` [M], in batches; the last may be smaller.

    `rng` shuffles the examples, and then the batches.
    """
    indices = rng.permutation(rows).tolist()
    batches: list[list[int]] = []
    for begin in range(0, len(indices), batch * _MEGA):
        mega = sorted(indices[begin : begin + batch * _MEGA], key=lambda index: lengths[index])
        batches += [mega[first : first + batch] for first in range(0, len(mega), batch)]
    # sorted batches would come from the shortest to the longest, eight at a time
    for number in rng.permutation(len(batches)).tolist():
        yield batches[number]
