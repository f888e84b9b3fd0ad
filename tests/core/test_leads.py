"""Settings that lead out of a folder have types that say so, because trust is asked by type."""

import ast
import functools
import importlib
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path

import rlvlm
from rlvlm.core.leads import CodeRef, FilePath, Lead, Leading, _kinds, find_leads

PACKAGE = Path(rlvlm.__file__).parent
CONFIG_FILES = ("*config.py", "runs/*_run.py", "reports/options.py")
"""Files whose dataclasses users fill."""
SINKS = {
    "load_object": 0, "find_registered": 0, "is_reference": 0, "import_module": 0, "Path": 0, "open": 0,
    "expanduser": 0, "urlsplit": 0, "getenv": 0,
}  # fmt: skip
"""Functions that go where a text leads, with the place of the text."""
NO_LEADS = {"BenchOptions.name", "Role.name", "CachedConfig.prompt", "DistillConfig.prompt", "PageConfig.people"}
"""Settings that only share their name with one that leads somewhere."""


@dataclass(frozen=True)
class Inner:
    files: dict[str, FilePath] = field(default_factory=dict)
    folder: Path | None = None


@dataclass(frozen=True)
class Outer:
    code: CodeRef | None = None
    words: tuple[str, ...] = ("mine:NAME",)
    many: tuple[FilePath, ...] = ()
    inner: Inner = field(default_factory=Inner)


def test_the_walk_finds_exactly_the_typed_settings():
    Outer.__module__ = Inner.__module__ = "rlvlm.made_up"
    assert list(find_leads(Outer())) == []
    found = find_leads(Outer(code="a:B", many=("x", ""), inner=Inner(files={"k": "y"}, folder=Path("z"))))
    assert list(found) == [
        Leading("code", Lead.CODE, "a:B"),
        Leading("many", Lead.FILE, "x"),
        Leading("inner.files", Lead.FILE, "y"),
        Leading("inner.folder", Lead.FILE, "z"),
    ]
    # a config class of the user's own: every text that was changed
    Outer.__module__ = "mine"
    assert list(find_leads(Outer(words=("/etc/shadow",)))) == [Leading("words", Lead.FILE, "/etc/shadow")]


def test_each_setting_that_names_code_a_path_or_an_address_has_the_type_for_it():
    used = {name for function in _functions() for name in _names_handed_on(function)}
    plain = {f"{kind.__name__}.{name}" for kind in _configs() for name in _texts(kind) if _kinds(kind)[name] is None}
    untyped = {name for name in plain if name.rpartition(".")[2] in used}
    # some of those excused, or who opens a file by their name, may be a guest's that was taken out
    assert untyped <= NO_LEADS, f"give these a type of rlvlm.core.leads: {untyped - NO_LEADS}"
    # the search itself finds what it should
    assert {"head", "backend", "estimator", "store", "python", "prompt", "key_file", "demonstrations"} <= used


def _configs() -> Iterator[type]:
    files = {file for pattern in CONFIG_FILES for file in PACKAGE.rglob(pattern)}
    for file in sorted(file for file in files if file.name != "algorithm_config.py"):  # RLlib's
        module = importlib.import_module(".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts))
        for kind in vars(module).values():
            if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module.__name__:
                yield kind


def _texts(config: type) -> Iterator[str]:
    """Names of the fields that hold texts of any kind."""
    hints = typing.get_type_hints(config)
    for each in fields(config):
        parts = (hints[each.name], *typing.get_args(hints[each.name]))
        if str in parts:
            yield each.name


@dataclass(frozen=True, eq=False)
class Function:
    """What the search reads of a function: its arguments, the calls in it, and what its variables are set to."""

    name: str
    arguments: tuple[str, ...]
    calls: list[tuple[str, dict[int | str, ast.expr]]] = field(default_factory=list)
    values: dict[str, list[ast.expr]] = field(default_factory=dict)

    def handed_to(self, sinks: dict[str, set[int | str]]) -> Iterator[ast.expr]:
        """The arguments that it hands to one of the sinks."""
        for name, given in self.calls:
            yield from (given[place] for place in sinks.get(name, set()) & given.keys())


@functools.cache
def _functions() -> list[Function]:
    found = []
    for tree in (ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))):
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            function = Function(node.name, tuple(one.arg for one in (*node.args.posonlyargs, *node.args.args)))
            for part in ast.walk(node):
                if isinstance(part, ast.Call):
                    # methods are left out, because many classes share their names
                    name = getattr(part.func, "id", "") or getattr(part.func, "attr", "")
                    given = {**dict(enumerate(part.args)), **{one.arg: one.value for one in part.keywords if one.arg}}
                    if isinstance(part.func, ast.Name) or name in SINKS.keys() - {"open"}:
                        function.calls.append((name, given))
                elif isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name):
                    function.values.setdefault(part.targets[0].id, []).append(part.value)
            found.append(function)
    return found


@functools.cache
def _sinks() -> dict[str, set[int | str]]:
    """Functions that go where a text leads, themselves or by another: names, and places or names of the argument."""
    sinks: dict[str, set[int | str]] = {name: {place} for name, place in SINKS.items()}
    size = -1
    while size != (size := sum(map(len, sinks.values()))):
        for function in _functions():
            handed = {value.id for value in function.handed_to(sinks) if isinstance(value, ast.Name)}
            for name in handed.intersection(function.arguments):
                if function.arguments[0] not in ("self", "cls"):
                    sinks.setdefault(function.name, set()).update({name, function.arguments.index(name)})
    return sinks


def _names_handed_on(function: Function) -> Iterator[str]:
    """Names of the attributes that a function hands to one of the sinks, directly or by a variable."""
    values = list(function.handed_to(_sinks()))
    for name in {value.id for value in values if isinstance(value, ast.Name)}:
        values += function.values.get(name, [])
    for value in values:
        owners = {id(node.value) for node in ast.walk(value) if isinstance(node, ast.Attribute)}
        yield from (node.attr for node in ast.walk(value) if isinstance(node, ast.Attribute) and id(node) not in owners)
