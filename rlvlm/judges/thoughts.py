"""Models whose chat template lets the answer begin inside a thought: what to add to what they are given and write."""

_OPEN, _CLOSED = "<think>", "\n</think>\n\n"


def opens_thought(chat: str) -> bool:
    """Whether a rendered chat ends inside a thought."""
    return chat.rstrip().endswith(_OPEN)


def without_thought(chat: str) -> str:
    """The rendered chat, closed where it ends inside a thought, so that the answer itself comes next."""
    return chat + _CLOSED if opens_thought(chat) else chat


def whole_answer(chat: str, answer: str) -> str:
    """What was written behind `chat`, with the mark that the template had already opened."""
    return _OPEN + answer if opens_thought(chat) else answer
