"""Conditioning on judged return: the prompt tells a policy whether its answer is to be better than expected.

It imitates all demonstrations, good and bad, each labelled as such, and is prompted for good answers when it plays.

Source: the prompts of RECAP (Physical Intelligence 2025, arXiv:2511.14759), of which this is a part. Departures:
1. There is no value model: what is expected is the mean judged worth of episodes at similar progress (`weighting`).
2. An answer is labelled by its whole episode's worth, not by an advantage of N steps.
3. Labels to drop are drawn once and not in each step.
4. There is no guidance by the difference between the two prompts, and no corrections by people.
5. Data are collected once: no rounds of collecting, labelling and training.
"""

from collections.abc import Sequence

import numpy as np

from rlvlm.core.steps import FloatArray

_WORDS = {0.0: "Advantage: negative", 1.0: "Advantage: positive"}
P_DROPPED = 0.3
"""Probability that an answer is learned without its label."""


def positive(texts: Sequence[str]) -> tuple[str, ...]:
    """Returns prompts that ask for an answer better than expected."""
    return tuple(f"{text}\n{_WORDS[1.0]}" for text in texts)


def told(texts: Sequence[str], judged: FloatArray, rng: np.random.Generator) -> tuple[str, ...]:
    """Returns prompts labelled with the quality of their demonstrated answers.

    Args:
        texts: [M] the env's prompts.
        judged: [M] 1 if better than expected, 0 if not, NaN if unknown.
        rng: draws which labels are dropped.
    """
    words = np.where(rng.random(len(texts)) < P_DROPPED, np.nan, judged)
    return tuple(f"{text}\n{_WORDS[word]}" if word in _WORDS else text for text, word in zip(texts, words, strict=True))
