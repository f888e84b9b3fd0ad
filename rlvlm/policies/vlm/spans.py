"""Which tokens of a reply make up a span of its characters. Works for any tokenizer: only decoding is asked of it."""

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.sampling import IntArray


def decode(tokenizer: Any, ids: IntArray) -> str:
    """The words of `ids` [N], without special tokens and without tidying up spaces."""
    return tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def token_ends(tokenizer: Any, ids: IntArray) -> IntArray:
    """[N] where in the decoded text each token of `ids` ends, in characters; never falls.

    The offsets come from decoding ever longer beginnings of the sampled ids. Tokenizing the text again would give other
    tokens: a policy need not spell a word the way its tokenizer does. A token that holds only part of a character ends
    where the character begins.
    """
    text = decode(tokenizer, ids)
    ends = np.zeros(len(ids), np.int64)
    for count in range(1, len(ids) + 1):
        ends[count - 1] = len(os.path.commonprefix((decode(tokenizer, ids[:count]), text)))
    return np.maximum.accumulate(ends)


def tokens_of_span(tokenizer: Any, ids: IntArray, span: tuple[int, int]) -> NDArray[np.bool_]:
    """[N] True for each token that holds a part of the characters `span` (begin, end) of the decoded text."""
    begin, end = span
    ends = token_ends(tokenizer, ids)
    begins = np.concatenate([[0], ends[:-1]])
    return (begins < end) & (ends > begin)
