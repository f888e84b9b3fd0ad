"""What travels between a client and a replica around the questions, so that nothing is lost, doubled or swapped."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rlvlm.core.judging import Clip, Query, Score, Verdict

Kind = Literal["compare", "score"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Some questions of one run, sent together."""

    key: str
    """The same for every try of this request: a replica that meets it twice judges once."""
    run: str
    """Who asks; runs share a replica evenly."""
    kind: Kind
    items: list[Any]
    """Queries or clips."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """The answers to one request, with what they are about."""

    answers: list[Verdict] | list[Score]
    digests: list[bytes]
    """`digest` of each question as the replica received it."""


def digest(item: Query | Clip) -> bytes:
    """32 bytes that two questions share only when goal, action and all images are the same."""
    clips = [item.frames] if isinstance(item, Clip) else [item.left, item.right]
    clips += [item.goal_picture] if item.goal_picture is not None else []
    told = (item.goal, item.action) if isinstance(item, Clip) and item.action else item.goal
    content = hashlib.sha256(repr((type(item).__name__, told, [clip.shape for clip in clips])).encode())
    for clip in clips:
        content.update(np.ascontiguousarray(clip).data)
    return content.digest()


def request_key(call: str, index: int, digests: Sequence[bytes]) -> str:
    """The idempotency key of the `index`-th request of one call: what it asks, and where it stands.

    The call and the place are part of it because a sampling judge may be asked the same thing again on purpose.
    """
    return f"{call}:{index}:{hashlib.sha256(b''.join(digests)).hexdigest()}"
