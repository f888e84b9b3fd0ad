"""The supervised start of any policy: it imitates what it was shown, in the learners and as they are, sharded or not.

What is shown is gathered by `sft_replies` and `sft_chunks`; how an answer is imitated the policy knows itself.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlvlm.algorithms.learners import add_up_gradients, all_reduce, largest, local_shard, own_stream
from rlvlm.algorithms.sft_config import ChunkSFTConfig, ReplySFTConfig
from rlvlm.algorithms.sharding import clip_gradients, is_sharded
from rlvlm.core.errors import NumericsError
from rlvlm.core.progress import count_progress
from rlvlm.core.steps import FloatArray
from rlvlm.policies.protocol import Imitation, Policy

_RECENT = 10
"""Updates whose mean loss is told."""
_MEGA = 8
"""Batches that are sorted by length together: more save padding, fewer mix better."""


def imitate(  # noqa: PLR0913 - all that a supervised start depends on
    policy: Policy,
    env: Any,
    shown: Any,
    sft: ReplySFTConfig | ChunkSFTConfig,
    rng: np.random.Generator,
    log: Callable[[str], None],
    *,
    weights: FloatArray | None = None,
    at_once: Callable[[Tensor, Imitation], list[Tensor]] = lambda rows, _: [rows],
) -> float:
    """Teaches `policy` what it was shown; returns the mean loss of the last ten updates, NaN where there was none. What
    a loss is, `Policy.imitation` says.

    Several learners take each step together, on equal policies, demonstrations and random numbers.

    Args:
        policy: is changed; the value head is left alone.
        env: draws what it sees.
        shown: as `Policy.imitation` takes it.
        sft: steps, batches and step sizes.
        rng: of batches and all else that is drawn.
        log: takes a line on how it goes.
        weights: [M] what each shown answer counts, >= 0, in the order in which they were shown; None: all 1.
        at_once: cuts a learner's share of a batch into the parts that go through the policy at once.

    Raises:
        UsageError: see `Policy.imitation`.
        NumericsError: the loss is not finite.
    """
    prepared = policy.imitation(shown, env, sft, own_stream(rng), log)
    counts = None if weights is None else torch.from_numpy(np.asarray(weights, np.float32)[prepared.shown])
    parameters = policy.acting_parameters()
    # one call cannot take slices and whole tensors
    optimizer = torch.optim.AdamW(
        parameters, betas=sft.betas, weight_decay=sft.weight_decay, foreach=False if is_sharded(parameters) else None
    )
    batches, losses = _batches(prepared, sft.batch_size, rng), list[float]()
    for update in range(sft.updates):
        for group in optimizer.param_groups:
            group["lr"] = sft.lr_at(update)
        optimizer.zero_grad()
        rows, total = next(batches), torch.zeros((), dtype=torch.float64)
        parts = [part for part in at_once(local_shard(rows), prepared) if len(part)]
        # learners that gather weights together make equally many passes: the last of some count for nothing
        for number in range(largest(len(parts)) if is_sharded(parameters) else len(parts)):
            is_own = number < len(parts)
            part = parts[number] if is_own else rows[:1]
            loss = prepared.loss(part, None if counts is None else counts[part]) * (is_own * len(part) / len(rows))
            loss.backward()
            total += loss.detach().cpu()
        add_up_gradients(parameters)
        if sft.max_grad_norm < math.inf:
            clip_gradients(parameters, sft.max_grad_norm)
        optimizer.step()
        count_progress()
        losses.append(float(all_reduce(total)))
        # after the step, whose weights are of no use any more if it was not finite
        if not math.isfinite(losses[-1]):
            raise NumericsError(
                f"the loss of update {update + 1} of the supervised start is {losses[-1]}",
                "start anew with a smaller --sft.lr",
            )
        if (update + 1) % sft.log_every == 0:
            log(f"supervised start: update {update + 1} of {sft.updates}, loss {recent(losses):.3f}")
    policy.forget_stale_images()
    return recent(losses) if losses else math.nan


def recent(losses: Sequence[float]) -> float:
    """The mean of the last ten."""
    last = losses[-_RECENT:]
    return sum(last) / len(last)


def _batches(prepared: Imitation, size: int, rng: np.random.Generator) -> Iterator[Tensor]:
    """Rows of each update: epochs of batches of like length where lengths differ, else drawn anew each time."""
    while True:
        if prepared.lengths:
            yield from map(torch.tensor, grouped_by_length(prepared.lengths, size, rng))
        else:
            yield torch.from_numpy(rng.integers(len(prepared), size=size))


def grouped_by_length(lengths: Sequence[int], batch: int, rng: np.random.Generator) -> Iterator[list[int]]:
    """One epoch: indices of examples of like `lengths` [M] in batches, each index once; the last may be smaller.

    `rng` shuffles the examples, and then the batches.
    """
    indices = rng.permutation(len(lengths)).tolist()
    batches: list[list[int]] = []
    for begin in range(0, len(indices), batch * _MEGA):
        mega = sorted(indices[begin : begin + batch * _MEGA], key=lambda index: lengths[index])
        batches += [mega[first : first + batch] for first in range(0, len(mega), batch)]
    # sorted batches would come from the shortest to the longest, eight at a time
    for number in rng.permutation(len(batches)).tolist():
        yield batches[number]
