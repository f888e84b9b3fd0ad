"""Instructions as SmolVLA was trained to read them."""

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

NO_WORD = -1
"""Stands where a shorter prompt has no token."""


class Prompts:
    """Instructions as a network's `prefix` takes them.

    Args:
        tokenizer: of the checkpoint's VLM; it is changed to cut off and never to fill up.
        max_words: tokens of the longest prompt.
    """

    def __init__(self, tokenizer: Tokenizer, max_words: int) -> None:
        tokenizer.no_padding()
        tokenizer.enable_truncation(max_words)
        self._tokenizer = tokenizer

    def read(self, instructions: Sequence[str]) -> Tensor:
        """[B, W] int64 ids on the CPU; shorter prompts are filled up behind them with `NO_WORD`."""
        # as in training, every prompt ends with a new line
        texts = [text if text.endswith("\n") else f"{text}\n" for text in instructions]
        rows = [encoding.ids for encoding in self._tokenizer.encode_batch(texts)]
        longest = max(map(len, rows), default=0)
        return torch.tensor([row + [NO_WORD] * (longest - len(row)) for row in rows]).view(len(rows), longest)
