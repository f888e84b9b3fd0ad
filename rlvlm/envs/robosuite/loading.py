"""Brings robosuite into the process, without a word and without a file. Used when one of its envs is made.

By itself robosuite 1.4 warns about settings that nobody has to make, opens a log file in the system's temporary folder,
compiles helpers into a cache folder, and sets MUJOCO_GL; LIBERO's benchmark prints. None of that happens here.
"""

import contextlib
import importlib
import importlib.util
import io
import os
import random
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import numpy as np

from rlvlm.core.errors import MachineError

_NEEDS = ("robosuite", "libero")
_SETTINGS = {
    "CONSOLE_LOGGING_LEVEL": None,
    "FILE_LOGGING_LEVEL": None,
    "ENABLE_NUMBA": False,
    "MUJOCO_GPU_RENDERING": False,
}
"""What robosuite reads from `robosuite.macros_private`, its own place for settings."""


def load(module: str) -> ModuleType:
    """The module of robosuite or LIBERO with that name.

    Raises:
        MachineError: the packages are not installed.
    """
    if module not in sys.modules:
        missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
        if missing:
            raise MachineError(f"this task needs {' and '.join(missing)}", "pip install '.[libero]'")
        settings = ModuleType("robosuite.macros_private")
        vars(settings).update(_SETTINGS)
        sys.modules.setdefault(settings.__name__, settings)
    # Nothing of robosuite draws here, so it need not choose a renderer, and cannot choose another than ours.
    with silence(), mock.patch.dict(os.environ, MUJOCO_GL="disabled"):
        return importlib.import_module(module)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Nothing is printed or warned of, and the global generators of random numbers are as before in the end."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)
