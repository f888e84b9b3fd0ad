"""YAML that users wrote, read within bounds: no alias bomb, no tower of brackets, no tag that makes an object."""

from typing import Any

import yaml

from rlvlm.core.errors import UsageError

MAX_CHARS = 1_000_000
MAX_DEPTH = 32
"""Lists and mappings in each other; our own files have six."""
MAX_ALIASES = 32
"""So many, however they are nested, stand for some 100,000 values at most."""


def read_yaml(text: str, name: str) -> Any:
    """The plain values that a YAML text holds.

    Args:
        text: the file's text.
        name: of the file, for messages.

    Raises:
        UsageError: it is not YAML, or larger, deeper or more entangled than a file of settings is.
    """
    try:
        if len(text) > MAX_CHARS:
            raise ValueError(f"it has more than {MAX_CHARS:,} characters")
        _check_shape(text)  # a pass over the events alone, which holds nothing in memory
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # a date or a number may be none
        reason = " ".join(str(error).split())
        raise UsageError(f"{name} is not YAML that can be read: {reason}", "correct the file, or restore it") from error


def _check_shape(text: str) -> None:
    """Raises ValueError for too many levels or aliases, before anything is built."""
    open_anchors: list[str | None] = []
    num_aliases = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_anchors.append(event.anchor)
            if len(open_anchors) > MAX_DEPTH:
                raise ValueError(f"it has lists or mappings more than {MAX_DEPTH} deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            open_anchors.pop()
        elif isinstance(event, yaml.AliasEvent):
            num_aliases += 1
            if num_aliases > MAX_ALIASES:
                raise ValueError(f"it has more than {MAX_ALIASES} aliases (*name)")
            if event.anchor in open_anchors:  # whoever walks such a tree never comes to an end
                raise ValueError(f"the alias *{event.anchor} stands inside of what it names")
