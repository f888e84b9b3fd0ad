"""Instructions as the policies of LeRobot were trained to read them."""

from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

NO_TOKEN = -1
"""Stands where a shorter prompt has no token."""
_EDGES = np.linspace(-1, 1, 257)[:-1]
"""Lower edges of the bins by which pi0.5 writes a number of the state."""


class Prompts:
    """Instructions as a network's `prefix` takes them: token ids.

    Args:
        tokenizer: of the checkpoint's VLM; it is changed to cut off and never to fill up.
        max_tokens: length of the longest prompt.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        tokenizer.no_padding()
        tokenizer.enable_truncation(max_tokens)
        self._tokenizer = tokenizer

    def read(self, instructions: Sequence[str]) -> Tensor:
        """[B, W] int64 ids on the CPU; shorter prompts are filled up behind them with `NO_TOKEN`."""
        # as in training, every prompt ends with a new line
        return self._ids([text if text.endswith("\n") else f"{text}\n" for text in instructions])

    def completed(self, token_ids: Tensor, proprio: Tensor) -> Tensor:
        """[B, V] token ids of whole prompts, of what `read` gave and normalised `proprio` [B, P]."""
        return token_ids

    def _ids(self, texts: Sequence[str]) -> Tensor:
        return _filled([encoding.ids for encoding in self._tokenizer.encode_batch(texts)])


class StatePrompts(Prompts):
    """pi0.5's prompts, which hold the state as text. `read` gives letters, since only the whole prompt has tokens.

    Args:
        tokenizer, max_tokens: see `Prompts`.
        min_numbers: a state that has fewer is filled up with 0.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int, min_numbers: int) -> None:
        super().__init__(tokenizer, max_tokens)
        self._min_numbers = min_numbers

    def read(self, instructions: Sequence[str]) -> Tensor:
        """[B, W] int64 code points on the CPU; shorter texts are filled up behind them with `NO_TOKEN`."""
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
    """[B, W] int64 of `rows` of different lengths."""
    longest = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[NO_TOKEN] * (longest - len(row))] for row in rows]).view(len(rows), longest)
