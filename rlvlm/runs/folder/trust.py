"""Code that a folder from elsewhere names: imported only for whoever says that he trusts the folder."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlvlm.core.errors import UsageError
from rlvlm.core.yaml_text import read_yaml
from rlvlm.envs.registry import GYMNASIUM


def check_trust(paths: Sequence[Path], *, trust: bool) -> None:
    """Lets pass what imports nothing but rlvlm, and everything where `trust` says so.

    A run's `config.yaml` and a sweep's `sweep.yaml` may name a task or a pipeline as `package.module:NAME`. To go on
    with it, that module would be imported, and with it whatever it does. Nothing is imported here.

    Args:
        paths: folders of runs or sweeps, folders full of them, or files in them.
        trust: whether the user gave --trust.

    Raises:
        UsageError: a folder names code and is not trusted, or its file cannot be read.
    """
    for file in () if trust else (file for path in paths for file in _settings_of(path)):
        try:
            tree = read_yaml(file.read_text(), str(file))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {file}: {error}", "restore the file, or start a new run") from error
        for name in _names(tree):
            if is_foreign(name):
                what = f"{file} names code outside of rlvlm, {name}, which would be imported and so run"
                raise UsageError(what, "look at it; if the folder is yours or of somebody you trust, add --trust")


def _settings_of(path: Path) -> Iterator[Path]:
    """The files of settings around and below a path."""
    here = path.absolute()
    for folder in (here, *here.parents):
        files = [folder / name for name in ("config.yaml", "sweep.yaml") if (folder / name).is_file()]
        if files:
            yield from files
            break
    if here.is_dir():
        yield from (file for name in ("config.yaml", "sweep.yaml") for file in sorted(here.rglob(name)))


def _names(tree: Any) -> list[str]:
    """The tasks and the pipeline that settings name."""
    if not isinstance(tree, dict):
        return []
    tasks = tree.get("tasks")
    return [str(name) for name in (tree.get("pipeline"), tree.get("task"), *(tasks if isinstance(tasks, list) else ()))]


def is_foreign(name: str) -> bool:
    """Whether the name of a task or a pipeline has code imported that is not ours; `gym:ID` is Gymnasium's own."""
    return ":" in name.removeprefix(GYMNASIUM) and not name.startswith("rlvlm.")
