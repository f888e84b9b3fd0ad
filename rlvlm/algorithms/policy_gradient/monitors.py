"""Monitors of a policy's replies for signs of collapse, each of which users of such methods have met."""

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from rlvlm.core import metrics
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.errors import RunError

logger = logging.getLogger(__name__)

_HOPELESS = 0.9
"""Share of unreadable replies from which the user is warned."""


class PolicyCollapsed(RunError):  # noqa: N818 - named for what happened
    """The policy's replies are no longer readable by its env."""

    exit_code = 4


class ReadableMonitor:
    """Monitors the share of each rollout's unreadable replies, from which almost nothing can be learned.

    Args:
        max_invalid_share: share above which the run stops; 0 never stops.
    """

    def __init__(self, max_invalid_share: float) -> None:
        self._most = max_invalid_share
        self._was_hopeless = False

    def check(self, measured: Mapping[str, float]) -> None:
        """Warns if almost no reply of a rollout is readable, once until it improves.

        Raises:
            PolicyCollapsed: the share of unreadable replies exceeds the maximum.
        """
        share = measured[metrics.REPLY_INVALID]
        if self._most and share > self._most:
            raise PolicyCollapsed(
                f"{share:.0%} of the replies of a rollout cannot be read; algo.max_invalid_share is {self._most:g}",
                "go on from an older checkpoint with a smaller --algo.lr, or a larger --algo.loss.kl-weight",
            )
        is_hopeless = share >= _HOPELESS
        if is_hopeless and not self._was_hopeless:
            # replies that are cut lack a readable end: more tokens help those, and practice all others
            cut = measured[metrics.REPLY_CUT]
            more = "a larger --algo.max-reply-tokens" if cut > 0.5 else "more --sft.turns or --sft.updates"
            logger.warning(
                "%.0f%% of the replies of a rollout, which are sampled, cannot be read (%.0f%% were cut at the token "
                "limit): hardly anything can be learned from them. Try %s or a smaller --algo.temperature; "
                "--algo.max-invalid-share 0.5 stops such runs",
                100 * share, 100 * cut, more,
            )  # fmt: skip
        self._was_hopeless = is_hopeless


def watch_replies(episodes: Sequence[TokenEpisode], max_reply_tokens: int) -> dict[str, float]:
    """Returns metrics of some episodes' replies, by names in `rlvlm.core.metrics`.

    Args:
        episodes: at least one turn.
        max_reply_tokens: replies of this length were cut, unless they end exactly there.

    Returns:
        Share of unreadable replies; mean tokens; share of replies at the limit; share of adjacent token pairs that
        occurred before in the same reply; share of distinct images with the most common thought; and the entropy of the
        actions taken, in nats.
    """
    # a user's own policy may answer without tokens, and then repeats none
    replies = [answer["ids"].tolist() if "ids" in answer else [] for episode in episodes for answer in episode.answers]
    # an episode continued from an earlier rollout has replies of both; only this rollout's have images here
    read = [
        pair
        for episode in episodes
        for pair in zip(episode.replies[episode.first_step :], episode.obs.images[:-1], strict=True)
    ]
    lengths = [len(log_probs) for episode in episodes for log_probs in episode.log_probs]
    return {
        metrics.REPLY_INVALID: float(np.mean([reply.action is None for reply, _ in read])),
        metrics.REPLY_TOKENS: float(np.mean(lengths)),
        metrics.REPLY_CUT: float(np.mean([length >= max_reply_tokens for length in lengths])),
        metrics.REPLY_REPEATS: float(np.mean([repeated_pairs(reply) for reply in replies])),
        metrics.REPLY_SAME_THOUGHT: same_thought_share([(reply.thought, image) for reply, image in read]),
        metrics.REPLY_ACTION_ENTROPY: action_entropy([reply.action for reply, _ in read]),
    }


def repeated_pairs(ids: Sequence[int]) -> float:
    """Returns the share of adjacent pairs that occurred before; 0 for fewer than two tokens."""
    pairs = list(zip(ids, ids[1:], strict=False))
    return 1 - len(set(pairs)) / len(pairs) if pairs else 0.0


def same_thought_share(thoughts: Sequence[tuple[str, bytes]]) -> float:
    """Returns the share of distinct images with the most common thought; 1: the policy ignores the images.

    With one image, or replies without thoughts, nothing can be said: 0.
    """
    images: dict[str, set[bytes]] = defaultdict(set)
    for thought, image in thoughts:
        if thought:
            images[thought].add(image)
    # images with any thought, each once, although one may have had several thoughts
    different = set().union(*images.values()) if images else set()
    return max(map(len, images.values())) / len(different) if len(different) > 1 else 0.0


def action_entropy(actions: Sequence[int | None]) -> float:
    """Returns the entropy of the readable actions, nats; 0 if there is none."""
    counts = Counter(action for action in actions if action is not None)
    total = sum(counts.values())
    # H = - sum_a p(a) log p(a), over the whole rollout: 0 if one action is always taken
    return -sum(count / total * math.log(count / total) for count in counts.values()) if total else 0.0
