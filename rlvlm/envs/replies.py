"""Reading the action out of what a player wrote. Used by envs in turns; whatever the text is, nothing is raised."""

import json
import re
from collections.abc import Iterator, Sequence

from rlvlm.core.episodes import Reply

MAX_CHARS = 16_384
"""Longer replies are not read: no honest one is longer, and reading one may take time that grows with its square."""
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def write_reply(action: str, thought: str = "") -> str:
    """A well-formed reply: a JSON object whose last member is the action.

    Args:
        action: the word of the action.
        thought: what stands before it: members of a JSON object as text, e.g. `"current number": 3, "thoughts": "..."`,
            or plain words, which become the member `thoughts`.
    """
    if thought and not _is_members(thought):
        thought = f'"thoughts": {json.dumps(thought, ensure_ascii=False)}'
    return f'{{{thought}{", " if thought else ""}"action": {json.dumps(action, ensure_ascii=False)}}}'


def read_reply(text: str, names: Sequence[str], legal: Sequence[int]) -> Reply:
    """The last complete JSON object of `text` that has a member `action`, read; words around it do no harm.

    Args:
        text: anything.
        names: what the actions are called; case and spaces around a word do not matter.
        legal: which of them may be chosen now.
    """
    found = None
    for start, members in _objects(text) if len(text) <= MAX_CHARS else ():
        actions = [member for member in members if member[0] == "action"]
        found = (start, actions) if actions else found
    if found is None:
        return Reply(text=text, thought="", action=None, action_span=None)
    start, actions = found
    _, value, (begin, end), position = actions[0]
    thought = text[start + 1 : position].strip().removesuffix(",").rstrip()
    is_word = isinstance(value, str) or type(value) is int
    index = {name.casefold(): i for i, name in enumerate(names)}.get(str(value).strip().casefold())
    # two actions in one object are no decision; a boolean or a list may look like a word, and is none
    chosen = index if is_word and index in legal and len(actions) == 1 else None
    span = (begin + 1, end - 1) if isinstance(value, str) else (begin, end)
    return Reply(text=text, thought=thought, action=chosen, action_span=span)


def read_legacy(text: str, names: Sequence[str], legal: Sequence[int]) -> Reply:
    """As RL4VLM reads: the one legal word that occurs anywhere behind the first `"action":`; several or none: None.

    It takes `"action": "-"}` with a hyphen in a later sentence for nothing, and 110 for 10; kept for comparison only.

    Source: Zhai et al. 2024 (RL4VLM), arXiv:2405.10292, and its published code.
    """
    mark, lowered = '"action":', text.lower()
    # lower case may be longer, as of a Turkish capital I: the character of `text` that each one comes from
    origin = [index for index, char in enumerate(text) for _ in char.lower()]
    where = lowered.find(mark)
    begin = where + len(mark) if where >= 0 else max(len(lowered) - 1, 0)
    tail = lowered[begin:]
    found = []
    if "10" in names and "10" in tail:  # or it would be read as 1
        found, tail = [names.index("10")], tail.replace("10", "")
    found += [i for i in legal if names[i] != "10" and names[i].lower() in tail]
    action = found[0] if len(found) == 1 and found[0] in legal else None
    name = "" if action is None else names[action].lower()
    index = lowered.find(name, begin) if name else -1
    span = (origin[index], origin[index + len(name) - 1] + 1) if index >= 0 else None
    thought = text[: origin[where]] if where >= 0 else ""
    return Reply(text=text, thought=thought.lstrip(" {").rstrip(" ,"), action=action, action_span=span)


def _is_members(thought: str) -> bool:
    """Whether `thought` in braces is a JSON object without an action of its own."""
    try:
        value = json.loads(f"{{{thought}}}")
    except (ValueError, RecursionError):
        return False
    return "action" not in value


Member = tuple[str, object, tuple[int, int], int]
"""Name, value, the characters of the value (quotes included), and where the name begins."""


def _objects(text: str) -> Iterator[tuple[int, list[Member]]]:
    """Begin of each complete JSON object of `text`, and its members; one inside another is not listed by itself."""
    start = text.find("{")
    while start >= 0:
        try:
            members, end = _members(text, start + 1)
            yield start, members
        except (ValueError, RecursionError, IndexError):
            end = start + 1  # not an object from here on; one may begin inside of it
        start = text.find("{", end)


def _members(text: str, position: int) -> tuple[list[Member], int]:
    """The members from `at` up to the closing brace, and the place behind it.

    Raises:
        ValueError: this is not JSON.
        IndexError: the text ends too early.
    """
    members: list[Member] = []
    position = _skip(text, position)
    while text[position] != "}" or members:
        name, after = _DECODER.raw_decode(text, position)
        colon = _skip(text, after)
        if not isinstance(name, str) or text[colon] != ":":
            raise ValueError("a name and a colon are wanted")
        begin = _skip(text, colon + 1)
        value, end = _DECODER.raw_decode(text, begin)
        members.append((name, value, (begin, end), position))
        position = _skip(text, end)
        if text[position] == "}":
            break
        if text[position] != ",":
            raise ValueError("a comma is wanted")
        position = _skip(text, position + 1)
    return members, position + 1


def _skip(text: str, position: int) -> int:
    """The next character from `at` on that is no space."""
    match = _SPACE.match(text, position)
    assert match is not None  # it matches the empty text too
    return match.end()
