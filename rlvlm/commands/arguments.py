"""What the words of several commands have in common: a task and its overrides, or one of several forms.

Imports neither torch nor ray.
"""

import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import tyro

from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.envs.registry import task_summary
from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder.settings import differences, flat
from rlvlm.runs.recipes import RECIPES, recipe

_HELP = ("-h", "--help")
_CONFIG = (tyro.conf.CascadeSubcommandArgs,)
"""Options of a chosen member of a union may stand anywhere, and those of the default member need no choice."""
_EXAMPLE = next(iter(RECIPES))
"""The task of help texts that name none."""


Config = TypeVar("Config", bound=RunConfig)


@dataclass(frozen=True)
class RunArguments(Generic[Config]):
    """What `run` is told."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    smoke: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Cut the task to minutes: every part of a run happens, nothing is learnt to the end."""
    print_config: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the resolved configuration as YAML and stop."""


def parse_run(words: Sequence[str], prog: str) -> RunArguments[RunConfig]:
    """What the user asked for, checked.

    Args:
        words: the task first, then options.
        prog: how the user called us, for help texts.

    Raises:
        UsageError: no task, one that does not exist, or a value that breaks a rule.
        SystemExit: an option is wrong (code 2, shown in a box), or help was asked for (code 0).
    """
    if words and words[0] in _HELP:
        return _parse(recipe(_EXAMPLE), _HELP[:1], f"{prog} TASK")
    if not words or words[0].startswith("-"):
        raise UsageError(
            f"name a task first: {prog} TASK [options]; tasks: {task_summary()}",
            f"{prog} {_EXAMPLE} --help  shows all options",
        )
    task, options = words[0], words[1:]
    default = recipe(task)
    default = default.smoke() if "--smoke" in options else default
    arguments = _parse(default, options, f"{prog} {task}")
    _check_heeded(default, arguments.config)
    return arguments


def _check_heeded(default: RunConfig, wanted: RunConfig) -> None:
    """Passes where all that differs from the task's recipe has an effect.

    Raises:
        UsageError: something has none.
    """
    for name in differences(flat(default), flat(wanted)):
        if (why := wanted.why_unheeded(name)) is not None:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} has no effect with {why}", f"leave out {option}")


def _parse(default: RunConfig, options: Sequence[str], prog: str) -> RunArguments[RunConfig]:
    about = f"Learn a task ({task_summary()}); every option overrides one field of the task's recipe."
    try:
        kind: Any = RunArguments[type(default)]  # pyright: ignore[reportInvalidTypeArguments] - the task's pipeline decides
        return tyro.cli(
            kind, default=RunArguments(config=default), args=options, prog=prog, description=about, config=_CONFIG
        )
    except ValueError as error:  # a rule of RunConfig itself; those of its parts are told by the parser
        raise UsageError(str(error), f"{prog} --help") from error


def run_form(words: Sequence[str], prog: str, forms: Mapping[str, tuple[type, Callable[..., str]]]) -> int:
    """Runs a command of several forms, such as `labels show`, and prints the outcome.

    Args:
        words: the name of a form first, then its own.
        prog: how the user called the command.
        forms: arguments and function by name; the function returns what is printed.

    Raises:
        UsageError: there is no such form, or a value breaks a rule.
    """
    wanted = words[0] if words else ""
    if wanted not in forms:
        near = difflib.get_close_matches(wanted, forms, n=1) or list(forms)
        found = f"{prog} is followed by {', '.join(forms)}; got {wanted or 'nothing'}"
        raise UsageError(found, f"{prog} {near[0]} --help")
    kind, act = forms[wanted]
    try:
        arguments = tyro.cli(kind, args=words[1:], prog=f"{prog} {wanted}")
    except ValueError as error:  # a rule of its settings
        raise UsageError(str(error), f"{prog} {wanted} --help") from error
    sys.stdout.write(act(arguments))
    return EXIT_DONE
