"""The rules of the house that can be checked by reading the code: above all, imports point to lower floors."""

import ast
import dataclasses
import inspect
import itertools
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlvlm
from rlvlm.runs.config import ALGORITHMS, SECTIONS, RunConfig

PACKAGE = Path(rlvlm.__file__).parent
FLOOR = {
    "core": 0,
    "templates": 0,
    "envs": 1,
    "labels": 1,
    "vlms": 1,
    "judges": 2,
    "policies": 2,
    "demonstrations": 3,
    "pocket": 3,
    "rewards": 3,
    "preferences": 4,
    "algorithms": 5,
    "serving": 5,
    "runs": 6,
    "testing": 6,
    "sweeps": 7,
    "reports": 8,
    "commands": 9,
    "cli": 10,
    "run": 10,
    "__main__": 10,
}
FIRST_FLOOR_WITH_RAY = 5
SOURCES = sorted(PACKAGE.rglob("*.py"))


def check_import(room: str, target: str) -> None:
    """Raises ImportError when a file of `room` may not import `target` (a room of ours, or `ray`)."""
    if target == "ray" and FLOOR[room] < FIRST_FLOOR_WITH_RAY:
        raise ImportError(f"{room} imports ray; Ray stays on floors 5 and up, pass the object in instead")
    if target in FLOOR and target != room and FLOOR[target] >= FLOOR[room]:
        raise ImportError(f"{room} (floor {FLOOR[room]}) may not see {target} (floor {FLOOR[target]})")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


NAMED_MODULE = re.compile(r"(rlvlm(?:\.\w+)+)\.?(?::\w*)?")
"""A string that names a module, or something in one: `rlvlm.envs.cartpole:CartPole`. It counts as an import."""


def imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if named := NAMED_MODULE.fullmatch(node.value):
                yield named[1]


def import_graph() -> dict[str, set[str]]:
    """The modules of the package that each one imports or names, itself and the package's own `__init__` left out."""
    modules = {
        ".".join(("rlvlm", *p.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): p for p in SOURCES
    }
    graph = {}
    for module, path in modules.items():
        names = {name for name in imported_names(ast.parse(path.read_text())) if name.startswith("rlvlm.")}
        while unknown := names - modules.keys():  # a function, class or submodule's attribute: what holds it counts
            names = (names & modules.keys()) | {name.rpartition(".")[0] for name in unknown}
        graph[module] = names - {module, "rlvlm"}
    return graph


def test_a_forbidden_import_is_named() -> None:
    check_import("preferences", "judges")
    with pytest.raises(ImportError, match=r"envs \(floor 1\) may not see judges"):
        check_import("envs", "judges")
    with pytest.raises(ImportError, match="Ray stays on floors 5 and up"):
        check_import("judges", "ray")


@pytest.mark.slow
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_to_lower_floors(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        return
    for name in imported_names(ast.parse(path.read_text())):
        parts = name.split(".")
        assert parts[0] not in ("serve_apps", "tune_configs", "benchmarks", "tests"), f"{path} imports {name}"
        if parts[0] == "ray":
            check_import(room, "ray")
        elif parts[0] == "rlvlm" and len(parts) > 1:
            check_import(room, parts[1])


def test_files_have_no_import_circles() -> None:
    graph = import_graph()
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import circle: {' -> '.join((*trail, name))}"
        if name not in done:
            for target in graph[name]:
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_of_two_folders_side_by_side_only_one_sees_the_other() -> None:
    graph = import_graph()
    folders = {path.parent.relative_to(PACKAGE).as_posix() for path in SOURCES} - {"."}
    beneath = {
        folder: {name for name in graph if f"{name}.".startswith(f"rlvlm.{folder.replace('/', '.')}.")}
        for folder in folders
    }
    for one, other in itertools.combinations(sorted(folders), 2):
        if f"{other}/".startswith(f"{one}/"):
            continue
        there = [f"{name} -> {target}" for name in beneath[one] for target in graph[name] & beneath[other]]
        back = [f"{name} -> {target}" for name in beneath[other] for target in graph[name] & beneath[one]]
        assert not (there and back), f"{one} and {other} see each other: {there[0]}, {back[0]}"


@pytest.mark.slow
def test_names_in_strings_are_imports() -> None:
    tree = ast.parse("make = 'rlvlm.envs.cartpole:CartPole'; load(f'rlvlm.commands.{word}'); say('see rlvlm.envs')")
    assert set(imported_names(tree)) == {"rlvlm.envs.cartpole", "rlvlm.commands"}
    assert "rlvlm.envs.cartpole" in import_graph()["rlvlm.envs.catalogue"]


def test_every_room_has_a_floor_and_none_is_called_utils() -> None:
    rooms = {room_of(path) for path in SOURCES} - {"__init__"}
    assert rooms <= FLOOR.keys(), f"rooms without a floor: {rooms - FLOOR.keys()}"
    assert not [path for path in SOURCES if "util" in path.name]


CONFIGS = [RunConfig, *ALGORITHMS.values(), *(kind for sections in SECTIONS.values() for kind in sections.values())]


def config_classes(root: type) -> Iterator[type]:
    yield root
    hints = typing.get_type_hints(root)
    for field in dataclasses.fields(root):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from config_classes(typing.cast(type, hints[field.name]))


@pytest.mark.parametrize(
    "config",
    list(dict.fromkeys(part for config in CONFIGS for part in config_classes(config))),
    ids=lambda config: config.__name__,
)
def test_every_config_field_is_documented(config: type) -> None:
    body = ast.parse(inspect.getsource(config)).body[0]
    assert isinstance(body, ast.ClassDef)
    hints = typing.get_type_hints(config)
    told = {f.name for f in dataclasses.fields(config) if not dataclasses.is_dataclass(hints[f.name])}
    for statement, following in zip(body.body, [*body.body[1:], ast.Pass()], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            assert documented or statement.target.id not in told, f"{config.__name__}.{statement.target.id}"
