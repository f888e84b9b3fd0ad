"""The loop of supervised fine-tuning, which all policies share; what is learned is `sft_replies` and `sft_chunks`."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rlvlm.core.errors import NumericsError


def fit(
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[int], Tensor],
    *,
    updates: int,
    lr_of: Callable[[int], float],
    max_grad_norm: float = math.inf,
    log_every: int,
    log: Callable[[str], None],
) -> float:
    """Takes `updates` steps; returns the mean loss of the last ten, NaN where there was none.

    Args:
        optimizer: takes the steps.
        loss_of: the loss of a batch of its own choice, by the update's number from 0.
        updates: steps.
        lr_of: step size of each update.
        max_grad_norm: larger gradients are scaled down to this norm.
        log_every: updates between two lines.
        log: takes a line on how it goes.

    Raises:
        NumericsError: the loss is not finite.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    losses: list[float] = []

    def recent_loss() -> float:
        recent = losses[-10:]
        return sum(recent) / len(recent)

    for update in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = lr_of(update)
        loss = loss_of(update)
        optimizer.zero_grad()
        loss.backward()
        if max_grad_norm < math.inf:
            nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
        # after the step, whose weights nobody uses any more if it was not finite
        if not math.isfinite(losses[-1]):
            raise NumericsError(
                f"the loss of update {update + 1} of the supervised start is {losses[-1]}",
                "start anew with a smaller --sft.lr",
            )
        if (update + 1) % log_every == 0:
            log(f"supervised start: update {update + 1} of {updates}, loss {recent_loss():.3f}")
    return recent_loss() if losses else math.nan
