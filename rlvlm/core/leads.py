"""Types of settings that lead out of a folder: to code, files, models, servers and keys; and the walk that finds them.

They are texts like any other for YAML and the command line. Whatever opens a folder that somebody else may have made
asks for trust in every setting of these types (`rlvlm.core.trust`), so a new setting is covered by its type alone.
"""

import functools
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar

Mark = TypeVar("Mark")


class Lead(Enum):
    """Kind of thing that a setting refers to."""

    CODE = "code"
    FILE = "file"
    MODEL = "model"
    ADDRESS = "address"
    KEY = "key"


CodeRef = Annotated[str, Lead.CODE]
"""Name of something that ships, or of a user's own object as `my_file:NAME`, which is imported."""
FilePath = Annotated[str, Lead.FILE]
"""Path of a file, a folder or a program; empty for none."""
ModelName = Annotated[str, Lead.MODEL]
"""Name of a model on the hub or at a provider, or the path of its folder."""
Address = Annotated[str, Lead.ADDRESS]
"""URL or address of a server; empty for none."""
KeyVariable = Annotated[str, Lead.KEY]
"""Environment variable that holds a key; empty for none."""
OwnSetting = Annotated[str, Lead.FILE]
"""Value of a setting of a user's own object, which may be a path as well as a number."""


@dataclass(frozen=True, slots=True)
class Leading:
    """A setting whose value is not empty, and may lead out of its folder."""

    name: str
    """Dotted name, e.g. `judge.api.base_url`; a member of a list or a mapping has the name of its setting."""
    kind: Lead
    value: str


def find_leads(config: Any, prefix: str = "") -> Iterator[Leading]:
    """Yields the settings of a config tree that may lead out of its folder, by the types of its fields.

    A `Path` is one, and so is every changed text in a config class outside of rlvlm: its types are its author's.

    Args:
        config: a dataclass, whose fields may be dataclasses, tuples and mappings.
        prefix: prepended to each name.
    """
    kinds, is_foreign = _kinds(type(config)), type(config).__module__.partition(".")[0] != __name__.partition(".")[0]
    for field in fields(config):
        value, name = getattr(config, field.name), f"{prefix}{field.name}"
        kind = kinds[field.name]
        if kind is None and is_foreign and value != field.default:
            kind = Lead.FILE
        for leaf in _leaves(value):
            if is_dataclass(leaf):
                yield from find_leads(leaf, f"{name}.")
            elif isinstance(leaf, Path):
                yield Leading(name, kind or Lead.FILE, str(leaf))
            elif isinstance(leaf, str) and leaf and kind is not None:
                yield Leading(name, kind, leaf)


def _leaves(value: object) -> Iterator[object]:
    """Yields `value`, or everything inside of it if it is a list or a mapping."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


@functools.cache
def _kinds(config: type) -> dict[str, Lead | None]:
    """Returns the kind of each field of a config class; None for an ordinary setting."""
    hints = typing.get_type_hints(config, include_extras=True)
    return {field.name: next(marks(hints[field.name], Lead), None) for field in fields(config)}


def marks(hint: object, kind: type[Mark]) -> Iterator[Mark]:
    """Yields what a type is annotated with that is of a kind; it may stand inside of a union, a tuple or a mapping."""
    yield from (mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, kind))
    for inner in typing.get_args(hint):
        yield from marks(inner, kind)
