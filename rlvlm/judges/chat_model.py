"""What a library that runs a chat VLM must offer for `ChatJudge` to stand on it; members are in `backends`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlvlm.judges.prompts import Chat

TOP_P = 0.9
"""Of sampling, where the temperature is above 0."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model wrote."""

    text: str
    """All of it."""
    readable: str
    """Without the last line where the token limit tore it: a cut `10` would read as 1."""


class ChatModel(Protocol):
    """A network that reads chats with pictures."""

    @property
    def revision(self) -> str:
        """Commit or digest of the weights; empty when unknown."""
        ...

    @property
    def traits(self) -> str:
        """Whatever else changes its answers at fixed weights, e.g. `dtype=float32 quantization=none`."""
        ...

    def generate(
        self, chats: Sequence[Chat], *, max_new_tokens: int, temperature: float, choices: Sequence[str] = ()
    ) -> list[Reply]:
        """One reply per chat, greedy at temperature 0; of `choices` alone, where the library can hold it to them."""
        ...

    def choice_log_p(self, chats: Sequence[Chat], choices: Sequence[str]) -> NDArray[np.float64]:
        """[B, C] log-probability that the reply to each chat begins with each choice's whole text."""
        ...

    def release_memory(self) -> None:
        """Gives unused memory back, after it ran out."""
        ...
