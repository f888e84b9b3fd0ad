"""The one place where sequences of different length become one batch.

A row is `[padding | prompt | reply | padding]`: prompts end in one column and replies begin in the next, in sampling
and in training alike. So the value is read in one column, log-probs in a fixed range of columns, and the two never
disagree about where a token stands.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlvlm.core.sampling import IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Padded:
    """Prompts of P tokens and replies of N tokens at most."""

    ids: Tensor
    """[B, P + N] token ids."""
    positions: Tensor
    """[R, B, P + N] rotary positions; R is 3 (time, height, width) for models with such positions, else 1."""
    attention: Tensor | None
    """[B, P + N] 1 for tokens that may be attended to; None where no prompt is padded: what is right of a token is
    hidden from it anyway, and without a mask attention takes its fast path."""
    is_reply: Tensor
    """[B, N] True for the tokens of a reply."""
    prompt_length: int
    """P."""

    @property
    def replies(self) -> Tensor:
        """[B, N] the replies' ids."""
        return self.ids[:, self.prompt_length :]


def pad(
    prompts: Sequence[IntArray],
    positions: Sequence[Tensor],
    replies: Sequence[IntArray],
    pad_id: int,
    device: torch.device,
) -> Padded:
    """One batch of `prompts` with their `replies`.

    Args:
        prompts: [P] ids of each prompt.
        positions: [R, P] of each prompt; a reply goes on at the largest position plus one.
        replies: [N] ids of each; empty where there is none yet.
        pad_id: what stands where nothing stands.
        device: of the result.
    """
    width, room = max(len(prompt) for prompt in prompts), max(len(reply) for reply in replies)
    ids = torch.full((len(prompts), width + room), pad_id)
    attention = torch.zeros_like(ids)
    where = torch.zeros((positions[0].shape[0], *ids.shape), dtype=torch.long)
    for row, (prompt, place, reply) in enumerate(zip(prompts, positions, replies, strict=True)):
        begin, end = width - len(prompt), width + len(reply)
        ids[row, begin:width] = torch.tensor(prompt)
        ids[row, width:end] = torch.tensor(reply)
        attention[row, begin:end] = 1
        where[:, row, begin:width] = place
        where[:, row, width:] = place.max() + 1 + torch.arange(room)
    is_padded_left = any(len(prompt) < width for prompt in prompts)
    return Padded(
        ids=ids.to(device),
        positions=where.to(device),
        attention=attention.to(device) if is_padded_left else None,
        is_reply=attention[:, width:].bool().to(device),
        prompt_length=width,
    )
