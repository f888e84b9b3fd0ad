"""Instructions in the form in which LeRobot's policies were trained."""

from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

NO_TOKEN = -1
"""Padding of prompts that are shorter than others."""
_EDGES = np.linspace(-1, 1, 257)[:-1]
"""Lower edges of the bins by which pi0.5 writes the numbers of the state."""


class Prompts:
    """Converts instructions to the input of a network's `prefix`: token ids.

    Args:
        tokenizer: tokenizer of the checkpoint's VLM; it is changed to truncate and never pad.
        max_tokens: maximum length of a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        tokenizer.no_padding()
        tokenizer.enable_truncation(max_tokens)
        self._tokenizer = tokenizer

    def read(self, instructions: Sequence[str]) -> Tensor:
        """Returns [B, W] int64 ids on the CPU; shorter prompts are padded on the right with `NO_TOKEN`."""
        # as in training, every prompt ends with a newline
        return self._ids([text if text.endswith("\n") else f"{text}\n" for text in instructions])

    def completed(self, token_ids: Tensor, proprio: Tensor) -> Tensor:
        """Returns [B, V] token ids of whole prompts, from `read`'s result and normalised `proprio` [B, P]."""
        return token_ids

    def _ids(self, texts: Sequence[str]) -> Tensor:
        return _filled([encoding.ids for encoding in self._tokenizer.encode_batch(texts)])


class StatePrompts(Prompts):
    """pi0.5's prompts, which contain the state as text. `read` returns characters, because only whole prompts have
    tokens.

    Args:
        tokenizer, max_tokens: see `Prompts`.
        min_numbers: minimum numbers of the state; a shorter one is padded with 0.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int, min_numbers: int) -> None:
        super().__init__(tokenizer, max_tokens)
        self._min_numbers = min_numbers

    def read(self, instructions: Sequence[str]) -> Tensor:
        """Returns [B, W] int64 code points on the CPU; shorter texts are padded on the right with `NO_TOKEN`."""
        texts = [text.strip().replace("_", " ").replace("\n", " ") for text in instructions]
        return _filled([[ord(letter) for letter in text] for text in texts])

    def completed(self, token_ids: Tensor, proprio: Tensor) -> Tensor:
        """See `Prompts`; ids on the device of `token_ids`. Numbers below -1 are written as -1, as in training."""
        states = proprio.float().cpu().numpy()
        states = np.pad(states, ((0, 0), (0, max(0, self._min_numbers - states.shape[1]))))
        bins = np.digitize(states, _EDGES) - 1
        rows = zip(token_ids.tolist(), bins.tolist(), strict=True)
        return self._ids(
            [
                f"Task: {''.join(chr(code) for code in codes if code != NO_TOKEN)}, "
                f"State: {' '.join(map(str, numbers))};\nAction: "
                for codes, numbers in rows
            ]
        ).to(token_ids.device)


def _filled(rows: Sequence[Sequence[int]]) -> Tensor:
    """Returns [B, W] int64, `rows` of different lengths padded with `NO_TOKEN`."""
    longest = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[NO_TOKEN] * (longest - len(row))] for row in rows]).view(len(rows), longest)
