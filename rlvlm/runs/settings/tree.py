"""Conversion of a run's configuration to YAML and back; unknown keys and wrong types are errors with their place."""

import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from rlvlm.core.disk import expand_home
from rlvlm.core.errors import UsageError
from rlvlm.core.guests import guest_of
from rlvlm.core.yaml_text import read_yaml, write_yaml

T = TypeVar("T")


def to_yaml(config: Any) -> str:
    """Returns the YAML text of a config tree, in the order of its fields; `from_yaml` restores an equal tree."""
    return write_yaml(_plain(config))


def commented(text: str, config: Any) -> str:
    """Returns the YAML text of a config tree with the first sentence about each setting as a comment."""
    lines: list[str] = []
    place: list[str] = []
    for line in text.splitlines():
        # YAML's indentation of two gives the depth of a key; items of a list have no key
        key = re.match(r"( *)(\w+):", line)
        if key:
            place = [*place[: len(key[1]) // 2], key[2]]
            owner = config
            for name in place[:-1]:
                owner = getattr(owner, name, None)
            about = _field_docs(type(owner)).get(place[-1], "") if dataclasses.is_dataclass(owner) else ""
            line += f"  # {about}" if about else ""
        lines.append(line)
    return "\n".join(lines) + "\n"


def meanings(config: Any, prefix: str = "") -> dict[str, str]:
    """Returns the first sentence about each setting of a config tree, by dotted name."""
    found: dict[str, str] = {}
    docs = _field_docs(type(config))
    for name in (field.name for field in dataclasses.fields(config)):
        value, full = getattr(config, name), f"{prefix}{name}"
        found |= meanings(value, f"{full}.") if dataclasses.is_dataclass(value) else {full: docs.get(name, "")}
    return found


def by_meaning(config: Any, words: str) -> dict[str, str]:
    """Returns the settings whose meaning contains `words`, e.g. `learning rate`: dotted name to its first sentence. A
    single word must be its first.

    Args:
        config: a config tree.
        words: in lower case; small misspellings are tolerated.
    """
    found: dict[str, str] = {}
    length = len(words.split())
    for name, about in meanings(config).items():
        # the only abbreviation among names is spelled out before the sentence
        words_of_name = name.rpartition(".")[2].split("_")
        spelled = " ".join(words_of_name).replace("lr", "learning rate") if "lr" in words_of_name else ""
        text = f"{spelled} {about.lower()}".split()
        windows = [" ".join(text[n : n + length]) for n in range(len(text) if length > 1 else 1)]
        if difflib.get_close_matches(words, windows, n=1, cutoff=0.85):
            found[name] = about
    return found


@functools.cache
def _field_docs(kind: type) -> dict[str, str]:
    """Returns the first sentence of the docstring below each field of a config, including its bases'."""
    found: dict[str, str] = {}
    # a subclass's docstring replaces its base's
    for base in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef), "what a config is"
        for field, following in itertools.pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(following, ast.Expr):
                text = ast.literal_eval(following.value) if isinstance(following.value, ast.Constant) else ""
                first = re.match(r".*?(?<!e\.g)\.(?=\s|$)", " ".join(str(text).split()))
                found[ast.unparse(field.target)] = first[0].rstrip(".") if first else ""
    return found


def from_yaml(kind: type[T], text: str, name: str = "the configuration") -> T:
    """Returns the config tree that `to_yaml` wrote. Fields missing in the text take their defaults.

    Args:
        kind: class of the config.
        text: YAML.
        name: name of the file, for messages about invalid YAML.

    Raises:
        UsageError: not YAML, an unknown key, a value of the wrong type, or one that the config refuses.
    """
    return read_settings(kind, read_yaml(text, name))


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of a config tree as YAML values, by dotted name, e.g. `reward.teacher`.

    Args:
        config: a config, or a tree of YAML values.
        prefix: prepended to each name.
    """
    leaves: dict[str, Any] = {}
    for key, value in _plain(config).items():
        # an empty mapping is a leaf: it would be lost otherwise, and is a setting like any other
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return leaves


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tree whose leaves are `settings`, by dotted name: the inverse of `flat`.

    Raises:
        UsageError: a name has a value, and is a section too.
    """
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, last = name.split(".")
        branch: Any = tree
        for section in sections:
            branch = branch.setdefault(section, {})
            if not isinstance(branch, dict):
                raise UsageError(f"{name} stands beside {section} {branch!r}", "leave one of them out")
        branch[last] = value
    return tree


def changed_leaves(before: Any, after: Any) -> dict[str, tuple[Any, Any]]:
    """Returns the leaves of `after` that differ from `before` or are missing there: dotted name to both values."""
    old = flat(before)
    return {name: (old.get(name), value) for name, value in flat(after).items() if old.get(name) != value}


def option_words(settings: Mapping[str, Any]) -> list[str]:
    """Returns command-line arguments that set the leaves of `flat`, e.g. `--eval.episodes 4` or `--algo.no-shard`."""
    words: list[str] = []
    for name, value in settings.items():
        group, dot, leaf = name.replace("_", "-").rpartition(".")
        if isinstance(value, bool):
            words.append(f"--{group}{dot}{'' if value else 'no-'}{leaf}")
        else:
            words += [f"--{group}{dot}{leaf}", *map(str, value if isinstance(value, list) else [value])]
    return words


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """Returns the changed settings by dotted name, as text such as `0.0001, before 0.0002`.

    Args:
        before: settings from `flat`. A setting that only `after` has is new, and not a difference.
        after: settings from `flat`.
    """
    changed = {}
    for name in [*after, *(name for name in before if name not in after)]:
        old, new = (repr(tree[name]) if name in tree else "unset" for tree in (before, after))
        if name in before and old != new:
            changed[name] = f"{new}, before {old}"
    return changed


def override(config: T, settings: Mapping[str, Any]) -> T:
    """Returns a copy of a config tree with some leaves replaced; all rules are checked on the result.

    Args:
        config: config tree.
        settings: YAML values by dotted name; a section may be a mapping of its own settings.

    Raises:
        UsageError: a name that the tree does not have, a value of the wrong type, or one that the config refuses.
    """
    known, leaves = flat(config), {}
    for name, value in settings.items():
        is_section = isinstance(value, Mapping) and name not in known
        leaves |= flat(value, f"{name}.") if is_section else {name: value}
    # a config may take some settings from elsewhere; those given here take precedence
    config = getattr(config, "starting_for", lambda leaves: config)(leaves)
    tree = _plain(config)  # a copy, whose branches may be written to
    for name, value in leaves.items():
        if name not in known and not _is_in_mapping(config, name):
            near = difflib.get_close_matches(name, known, n=1)
            group = name.rpartition(".")[0]
            beside = [other for other in known if group and other.rpartition(".")[0] == group]
            fix = f"here there are {', '.join(beside)}" if beside else "see --print-config"
            raise UsageError(f"unknown setting {name}", f"did you mean {near[0]}?" if near else fix)
        *groups, leaf = name.split(".")
        branch = tree
        for group in groups:
            branch = branch[group]
        branch[leaf] = value
    return read_settings(type(config), tree, like=config)


def _is_in_mapping(config: Any, name: str) -> bool:
    """Returns whether a dotted name is that of an entry of a mapping, such as `policy.settings`, whatever its key."""
    owner = config
    for part in name.split(".")[:-1]:
        owner = getattr(owner, part, None)
    return isinstance(owner, Mapping)


def _plain(value: Any) -> Any:
    """Returns `value` as YAML values: mappings, lists and scalars."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def read_settings(kind: Any, value: Any, place: str = "", like: Any = None) -> Any:
    """Returns the config of `kind` for a tree of YAML values; defaults and errors as in `from_yaml`.

    Args:
        kind: a dataclass, one of its field types, or a union, tuple or mapping of those.
        value: the tree.
        place: dotted name of its place in the whole configuration, for messages.
        like: a config of that kind, whose sections give the class if a field allows several, and whose values replace
            what the tree leaves out.
    """
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(typing.cast(type, kind), value, place, like)
    if origin is typing.Annotated:
        return read_settings(members[0], value, place)
    if origin is Literal:
        return _checked(value in members, value, place, f"one of {', '.join(map(str, members))}")
    if origin in (typing.Union, types.UnionType):
        return _read_union(members, value, place)
    if origin is tuple:
        _checked(isinstance(value, list), value, place, "a list")
        return tuple(read_settings(members[0], item, f"{place}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        _checked(isinstance(value, Mapping), value, place, "a mapping")
        return {str(key): read_settings(members[1], item, f"{place}.{key}") for key, item in value.items()}
    value = expand_home(value) if isinstance(value, str) else value
    if kind is Path:
        return Path(_checked(isinstance(value, str | Path), value, place, "a path"))
    if kind is float and type(value) is int:
        return float(value)
    # `type`, not isinstance: True is an int in Python, but not a number of steps
    return _checked(kind is Any or type(value) is kind, value, place, f"of type {kind.__name__}")


def _read_union(members: tuple[Any, ...], value: Any, place: str) -> Any:
    """Returns `value` read as the first member that accepts it; if none does, raises the first one's error."""
    if value is None and type(None) in members:
        return None
    first, *others = (member for member in members if member is not type(None))
    try:
        return read_settings(first, value, place)
    except UsageError:
        for member in others:
            with contextlib.suppress(UsageError):
                return read_settings(member, value, place)
        raise


def _read_dataclass(kind: type, value: Any, place: str, like: Any) -> Any:
    _checked(isinstance(value, Mapping), value, place or "the configuration", "a mapping")
    hints = typing.get_type_hints(kind, include_extras=True)
    names = [field.name for field in dataclasses.fields(kind)]
    prefix = f"{place}." if place else ""
    # a section of a guest that was taken out has no effect without what else the guest added, which is refused itself
    value = {key: item for key, item in value.items() if key in names or not guest_of("settings", f"{prefix}{key}")}
    for key in value:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known here: {', '.join(names)}"
            raise UsageError(f"unknown key {prefix}{key}", hint)
    # a field without default or factory is never taken from another config
    needed = {field.name for field in dataclasses.fields(kind) if field.default is field.default_factory}
    given = {name: getattr(like, name) for name in names if like is not None and name not in (*value, *needed)}
    for name in names:
        if dataclasses.is_dataclass(part := getattr(like, name, None)):
            hints[name] = type(part)
    # keyword-only dataclasses would raise a TypeError without the place
    missing = [
        field.name
        for field in dataclasses.fields(kind)
        if field.name not in (value | given) and field.default is field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UsageError(f"{prefix}{missing[0]} is missing", f"add {prefix}{missing[0]}")
    try:
        read = {
            key: read_settings(hints[key], item, f"{prefix}{key}", getattr(like, key, None))
            for key, item in value.items()
        }
        return kind(**(given | read))
    except ValueError as error:
        raise UsageError(str(error), "correct the value") from error


def _checked(is_right: bool, value: Any, place: str, wanted: str) -> Any:
    if not is_right:
        raise UsageError(f"{place} must be {wanted}, got {value!r}", "correct the value")
    return value
