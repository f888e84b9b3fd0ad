"""YAML that users wrote, read within bounds: no alias bomb, no tower of brackets, no tag that makes an object.

Departures from PyYAML: `1e-4` is a number, as on the command line (YAML 1.1 wants 1.0e-4), and a key that stands twice
in a mapping is an error, where PyYAML takes the last.
"""

import re
from typing import Any

import yaml

from rlvlm.core.errors import UsageError

MAX_CHARS = 1_000_000
MAX_DEPTH = 32
"""Lists and mappings in each other; our own files have six."""
MAX_ALIASES = 32
"""So many, however they are nested, stand for some 100,000 values at most."""


_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """The mapping, whose keys differ; looked at here, before `<<` has mixed in those of others."""
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
    """Quotes the texts that `_Loader` would take for numbers."""


for kind in (_Loader, _Dumper):
    kind.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, [*"-+0123456789"])


def write_yaml(value: Any) -> str:
    """The text of plain values, in their order; `read_yaml` gives them back."""
    # wide enough that each value, a long goal too, is one line: settings are commented behind lines
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000)


def read_yaml(text: str, name: str) -> Any:
    """The plain values that a YAML text holds.

    Args:
        text: the file's text.
        name: of the file, for messages.

    Raises:
        UsageError: it is not YAML, has a key twice, or is larger, deeper or more entangled than a file of settings is.
    """
    try:
        if len(text) > MAX_CHARS:
            raise ValueError(f"it has more than {MAX_CHARS:,} characters")
        _check_shape(text)  # a pass over the events alone, which holds nothing in memory
        return yaml.load(text, Loader=_Loader)
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
            if event.anchor in open_anchors:  # a walk through such a tree never ends
                raise ValueError(f"the alias *{event.anchor} stands inside of what it names")
