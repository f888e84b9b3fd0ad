"""Advantage conditioning: a policy reads in its prompt whether what it is to do is better than expected.

It imitates all that it is shown, good and bad, each with its word, and is always asked for what is good when it plays.

Source: Physical Intelligence 2025, arXiv:2511.14759 (RECAP). Departures: which answers stand without a word is drawn
once and not in each step, and nothing is guided by the difference between the two prompts.
"""

from collections.abc import Sequence

import numpy as np

from rlvlm.core.steps import FloatArray

_WORDS = {0.0: "Advantage: negative", 1.0: "Advantage: positive"}
P_DROPPED = 0.3
"""Probability that an answer is learned without its word."""


def positive(texts: Sequence[str]) -> tuple[str, ...]:
    """Prompts that ask for what is better than expected."""
    return tuple(f"{text}\n{_WORDS[1.0]}" for text in texts)


def told(texts: Sequence[str], judged: FloatArray, rng: np.random.Generator) -> tuple[str, ...]:
    """Prompts that say of what is shown for them how it did.

    Args:
        texts: [M] as the env has them.
        judged: [M] 1 for better than expected, 0 for not, NaN where nobody knows.
        rng: drops words.
    """
    words = np.where(rng.random(len(texts)) < P_DROPPED, np.nan, judged)
    return tuple(f"{text}\n{_WORDS[word]}" if word in _WORDS else text for text, word in zip(texts, words, strict=True))
