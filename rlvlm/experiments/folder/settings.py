"""A run's configuration as YAML text and back; unknown keys and wrong types are errors that name the place."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from rlvlm.errors import UsageError

T = TypeVar("T")


def to_yaml(config: Any) -> str:
    """The YAML text of a config tree, in the order of its fields; `from_yaml` gives an equal tree back."""
    return yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True, width=110)


def from_yaml(kind: type[T], text: str) -> T:
    """The config tree that `to_yaml` wrote. Fields that the text leaves out take their defaults.

    Raises:
        UsageError: not YAML, an unknown key, a value of the wrong type, or one that the config refuses.
    """
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"the configuration is not YAML: {error}", "restore the file, or start a new run") from error
    return _read(kind, tree, "")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _read(kind: Any, value: Any, place: str) -> Any:
    """`value` as `kind`: a dataclass, one of its field types, or a union or tuple of those."""
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(typing.cast(type, kind), value, place)
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _read(members[0], value, place)
    if origin is Literal:
        return _checked(value in members, value, place, f"one of {', '.join(map(str, members))}")
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in members:
            return None
        return _read(next(member for member in members if member is not type(None)), value, place)
    if origin is tuple:
        _checked(isinstance(value, list), value, place, "a list")
        return tuple(_read(members[0], item, f"{place}[{i}]") for i, item in enumerate(value))
    return _read_leaf(kind, value, place)


def _read_leaf(kind: Any, value: Any, place: str) -> Any:
    if kind is Path:
        return Path(_checked(isinstance(value, str), value, place, "a path"))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return _checked(type(value) is kind, value, place, f"of type {kind.__name__}")


def _read_dataclass(kind: type, value: Any, place: str) -> Any:
    _checked(isinstance(value, Mapping), value, place or "the configuration", "a mapping")
    hints = typing.get_type_hints(kind, include_extras=True)
    names = [field.name for field in dataclasses.fields(kind)]
    for key in value:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            hint = f"did you mean {place}{near[0]}?" if near else f"known here: {', '.join(names)}"
            raise UsageError(f"unknown key {place}{key}", hint)
    missing = [f.name for f in dataclasses.fields(kind) if f.name not in value and _is_required(f)]
    if missing:
        raise UsageError(f"the configuration lacks {place}{missing[0]}", f"add {place}{missing[0]}")
    try:
        return kind(**{key: _read(hints[key], item, f"{place}{key}." if dataclasses.is_dataclass(hints[key])
                                  else f"{place}{key}") for key, item in value.items()})  # fmt: skip
    except ValueError as error:
        raise UsageError(str(error), "correct the value") from error


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _checked(is_right: bool, value: Any, place: str, wanted: str) -> Any:
    if not is_right:
        raise UsageError(f"{place.rstrip('.')} must be {wanted}, got {value!r}", "correct the value")
    return value
