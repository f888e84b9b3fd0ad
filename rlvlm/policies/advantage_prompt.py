"""Conditioning on advantages: the prompt tells a policy whether its answer is to be better than expected.

It imitates all demonstrations, good and bad, each labelled as such, and is prompted for good answers when it plays.

Source: RECAP (Physical Intelligence 2025, arXiv:2511.14759). Departures:
1. The value is the probability that the episode is called a success by a judge (`rlvlm score --value`), of small
   networks that see small images; there it is the expected time to success, of a VLM, and outcomes are true.
2. An answer is predicted by a network that has not seen how its episode ended; there the value has seen all.
3. Advantages of N answers as there, but the better 40 % of them must be above 0 too.
4. Labels to drop are drawn once and not in each step.
5. VLAs are guided by the difference between both prompts (`policy.guidance`), policies in text are not.
6. A person's corrections are labelled positive, as there, where the data mark them: data sets of LeRobot do.
7. Data are collected once: no rounds of collecting, labelling and training.
Of labels without a value this is conditioned on judged return: an answer is labelled by its whole episode's worth minus
the mean worth of episodes at similar progress (`demonstrations.weighting`), and no figure of it says anything of RECAP.
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
