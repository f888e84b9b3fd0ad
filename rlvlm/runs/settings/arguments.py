"""Arguments that several commands share: a task and its overrides.

Imports neither torch nor ray.
"""

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from decimal import Decimal
from typing import Annotated, Any, Generic, TypeVar, get_type_hints

import tyro

from rlvlm.core.console.arguments import HELP, parse, value_of
from rlvlm.core.errors import UsageError
from rlvlm.envs.registry import task_summary
from rlvlm.runs.settings.config import RunConfig
from rlvlm.runs.settings.recipes import RECIPES, recipe
from rlvlm.runs.settings.tree import by_meaning, differences, flat

_HELP_ALL = "--help-all"
_MOST_USED = (
    *("goal", "goal_image", "steps", "seed", "out", "env.split", "reward.source", "reward.teacher", "judge.backend"),
    *("judge.model", "judge.prompt", "judge.api.base_url", "serve.num_gpus", "algo.preset", "policy.model"),
    *("sft.demonstrations", "eval.episodes"),
)
"""Options that a task's help shows, if the task has them, in addition to the settings that a user's own class adds;
`--help-all` shows the others too."""
_EXAMPLE = next(iter(RECIPES))
"""Task of help texts without a task."""
_CHECKPOINT = "--policy.model"
"""Option for a trained model, which decides what else a run starts from."""
_PRESET = "--algo.preset"
"""Option for estimator and loss, which decides what else a run starts from."""
Config = TypeVar("Config", bound=RunConfig)


def task_first(words: Sequence[str], prog: str, example: str, options: str = "[options]") -> tuple[str, Sequence[str]]:
    """Splits a command line into its task and its options; help without a task is that of `example`.

    Args:
        words: words of the command line.
        prog: the command as the user called it.
        example: a task for help.
        options: placeholder for the options, for the message.

    Raises:
        UsageError: there is no task.
    """
    if words and words[0] in (*HELP, _HELP_ALL):
        return example, words[:1]
    if not words or words[0].startswith("-"):
        what = f"name a task: {prog} TASK {options}; tasks: {task_summary()}"
        raise UsageError(what, f"{prog} {example} --help  shows its options")
    return words[0], words[1:]


@dataclass(frozen=True)
class RunArguments(Generic[Config]):
    """Arguments of `run`."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    smoke: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Shorten the run to minutes: all parts run, nothing is trained to convergence."""
    print_config: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the resolved configuration as YAML and stop."""
    plan: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the run's processes with their cores, GPUs and nodes, and stop; for the cluster of RAY_ADDRESS, else for
    this machine."""


def parse_run(words: Sequence[str], prog: str) -> RunArguments[RunConfig]:
    """Parses and checks the arguments of a run.

    Args:
        words: the task first, then options.
        prog: the command as the user called it, for help texts.

    Raises:
        UsageError: the task is missing or does not exist, an option is wrong, or a value breaks a rule.
        SystemExit: help was requested (code 0).
    """
    task, options = task_first(words, prog, _EXAMPLE)
    # options decide the defaults before they are parsed: a recipe differs for a trained policy
    default = recipe(task, has_checkpoint=value_of(_CHECKPOINT, options) is not None)
    if (preset := value_of(_PRESET, options)) is not None:
        default = default.starting_for({"algo.preset": preset})
    default = default.smoke() if "--smoke" in options else default
    return parse_options(default, options, f"{prog} {task if task in words else 'TASK'}")


def parse_options(default: RunConfig, options: Sequence[str], prog: str) -> RunArguments[RunConfig]:
    """Parses the arguments of a run that starts from `default`; changes without effect are refused.

    Raises:
        UsageError, SystemExit: as for `parse_run`.
    """
    known = flat(default)
    options = _whole_numbers(options, {name for name, value in known.items() if type(value) is int})
    about = f"Train on a task ({task_summary()}); every option overrides one field of the task's recipe."
    start = default
    if _HELP_ALL in options:
        options = HELP[:1]
    elif any(option in HELP for option in options):
        sections = sorted({name.partition(".")[0] for name in known if "." in name})
        about += (
            f" Most runs need only those below. {prog} {_HELP_ALL} has all {len(known)} ({', '.join(sections)}.*), "
            "--print-config all values in one list, each with its meaning."
        )
        start = _with_most_used(default)
    _check_names(default, known, options)
    # tyro needs an instance of the very class that it fills for the defaults
    kind: Any = type(start)
    arguments = parse(RunArguments[kind], options, prog, RunArguments(config=start), description=about)
    wanted = arguments.config
    for name in differences(known, flat(wanted)):
        if (why := wanted.why_unused(name)) is not None:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} has no effect with {why}", f"leave out {option}")
    return arguments


_WHOLE = re.compile(r"(\d+(?:\.\d+)?)(?:[eE]\+?(\d{1,2})|([kKM]))")
_THOUSANDS = {"k": 3, "K": 3, "M": 6}


_MEANT = {
    "gpus": "--serve.num-gpus N gives the judge's replica GPUs (0.5 shares one); a policy takes what is free",
    "num_gpus": "--serve.num-gpus N gives the judge's replica GPUs (0.5 shares one); a policy takes what is free",
    "config": "give the settings as options; rlvlm sweep FILE takes some in YAML, and rlvlm resume DIR a run's own",
}
"""Fixes for options that other programs have and that no setting here is spelled or described like."""


def _whole_numbers(options: Sequence[str], names: Collection[str]) -> list[str]:
    """Returns the options with `1e5`, `2.5k` and `1M` written out for the options in `names`, which are integers.

    Raises:
        UsageError: one of these is no whole number.
    """
    found: list[str] = []
    for place, word in enumerate(options):
        head, equals, value = (
            word.partition("=") if word.startswith("--") else (options[place - 1] if place else "", "", word)
        )
        if head[2:].replace("-", "_") in names and value:
            given = _WHOLE.fullmatch(value)
            number = Decimal(given[1]).scaleb(int(given[2] or _THOUSANDS[given[3]])) if given else None
            if number is not None and number == number.to_integral_value():  # 1.5e0 is not
                value = str(int(number))
            if not re.fullmatch(r"[+-]?\d+", value):
                raise UsageError(f"{head} is a whole number, got {value!r}", f"e.g. {head} 20000, 20k or 2e4")
            word = f"{head}=" * bool(equals) + value
        found.append(word)
    return found


def _check_names(config: RunConfig, known: Mapping[str, Any], options: Sequence[str]) -> None:
    """Refuses an option that does not exist if settings have its meaning, with a UsageError that lists them: the
    parser's own suggestions have a similar spelling, but --learning-rate does not look like --algo.actor-lr.
    """
    for option in options:
        given = option.partition("=")[0]
        name = given[2:].replace("-", "_")
        section, _, last = name.rpartition(".")
        endings = {key.rpartition(".")[2] for key in known}
        if not option.startswith("--") or name in known or difflib.get_close_matches(last, endings, cutoff=0.8):
            continue
        if name in _MEANT:
            raise UsageError(f"there is no option {given}", _MEANT[name])
        if section == "env" and "env.make" in known:
            fix = f"a keyword of gymnasium.make is given as --env.make {last} VALUE"
            raise UsageError(f"there is no option {given}", fix)
        meant = by_meaning(config, last.replace("_", " ").strip())
        meant = {key: about for key, about in meant.items() if key.startswith(f"{section}.")} or meant
        if meant:
            hints = (f"--{key.replace('_', '-')} ({about})" for key, about in meant.items())
            raise UsageError(f"there is no option {given}", f"did you mean {', or '.join(hints)}?")


def _added_by_users(kind: type) -> set[str]:
    """Returns the names of the fields that classes outside of rlvlm add to `kind`."""
    theirs = [part for part in kind.__mro__ if part.__module__.partition(".")[0] != __name__.partition(".")[0]]
    return {name for part in theirs for name in vars(part).get("__annotations__", ())}


def _with_most_used(config: Any, prefix: str = "") -> Any:
    """Returns the config as an instance of a subclass with fields hidden from help: only the most used ones stay, and
    those that a class outside of rlvlm adds, which users look for there.
    """
    # tyro hides fields by their type, so types have to be replaced; hidden options still work
    kind, shown, values = type(config), {}, {}
    added = _added_by_users(kind)
    hints = get_type_hints(kind, include_extras=True)
    for name, hint in ((each.name, hints[each.name]) for each in fields(kind)):
        values[name] = getattr(config, name)
        if name in added:
            continue
        most_used = any(used.startswith(f"{prefix}{name}.") for used in _MOST_USED)
        if is_dataclass(hint) and (most_used or _added_by_users(type(values[name]))):
            values[name] = _with_most_used(values[name], f"{prefix}{name}.")
            shown[name] = type(values[name])
        elif f"{prefix}{name}" not in _MOST_USED:
            shown[name] = tyro.conf.Suppress[hint]
    body = {member.name: member for member in fields(kind) if member.name in shown}
    body |= {"__annotations__": shown, "__doc__": kind.__doc__, "__module__": kind.__module__}
    return dataclass(frozen=True, kw_only=True)(type(kind.__name__, (kind,), body))(**values)
