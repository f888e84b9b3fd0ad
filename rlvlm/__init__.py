"""rlvlm: reinforcement learning whose reward comes from vision-language models, on Ray.

A run is one sentence: an env yields episodes, a reward source labels them, an algorithm learns from them,
an experiment compares the sources. Start at `rlvlm.runs.settings.recipes`; the map of the code is in the README, and
what a script or a notebook needs is in `PUBLIC`: docs/python.md.
"""

import importlib
import os
import pwd
import tempfile
from typing import TYPE_CHECKING, Any

from rlvlm.core import moved

if TYPE_CHECKING:
    from rlvlm.commands.run import train as train
    from rlvlm.core.judging import Clip as Clip
    from rlvlm.core.judging import Query as Query
    from rlvlm.envs.registry import Task as Task
    from rlvlm.envs.registry import make_env as make_env
    from rlvlm.judges.build import build_judge as build_judge
    from rlvlm.judges.client import Judge as Judge
    from rlvlm.reports.watch import Watch as Watch
    from rlvlm.runs.files.folder import find_folder as find_folder
    from rlvlm.runs.in_python import learned_reward as learned_reward
    from rlvlm.runs.in_python import load_policy as load_policy
    from rlvlm.runs.settings.recipes import recipe as recipe
    from rlvlm.runs.settings.tree import override as override

__version__ = "0.2.0"
PUBLIC = {
    "Clip": "rlvlm.core.judging",
    "Judge": "rlvlm.judges.client",
    "Query": "rlvlm.core.judging",
    "Task": "rlvlm.envs.registry",
    "Watch": "rlvlm.reports.watch",
    "build_judge": "rlvlm.judges.build",
    "find_folder": "rlvlm.runs.files.folder",
    "learned_reward": "rlvlm.runs.in_python",
    "load_policy": "rlvlm.runs.in_python",
    "make_env": "rlvlm.envs.registry",
    "override": "rlvlm.runs.settings.tree",
    "recipe": "rlvlm.runs.settings.recipes",
    "train": "rlvlm.commands.run",
}
"""The public names, and where each lives; a module is imported when its name is first used."""


def __getattr__(name: str) -> Any:
    """The public name, brought from its module."""
    if name not in PUBLIC:
        raise AttributeError(f"rlvlm has no {name!r}; public names: {', '.join(PUBLIC)}")
    try:
        module = importlib.import_module(PUBLIC[name])
    except ImportError as error:
        from rlvlm.core.install import missing_train

        if lacks := missing_train(error):
            raise lacks from error
        raise
    return getattr(module, name)


def __dir__() -> list[str]:
    """What `rlvlm.<Tab>` shows."""
    return [*PUBLIC, "__version__"]


def _ensure_home() -> None:
    """Gives a user without an entry in /etc/passwd a home folder and a name, as containers run with (OpenShift,
    `docker --user`): Ray and torch ask for them when they are imported. Processes that are started inherit them.
    """
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ.setdefault("USER", f"uid{os.getuid()}")
        if not os.access(os.environ.get("HOME") or "/nonexistent", os.W_OK | os.X_OK):
            home = os.path.join(tempfile.gettempdir(), f"rlvlm-home-{os.getuid()}")
            os.makedirs(home, mode=0o700, exist_ok=True)
            if os.stat(home).st_uid != os.getuid():  # somebody else made it first
                home = tempfile.mkdtemp(prefix="rlvlm-home-")
            os.environ["HOME"] = home


_ensure_home()
moved.install()
