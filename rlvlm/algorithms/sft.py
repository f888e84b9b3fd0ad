"""The supervised start of any policy: it imitates what it was shown, in the learners and as they are, sharded or not.

What is shown is gathered by `sft_replies` and `sft_chunks`; how an answer is imitated the policy knows itself.
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
from rlvlm.core.episodes import IntArray
from rlvlm.core.errors import NumericsError, UsageError
from rlvlm.core.progress import count_progress
from rlvlm.core.state import Stateful
from rlvlm.demonstrations.weighting import Weights
from rlvlm.policies.protocol import Imitation, Policy
from rlvlm.vlms.devices import repeatable

_RECENT = 10
"""Updates whose mean loss is told."""
_MEGA = 8
"""Batches that are sorted by length together: more save padding, fewer mix better."""


class Imitator(Stateful):
    """Teaches `policy` what it was shown. What a loss is, `Policy.imitation` says.

    Several learners take each step together, on equal policies, demonstrations and random numbers.

    Args:
        policy: is changed; the value head is left alone.
        env: draws what it sees.
        shown: as `Policy.imitation` takes it.
        sft: steps, batches and step sizes.
        rng: of batches and all else that is drawn.
        log: takes a line on how it goes.
        weights: what each shown answer counts, in the order in which they were shown; None: all 1. The more one counts,
            the more often it is drawn: the expected gradient is that of a weighted loss, and a batch is full of answers
            that count, however few they are.
        at_once: cuts what each learner goes through, units of answers [U, A], into parts that go through the policy at
            once; a unit is an answer, or with the weighting preference a pair of segments.

    Raises:
        UsageError: see `Policy.imitation`; or the policy has a use for none of them, or none counts.
    """

    STATE = {"num_updates": "num_updates", "losses": "_losses", "rng": "_rng", "epoch": "_epoch"}
    is_deterministic = False
    """Whether gradients on a GPU are to be the same to the bit each time, see `vlms.devices.repeatable`."""

    def __init__(  # noqa: PLR0913 - all that a supervised start depends on
        self,
        policy: Policy,
        env: Any,
        shown: Any,
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
        # one call cannot take slices and whole tensors, and takes memory for all of them at once
        self._optimizer = torch.optim.AdamW(
            self._parameters, betas=sft.betas, weight_decay=sft.weight_decay, foreach=False
        )
        self._epoch: list[list[int]] = []
        self._losses: list[float] = []
        self.num_updates = 0

    def train(self, until: int) -> float:
        """Takes the updates up to number `until`; returns the mean loss of the last ten, NaN where there was none.

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
            # after the step, whose weights are of no use any more if it was not finite
            if not math.isfinite(loss):
                raise NumericsError(
                    f"the loss of update {self.num_updates} of the supervised start is {loss}",
                    "start anew with a smaller --sft.lr",
                )
            if self.num_updates % sft.log_every == 0:
                self._log(f"supervised start: update {self.num_updates} of {sft.updates}, loss {self.loss:.3f}")
        self.policy.forget_stale_images()
        return self.loss

    @property
    def loss(self) -> float:
        """The mean loss of the last ten updates."""
        return sum(self._losses) / len(self._losses) if self._losses else math.nan

    def _draw(self) -> Tensor:
        """[U, A] rows of the next update: pairs of segments, or single rows, of epochs of batches of like length where
        lengths differ, else drawn anew.
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
        """The mean loss of `units` [U, A]."""
        rows = units.flatten()
        if self._pairs is None:
            return self._prepared.loss(rows, None)
        losses, beside = losses_of_rows(self._prepared.loss, rows)
        return preference_loss(losses.view(len(units), 2, -1)) + beside

    def _backward(self, units: Tensor) -> float:
        """Leaves this learner's part of the gradient in the parameters; returns the loss of all learners."""
        total = torch.zeros((), dtype=torch.float64)
        parts = [part for part in self._at_once(local_shard(units), self._prepared) if len(part)]
        # learners that gather weights together make equally many passes: the last of some count for nothing
        for number in range(largest(len(parts)) if is_sharded(self._parameters) else len(parts)):
            is_own = number < len(parts)
            part = parts[number] if is_own else units[:1]
            with repeatable(self.policy.device, self.is_deterministic):
                loss = self._loss(part) * (is_own * len(part) / len(units))
                loss.backward()
            total += loss.detach().cpu()
        return float(all_reduce(total))

    def get_state(self) -> dict[str, Any]:
        """All that an exact continuation needs beside the policy's weights, as a state tree; of several learners that
        draw for themselves (a flow's noise) each goes on with other draws.
        """
        own = {"num_shown": len(self._prepared), "adam": optimizer_tree(self._optimizer)}
        return super().get_state() | own

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned.

        Raises:
            UsageError: it is of other demonstrations.
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
    """[M] rows of one epoch, in order: each as often as its weight says, rounded up or down by chance, so that it is
    there that often on average (systematic resampling).

    Args:
        weights: [M] >= 0, mean 1.
        rng: draws the one offset that all share.
    """
    # row i is taken once for each whole number that lies between the sum of the weights before it and that up to it
    ends = np.floor(np.cumsum(weights) + rng.random()).astype(np.int64)
    return np.repeat(np.arange(len(weights)), np.diff(ends, prepend=0))


def grouped_by_length(
    lengths: Sequence[int], batch: int, rng: np.random.Generator, rows: IntArray
) -> Iterator[list[int]]:
    """One epoch: `rows`, numbers of examples of like `lengths` [M], in batches; the last may be smaller.

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
