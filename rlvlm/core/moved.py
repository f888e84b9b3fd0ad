"""Old names of modules that moved, many into a guest: users' own files that import them go on working.

`rlvlm` puts `MovedModules` behind Python's own finders, so that it is asked only where these find nothing.
"""

import importlib
import importlib.util
import json
import sys
import warnings
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType


@cache
def moved_modules() -> dict[str, str]:
    """Returns the new name of each module that moved, by its old one."""
    return json.loads((Path(__file__).parents[1] / "plugins" / "names.json").read_text())["modules"]


class MovedModules(MetaPathFinder):
    """Finds a module by its old name."""

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns how to load the module that had this name, or the empty package above one; None for any other."""
        if not fullname.startswith("rlvlm."):
            return None
        new = moved_modules().get(fullname, "")
        is_above = any(name.startswith(f"{fullname}.") for name in moved_modules())
        if not new and not is_above:
            return None
        return importlib.util.spec_from_loader(fullname, _Moved(new), is_package=is_above)


class _Moved(Loader):
    """Loads everything that a module at its new place has; nothing for a package that is gone."""

    def __init__(self, new: str) -> None:
        self._new = new

    def get_code(self, fullname: str) -> CodeType:
        """Returns code that runs the module at its new place: a SLURM job's script of before says `python -m OLD`."""
        return compile(f"import runpy\nrunpy.run_module({self._new!r}, None, '__main__', True)", fullname, "exec")

    def exec_module(self, module: ModuleType) -> None:
        if not self._new:
            return
        warnings.warn(f"{module.__name__} is {self._new} now", DeprecationWarning, stacklevel=2)
        real = importlib.import_module(self._new)
        module.__dict__.update({name: value for name, value in vars(real).items() if not name.startswith("__")})


def install() -> None:
    """Has Python ask for old names, once."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
