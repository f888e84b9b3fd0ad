"""Parsing of the action in a player's reply. Used by envs in turns; never raises, whatever the text."""

import json
import re
from collections.abc import Iterator, Sequence

from rlvlm.core.episodes import Reply

MAX_CHARS = 16_384
"""Longer replies are not parsed: no honest one is longer, and parsing time may grow with the square of the length."""
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def write_reply(action: str, thought: str = "") -> str:
    """Returns a well-formed reply: a JSON object whose last member is the action.

    Args:
        action: name of the action.
        thought: text before the action: members of a JSON object, e.g. `"current number": 3, "thoughts": "..."`, or
            text, which becomes the member `thoughts`.
    """
    if thought and not _is_members(thought):
        thought = f'"thoughts": {json.dumps(thought, ensure_ascii=False)}'
    return f'{{{thought}{", " if thought else ""}"action": {json.dumps(action, ensure_ascii=False)}}}'


def read_reply(text: str, names: Sequence[str], legal: Sequence[int]) -> Reply:
    """Reads the last complete JSON object of `text` that has a member `action`; ignores text around it.

    Args:
        text: any text.
        names: names of the actions; case and surrounding spaces are ignored.
        legal: indices of the actions that may be chosen now.
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
    # two actions in one object are ambiguous; a boolean or a list may print like a name but is none
    chosen = index if is_word and index in legal and len(actions) == 1 else None
    span = (begin + 1, end - 1) if isinstance(value, str) else (begin, end)
    return Reply(text=text, thought=thought, action=chosen, action_span=span)


def read_legacy(text: str, names: Sequence[str], legal: Sequence[int]) -> Reply:
    """Reads as RL4VLM does: the only legal name anywhere after the first `"action":`; None if several or none occur.

    It rejects `"action": "-"}` if a later sentence contains a hyphen, and reads 110 as 10; kept for comparison only.

    Source: Zhai et al. 2024 (RL4VLM), arXiv:2405.10292, and its published code.
    """
    mark, lowered = '"action":', text.lower()
    # lower case may be longer, as for a Turkish capital I: index in `text` of the character each one comes from
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
    """Returns whether `thought` in braces is a JSON object without an action of its own."""
    try:
        value = json.loads(f"{{{thought}}}")
    except (ValueError, RecursionError):
        return False
    return "action" not in value


Member = tuple[str, object, tuple[int, int], int]
"""Name, value, character range of the value (including quotes), and index where the name begins."""


def _objects(text: str) -> Iterator[tuple[int, list[Member]]]:
    """Yields the start of each complete JSON object of `text`, and its members, but no nested objects."""
    start = text.find("{")
    while start >= 0:
        try:
            members, end = _members(text, start + 1)
            yield start, members
        except (ValueError, RecursionError, IndexError):
            end = start + 1  # not an object here; one may begin inside of it
        start = text.find("{", end)


def _members(text: str, position: int) -> tuple[list[Member], int]:
    """Returns the members from `position` to the closing brace, and the index after it.

    Raises:
        ValueError: it is not JSON.
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
    """Returns the index of the next character from `position` on that is not a space."""
    match = _SPACE.match(text, position)
    assert match is not None  # the pattern matches the empty text too
    return match.end()
