"""Reads users' YAML within bounds: no alias bomb, no deep nesting, no tag that makes an object.

Departures from PyYAML: `1e-4` is a number, as on the command line (YAML 1.1 requires 1.0e-4), and a duplicate key in a
mapping is an error, while PyYAML takes the last.
"""

import re
from typing import Any

import yaml

from rlvlm.core.errors import UsageError

MAX_CHARS = 1_000_000
MAX_DEPTH = 32
"""Maximum nesting of lists and mappings; our own files have six levels."""
MAX_ALIASES = 32
"""Maximum number of aliases: however they are nested, they stand for at most about 100,000 values."""


_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Returns the mapping after checking for duplicate keys, before `<<` mixes in other keys."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if first := lines.get((key.tag, key.value)):
                    raise ValueError(f"the key {key.value!r} stands twice in one mapping, in lines {first} and {line}")
                lines[key.tag, key.value] = line
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes texts that `_Loader` would read as numbers."""


for kind in (_Loader, _Dumper):
    kind.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, [*"-+0123456789"])


def write_yaml(value: object) -> str:
    """Returns the text of plain values, in their order, for `read_yaml`."""
    # wide enough that each value, even a long goal, is one line: settings are commented at the end of lines
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000)


def read_yaml(text: str, name: str) -> Any:
    """Returns the plain values in a YAML text.

    Args:
        text: content of the file.
        name: name of the file, for messages.

    Raises:
        UsageError: it is not YAML, has a duplicate key, or is too large, deep or entangled for a file of settings.
    """
    try:
        if len(text) > MAX_CHARS:
            raise ValueError(f"it has more than {MAX_CHARS:,} characters")
        _check_shape(text)  # a pass over the events alone, which holds nothing in memory
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # a date or a number may be invalid
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
            if event.anchor in open_anchors:  # a walk through such a tree never ends
                raise ValueError(f"the alias *{event.anchor} stands inside of what it names")
