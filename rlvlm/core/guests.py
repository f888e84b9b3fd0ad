"""Guests: parts that the core of rlvlm does without, each with a folder of its own, and the registry that finds them.

Those that ship lie in `rlvlm/plugins/NAME/`; others are installed packages with an entry point in the group
`rlvlm.plugins`, whose value is `module:GUEST`. The file with the guest, `guest.py`, imports nothing but this module:
what a guest adds is named by `module:NAME` and imported when it is used. So the command line starts as fast with many
guests as with none, and a guest that is broken or missing costs what it adds and nothing else.
"""

import functools
import importlib
import importlib.metadata
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from rlvlm.core.errors import UsageError, first_line
from rlvlm.core.install import missing_train

GROUP = "rlvlm.plugins"
"""Package of the guests that ship, and group of the entry points of others."""
FOLDER = Path(__file__).parents[1] / "plugins"
NAMES_FILE = FOLDER / "names.json"
"""Which guest has which name, for messages about one that was taken out."""

_LOGGER = logging.getLogger(__name__)
Entry = TypeVar("Entry")
Config = TypeVar("Config")
Section = TypeVar("Section")


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command of `rlvlm`, or a form of one, such as `labels agree`."""

    call: str
    """`module:FUNCTION`, called with the words after the command and its full name; returns the exit code."""
    text: str
    """Line in the help: what follows the command, three spaces, and what it does."""
    needs_train: bool = False
    """Whether it needs the train extra whatever its arguments; without it the command is not imported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeBackend:
    """A kind of judge, chosen by `judge.backend`, and what has to be known of it before it is loaded."""

    build: str
    """`module:FUNCTION`, called with the `judges.config.JudgeConfig`; returns the `Judge`, loaded and ready."""
    wants_weights: bool = False
    """Whether `judge.model` is a folder of weights or a hub name."""
    has_random_weights: bool = False
    """Whether `judge.model random` makes one that knows nothing, a control."""
    is_remote: bool = False
    """Whether it answers over an API: it needs no local memory, and each question may cost money."""
    is_human: bool = False
    """Whether people answer, which takes minutes or days and needs no model."""
    session: str = ""
    """Of people: `module:FUNCTION`, a context manager called with the `JudgeConfig`, the `LabelStore`, a function that
    is polled and ends the waiting, and one that shows a line; and `each_order`, whether a pair in the other order is
    another question. It yields the judge while people can reach it."""
    batches_itself: bool = False
    """Whether its engine takes questions as they come; others answer one batch at a time."""
    reads_states: bool = False
    """Whether it compares images with a sentence about a state and takes no instruction."""
    sees_goal_images: bool = True
    """Whether it accepts an image of the goal."""
    needs_train: bool = False
    """Whether it needs the train extra; without it the judge is not imported."""
    sentences: Mapping[str, str] = field(default_factory=dict)
    """Sentences that it is asked with, by name, which a file `judge.wording` may replace; `{goal}` is the goal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyCheckpoint:
    """A kind of pretrained policy in chunks that `policy.model` names, chosen by `policy.head`."""

    section: str
    """Section of `policy` with its settings, which have `section`, `learns`, `adapter`, `device`, `at_once` and
    `recompute`, e.g. `openvla`."""
    build: str
    """`module:FUNCTION`, called with the `VLAConfig` and the env; returns the `VLAPolicy`, loaded."""
    check: str
    """`module:FUNCTION`, called with the folder, its settings and the env; raises ModelUnavailable unless they fit, as
    far as can be said without reading weights."""
    outline: str
    """`module:FUNCTION`, called with the folder and its settings; returns the network without weights, for counting
    parameters, and the config of its language model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFormat:
    """A format of recorded episodes for `rlvlm score`, `labels ask` and the bench. All of its files are untrusted."""

    about: str = ""
    """What to name, in messages, e.g. `the folder of a LeRobot data set`."""
    is_here: str
    """`module:FUNCTION`, called with a path; returns whether there is data of this format, without reading it."""
    read: str
    """`module:FUNCTION`, called with the path and the name of the camera, empty for its first one; yields each episode
    as a `demonstrations.trajectory.RobotTrajectory`, or as a `CorruptEpisode`."""
    bench: str = ""
    """`module:FUNCTION`, called with the path; yields the episodes by all cameras, for `judge-bench PATH`. Empty: the
    bench does not take it."""
    controls: int = 6
    """Items of each control of the bench."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Guest:
    """What a guest adds, by name. Nothing of it replaces what another part of rlvlm has under the same name."""

    about: str
    """What it is, in a few words."""
    docs: str = ""
    """Its page under `docs/`, or an address."""
    commands: Mapping[str, Command] = field(default_factory=dict)
    """Commands, e.g. `distill`, and forms of other commands, e.g. `labels agree`."""
    imports: Mapping[str, Command] = field(default_factory=dict)
    """Kinds of files that `labels import FILES --form NAME` reads into a label store; a file NAME.KIND needs no option,
    which is among the words that the function gets."""
    judges: Mapping[str, JudgeBackend] = field(default_factory=dict)
    """Values of `judge.backend`."""
    checkpoints: Mapping[str, PolicyCheckpoint] = field(default_factory=dict)
    """Pretrained policies in chunks, by `policy.head`."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Sections of settings that it adds to `judge` or to a `policy` in chunks: `module:CLASS` by dotted name, e.g.
    `policy.lerobot`. The class is a frozen dataclass with defaults; its module imports nothing above `rlvlm.core`. A
    section has no effect without the guest's own judges and checkpoints. Its static method `current`, if it has one,
    brings saved settings of earlier versions to today's form."""
    formats: Mapping[str, DataFormat] = field(default_factory=dict)
    """Formats of recorded episodes; those of the core are recognised first, but for films."""
    objects: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Short names for settings that take a user's own object: by setting, e.g. `reward.teacher`, the `module:NAME` that
    each stands for. A name that ships means what it did."""
    store_lines: str = ""
    """`module:FUNCTION` that returns more lines for `labels show`, called with the `labels.store.LabelStore`."""
    bench_files: str = ""
    """`module:FUNCTION` that writes more files beside a bench's row, called with what was `judge_bench.bench.Measured`,
    the judge's name for a table of judges, and the bench's folder."""
    tasks: str = ""
    """`module:FUNCTION` that returns its `envs.registry.Task`s."""


@functools.cache
def guests() -> Mapping[str, Guest]:
    """Returns the guests by name, those that ship first; one that is broken is left out with a warning."""
    found: dict[str, Guest] = {}
    for name, where in _places():
        try:
            guest = _load(where)
            if not isinstance(guest, Guest):
                raise TypeError(f"{where} is a {type(guest).__name__}, and no {__name__}.Guest")
            if name in found:
                raise ValueError("a guest of this name is there already")
        except Exception as error:  # somebody else's file may fail in any way
            _LOGGER.warning("the guest %s is left out: %s: %s", name, type(error).__name__, first_line(error))
            continue
        found[name] = guest
    return found


def with_guests(table: str, own: Mapping[str, Entry]) -> dict[str, Entry]:
    """Returns the entries of the core and those that the guests add.

    Args:
        table: field of `Guest`, e.g. `commands`.
        own: entries of the core by name; a guest's entry of the same name is left out with a warning.
    """
    entries = dict(own)
    for guest, declared in guests().items():
        for name, entry in getattr(declared, table).items():
            if name in entries:
                _LOGGER.warning("%s %s of the guest %s is left out: the name is taken", table, name, guest)
            else:
                entries[name] = entry
    return entries


def short_names(setting: str) -> dict[str, str]:
    """Returns the names that guests give a setting that takes a user's own object, with the `module:NAME` of each."""
    return {name: where for guest in guests().values() for name, where in guest.objects.get(setting, {}).items()}


def with_sections(prefix: str) -> Callable[[type[Config]], type[Config]]:
    """Returns a class decorator that adds the sections of guests to a config class, below `dataclass`.

    Args:
        prefix: dotted name of the config among a run's settings, e.g. `policy`.
    """

    def add(config: type[Config]) -> type[Config]:
        for guest, declared in guests().items():
            for name, reference in declared.settings.items():
                owner, _, section = name.rpartition(".")
                if owner != prefix:
                    continue
                try:
                    kind = load(reference)
                    config.__annotations__ = {**config.__annotations__, section: kind}
                    setattr(config, section, field(default_factory=kind))
                except Exception as error:  # somebody else's file may fail in any way
                    _LOGGER.warning("the settings %s of the guest %s are left out: %s", name, guest, first_line(error))
        return config

    return add


def section_of(config: Any, kind: type[Section]) -> Section:
    """Returns the section of a config that a guest declared with the class `kind`."""
    return next(value for one in fields(config) if isinstance(value := getattr(config, one.name), kind))


def current_section(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the saved settings of a guest's section, which may be of an earlier version, in today's form.

    Args:
        name: dotted name of the section, e.g. `policy.lerobot`.
        settings: settings by name, as read from YAML or JSON.
    """
    kinds = (kind for guest in guests().values() for section, kind in guest.settings.items() if section == name)
    return next((getattr(load(kind), "current", dict)(settings) for kind in kinds), dict(settings))


def forms_of(command: str) -> dict[str, Command]:
    """Returns the forms that guests add to a command of the core: `agree` for `labels agree`."""
    split = [(*name.split(maxsplit=1), entry) for name, entry in with_guests("commands", {}).items() if " " in name]
    return {form: entry for owner, form, entry in split if owner == command}


def guest_of(table: str, name: str) -> str:
    """Returns the end of a message about a name that is not known: which guest that ships has it, empty if none has.

    Args:
        table: field of `Guest`, e.g. `commands`.
        name: name that was not found in it.
    """
    guest = _taken_out(table).get(name)
    return f"; it comes with the guest {guest}, which is not installed here" if guest else ""


def missing_of(table: str) -> str:
    """Returns the end of a message: all names of a table that come with guests which were taken out, empty if none."""
    lost = _taken_out(table)
    names = {guest: [name for name, owner in lost.items() if owner == guest] for guest in lost.values()}
    return "".join(
        f"; {', '.join(own)}: with the guest {guest}, which is not installed here" for guest, own in names.items()
    )


def _taken_out(table: str) -> dict[str, str]:
    """Returns the guest of each name of a table, of those guests that ship and are not here."""
    # from a file beside the guests' folders, because a guest that was taken out cannot say what it had
    known = json.loads(NAMES_FILE.read_text()).get(table, {}) if NAMES_FILE.exists() else {}
    return {name: guest for name, guest in known.items() if guest not in guests()}


def load(reference: str) -> Any:
    """Returns the object that a guest's `module:NAME` names, imported.

    Raises:
        UsageError: it is in somebody else's package, which cannot be imported; says what it raised.
        MachineError: it needs the train extra, which is not installed.
    """
    try:
        return _load(reference)
    except Exception as error:  # somebody else's file may fail in any way
        if isinstance(error, ImportError) and (lacks := missing_train(error)):
            raise lacks from error
        if reference.startswith("rlvlm."):  # an error of ours keeps its class
            raise
        raise UsageError(
            f"{reference} cannot be imported: {type(error).__name__}: {first_line(error)}",
            "reinstall or mend the guest that names it",
        ) from error


def _places() -> Iterator[tuple[str, str]]:
    """Yields the name of each guest and `module:NAME` of its `Guest`."""
    for file in sorted(FOLDER.glob("*/guest.py")):
        yield file.parent.name, f"{GROUP}.{file.parent.name}.guest:GUEST"
    for point in sorted(importlib.metadata.entry_points(group=GROUP)):
        yield point.name, point.value


def _load(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
