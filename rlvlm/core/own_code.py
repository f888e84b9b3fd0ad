"""Imports of users' own files: the source that stands there, never compiled code that lies beside it.

Python runs `__pycache__/mine.cpython-311.pyc` in place of `mine.py` where the two claim the same time and size, so a
folder from elsewhere could show one program and run another. What is imported here is compiled from the very bytes
whose digest was compared (`rlvlm.core.trust`), and so are the modules beside it. Processes that this one starts do the
same, because the list is in their environment.
"""

import hashlib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_VARIABLE = "RLVLM_OWN_CODE"
_digests: dict[str, str] = json.loads(os.environ.get(_VARIABLE, "{}"))
"""By file with code of a user's own: SHA-256 that it must have when it is first imported, empty for any."""


class _Source(SourceFileLoader):
    """Compiles a file each time, and checks the first time that it has not changed since its digest was compared."""

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        wanted = _digests.get(str(Path(self.path).resolve()), "")
        if wanted and hashlib.sha256(source).hexdigest() != wanted:
            raise ImportError(f"{self.path} has changed since it was looked at; look at it, and start again")
        if wanted:
            _digests[str(Path(self.path).resolve())] = ""  # from now on it may be edited, and loaded again
        return compile(source, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    """Finds modules in and below the folders of users' own files, except installed packages and rlvlm itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        if not _digests or top == "rlvlm" or top in sys.stdlib_module_names:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader or spec.origin is None:
            return None
        file = Path(spec.origin)
        is_installed = "site-packages" in file.parts or file.is_relative_to(sys.base_prefix)
        if is_installed or not any(file.resolve().is_relative_to(Path(own).parent) for own in _digests):
            return None
        found = importlib.util.spec_from_file_location(
            fullname, file, loader=_Source(fullname, str(file)),
            submodule_search_locations=spec.submodule_search_locations,
        )  # fmt: skip
        assert found is not None, "a file with a loader has a spec"
        found.cached = None
        return found


def note_digest(file: Path, digest: str) -> None:
    """Notes that a file's digest was compared, which it must have when it is imported.

    Args:
        file: resolved path of a module or a script.
        digest: its SHA-256; empty if nobody compared it.
    """
    if digest or str(file) not in _digests:
        _digests[str(file)] = digest
        os.environ[_VARIABLE] = json.dumps(_digests)


def import_file(file: Path) -> ModuleType:
    """Imports a file as a module of its name; if that one is loaded from this file, it is returned.

    Raises:
        ImportError: its name is that of a module that others need, or it has changed since it was looked at.
        Exception: whatever the file raises.
    """
    name = file.stem
    module = sys.modules.get(name)
    loaded = getattr(module, "__file__", None) or ""
    if name in sys.stdlib_module_names or loaded.startswith(sys.prefix):
        # its name would be the file's from now on, for everything that imports it
        raise ImportError(f"{file.name} is called like a module that others need; give it another name")
    if module is not None and loaded == str(file):
        return module
    note_digest(file, "")
    spec = importlib.util.spec_from_file_location(name, file, loader=_Source(name, str(file)))
    assert spec is not None and spec.loader is not None, "a file with a loader has a spec"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # half a module would be found the next time
        raise
    return module


def import_own(name: str) -> Any:
    """Imports a module by name, of the working folder or of Python's path.

    Raises:
        ImportError: it does not exist, or has changed since it was looked at.
        Exception: whatever the module raises.
    """
    # appended, not put first: a file here with a library's name must not replace it
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)
    package = name.partition(".")[0]
    top = None if name in sys.modules or package == "rlvlm" else PathFinder.find_spec(package)
    if top is not None and top.origin is not None:
        file = Path(top.origin).resolve()
        note_digest(file.parent if top.submodule_search_locations else file, "")
    return importlib.import_module(name)


# before Python's own finder and behind those of debuggers and test runners, which may have loaders of their own
sys.meta_path.insert(next((n for n, one in enumerate(sys.meta_path) if one is PathFinder), 0), _Finder())
