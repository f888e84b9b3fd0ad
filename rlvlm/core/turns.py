"""A turn of an env that is talked to, from both sides: what the env shows and reads, what a policy is asked and
answers, and what must be kept of it to recompute log-probs.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What a player is given when it is its turn."""

    snapshot: FloatArray
    """[S] everything that can change the image; the env can draw it."""
    prompt: str
    """The user's words of this turn, without any mark for the image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What a player wrote, and what the env read in it."""

    text: str
    """As it was written; untrusted."""
    thought: str
    """The members of the reply's JSON object that stand before its action, as written; empty where there are none."""
    action: int | None
    """Index into the env's `action_names`; None: nothing could be read, or the action is not legal now."""
    action_span: tuple[int, int] | None
    """First and one past the last character of `text` that make up the action's value, its quotes left out; None where
    there is no such value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyRequest:
    """One question to a policy engine: an image it has been shown, and the user's words."""

    prompt: str
    """The user's words of this turn; the engine puts them into the model's chat format."""
    image: bytes
    """Key of the image, as given to `show`: equal keys mean equal pixels."""
    seed: int
    """Of this reply alone: it does not depend on what else is in the batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyTokens:
    """Exactly what a policy was shown and what it answered; log-probs are recomputed from this and nothing else."""

    prompt_ids: IntArray
    """[N] the whole prompt, image tokens expanded, chat format included."""
    image: bytes
    """Key of the image."""
    reply_ids: IntArray
    """[N] the reply, with the end-of-turn token where the policy gave one; empty for an action head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledReply:
    """A reply as it was sampled."""

    tokens: ReplyTokens
    text: str
    """The reply's words, without special tokens: untrusted."""
    log_probs: FloatArray
    """[N] of each reply token under the weights and the temperature it was sampled with."""
    value: float
    """The value head's estimate at the last token of the prompt."""
    is_complete: bool
    """False where the reply was cut at the token limit."""
    version: int
    """Of the weights that gave it."""
    action: int | None = None
    """What an action head picked, in place of a reply: its log-prob is the only one, and there are no words; None where
    the action is read in the text."""
