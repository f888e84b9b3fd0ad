"""The rules of the package that can be checked by reading the code: above all, imports point to lower layers."""

import ast
import dataclasses
import functools
import graphlib
import inspect
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import rlvlm
from rlvlm.runs.settings.kinds import KINDS

LAYERS = (
    ("core", "templates", "pocket"),
    ("envs", "labels", "vlms"),
    ("judges", "policies"),
    ("demonstrations", "rewards"),
    ("judge_bench", "preferences"),
    ("algorithms", "serving"),
    ("runs.settings", "testing"),
    ("runs.files",),
    ("runs.start",),
    ("runs",),
    ("pages",),
    ("sweeps",),
    ("reports",),
    ("plugins",),
    ("commands",),
    ("cli", "run", "__main__"),
)
"""Packages of rlvlm, the lowest first, and the rooms of one. Each sees those below it; packages of one layer never see
each other."""
LAYER = {package: number for number, packages in enumerate(LAYERS) for package in packages}
GUESTS = "rlvlm.plugins"
"""Package of the guests: they see the core below them, nothing names them, and none names another."""
FIRST_WITH_RAY = LAYER["algorithms"]
OUTSIDE = ("pocket_models", "serve_apps", "tune_configs", "benchmarks", "tests")
"""Folders that see the package; it never sees them."""
NAMED_MODULE = re.compile(r"(rlvlm(?:\.\w+)+)\.?(?::\w*)?")
"""A string that names a module, or something in one: `rlvlm.envs.cartpole:CartPole`. It counts as an import."""


@functools.lru_cache(maxsize=1)  # each file is asked about twice in a row
def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def imported_names(source: str, *, strings: bool = True) -> Iterator[str]:
    """What a file imports, and what its strings name, attributes of modules included."""
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)
        elif strings and isinstance(node, ast.Constant) and isinstance(node.value, str):
            if named := NAMED_MODULE.fullmatch(node.value):
                yield named[1]


def package_of(name: str) -> str:
    """The package or room of one that holds what is called `name`, as `LAYERS` has it; the package if it has none."""
    parts = name.split(".")[1:3]
    return room if (room := ".".join(parts)) in LAYER else parts[0] if parts else ""


def folders_of(module: str) -> set[str]:
    parts = module.split(".")
    return {".".join(parts[:length]) for length in range(2, len(parts))}


def modules_of(names: set[str], known: Mapping[str, str]) -> set[str]:
    """The modules that hold `names`, the package's own `__init__` left out."""
    found = {name for name in names if name.startswith("rlvlm.")}
    while unknown := found - known.keys() - {"rlvlm"}:  # of a function or class, what holds it counts
        found = found - unknown | {name.rpartition(".")[0] for name in unknown}
    return found - {"rlvlm"}


def guest_of(name: str) -> str:
    """The guest that a module belongs to; empty for the core, and for the package of all guests."""
    return name.removeprefix(GUESTS + ".").partition(".")[0] if name.startswith(GUESTS + ".") else ""


def broken_rules(sources: Mapping[str, str]) -> list[str]:
    """One line per rule that the modules `sources` (name to code) break."""
    found, graph, statements = [], {}, {}
    for module, source in sources.items():
        package, names = package_of(module), set(imported_names(source))
        if package not in LAYER or "util" in module:
            found.append(f"{module}: {package} has no layer, or its name says nothing")
            continue
        for name in sorted(names):
            top, target = name.partition(".")[0], package_of(name)
            if not top or top in OUTSIDE:
                found.append(f"{module} imports {name}: relative, or outside of the package")
            elif guest_of(name) not in ("", guest_of(module)):
                found.append(f"{module} names {name}: a guest is known to the registry alone")
            elif name == GUESTS:
                continue
            elif top == "ray" and LAYER[package] < FIRST_WITH_RAY:
                found.append(f"{module} imports ray: pass the object in instead")
            elif top == "rlvlm" and target in LAYER and target != package and LAYER[target] >= LAYER[package]:
                found.append(f"{module} (layer {LAYER[package]}) sees {target} (layer {LAYER[target]})")
        graph[module] = modules_of(names, sources) - {module}
        # what a string names is imported later, by Ray Serve or a registry, so two files may well name each other
        statements[module] = modules_of(set(imported_names(source, strings=False)), sources) - {module}
    try:
        graphlib.TopologicalSorter(statements).prepare()
    except graphlib.CycleError as error:
        found.append(f"files import each other: {' -> '.join(error.args[1])}")
    edges = {
        (mine, theirs): f"{module} -> {target}"
        for module, targets in graph.items()
        for target in targets
        for mine in folders_of(module) - folders_of(target)
        for theirs in folders_of(target) - folders_of(module)
    }
    two_way = [pair for pair in edges if pair < pair[::-1] and pair[::-1] in edges]
    return found + [f"{one} and {other} see each other: {edges[one, other]}" for one, other in sorted(two_way)]


@functools.cache
def sources_of_package() -> dict[str, str]:
    root = Path(rlvlm.__file__).parent
    names = {path: ".".join(("rlvlm", *path.relative_to(root).with_suffix("").parts)) for path in root.rglob("*.py")}
    return {
        name.removesuffix(".__init__"): path.read_text() for path, name in names.items() if name != "rlvlm.__init__"
    }


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"rlvlm.preferences.a": "import rlvlm.judges.b", "rlvlm.judges.b": ""}, ""),
        ({"rlvlm.envs.a": "from rlvlm.judges import b", "rlvlm.judges.b": ""}, r"layer 1\) sees judges \(layer 2\)"),
        ({"rlvlm.judges.a": "x = 'rlvlm.policies.b:C'", "rlvlm.policies.b": ""}, r"layer 2\) sees policies"),
        ({"rlvlm.judges.a": "import ray"}, "pass the object in"),
        ({"rlvlm.serving.a": "import ray.serve"}, ""),
        ({"rlvlm.runs.a": "from tests.b import c"}, "outside of the package"),
        ({"rlvlm.runs.a": "from .b import c"}, "relative"),
        ({"rlvlm.runs.a": "from rlvlm.runs import b", "rlvlm.runs.b": "import rlvlm.runs.a"}, "import each other"),
        ({"rlvlm.runs.a": "from rlvlm.runs import b", "rlvlm.runs.b": "x = 'rlvlm.runs.a:C'"}, ""),
        (
            {"rlvlm.runs.a.b": "import rlvlm.runs.c.d", "rlvlm.runs.c.e": "import rlvlm.runs.a.f",
             "rlvlm.runs.c.d": "", "rlvlm.runs.a.f": ""},
            "runs.a and rlvlm.runs.c see each other",
        ),
        ({"rlvlm.runs.settings.a": "from rlvlm.runs.files import b"}, r"sees runs.files \(layer"),
        ({"rlvlm.runs.start.a": "from rlvlm.runs import b"}, r"sees runs \(layer"),
        ({"rlvlm.runs.a": "import rlvlm.runs.start.b, rlvlm.runs.settings"}, ""),
        ({"rlvlm.runs.a": "x = 'rlvlm.plugins.b.c:D'", "rlvlm.plugins.b.c": ""}, "known to the registry alone"),
        ({"rlvlm.cli": "import rlvlm.plugins.b.c", "rlvlm.plugins.b.c": ""}, "known to the registry alone"),
        ({"rlvlm.plugins.a.b": "import rlvlm.plugins.c.d", "rlvlm.plugins.c.d": ""}, "known to the registry alone"),
        ({"rlvlm.plugins.a.b": "import rlvlm.plugins.a.c, rlvlm.runs.d", "rlvlm.plugins.a.c": ""}, ""),
        ({"rlvlm.plugins.a.b": "import rlvlm.commands.c", "rlvlm.commands.c": ""}, "sees commands"),
        ({"rlvlm.core.a": "x = 'rlvlm.plugins'"}, ""),
        ({"rlvlm.envs.utils": ""}, "says nothing"),
        ({"rlvlm.new.a": ""}, "has no layer"),
    ],
)  # fmt: skip
def test_each_rule_on_a_package_of_two_files(sources, message):
    found = broken_rules(sources)
    assert len(found) == bool(message) and re.search(message, "".join(found)), found


def test_the_package_keeps_the_rules():
    assert not (found := broken_rules(sources_of_package())), "\n".join(found)


def config_classes(root: type) -> Iterator[type]:
    yield root
    hints = typing.get_type_hints(root)
    for field in dataclasses.fields(root):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from config_classes(typing.cast(type, hints[field.name]))


@pytest.mark.parametrize(
    "config", list(dict.fromkeys(part for kind in KINDS.values() for part in config_classes(kind.run)))
)
def test_every_config_field_is_documented(config):
    body = ast.parse(inspect.getsource(config)).body[0]
    assert isinstance(body, ast.ClassDef)
    hints = typing.get_type_hints(config)
    plain = {field.name for field in dataclasses.fields(config) if not dataclasses.is_dataclass(hints[field.name])}
    for statement, following in zip(body.body, [*body.body[1:], ast.Pass()], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            assert documented or statement.target.id not in plain, f"{config.__name__}.{statement.target.id}"
