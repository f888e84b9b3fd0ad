"""A chat model that says what a test wrote down, in the place of a network."""

from collections.abc import Callable, Sequence

import numpy as np

from rlvlm.vlms.chats import ChatReply


class ScriptedModel:
    """Answers with `texts` in turn and with the rows of `log_p`; keeps what it was asked."""

    revision, traits = "1", "dtype=paper"

    def __init__(self, texts: Sequence[str] = (), log_p: Callable[[int], Sequence[Sequence[float]]] | None = None):
        self._texts = list(texts)
        self._log_p = log_p
        self.chats: list = []
        self.choices: list = []
        self.sizes: list[int] = []

    def generate(self, chats, *, max_new_tokens, temperature, choices=()):
        self._note(chats, choices)
        return [ChatReply(text=text) for text in (self._texts.pop(0) for _ in chats)]

    def choice_log_p(self, chats, choices):
        self._note(chats, choices)
        return np.array(self._log_p(len(chats)), np.float64)

    def release_memory(self) -> None:
        pass

    def _note(self, chats, choices) -> None:
        self.chats += chats
        self.choices.append(tuple(choices))
        self.sizes.append(len(chats))
