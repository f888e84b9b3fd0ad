"""The commands about demonstrations: collect, data show | export | import."""

import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from rlvlm.demonstrations.select import FilterConfig
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.registry import make_world, task_env, task_kind, task_summary
from rlvlm.errors import EXIT_DONE, UsageError


@dataclass(frozen=True)
class CollectArguments:
    """Play episodes with the task's scripted expert into a folder; again: goes on, or adds to it."""

    out: Path = Path()
    """Folder of the demonstrations; by default `demonstrations/TASK`."""
    episodes: int = 200
    """Episodes wanted in all."""
    seed: int = 0
    """Of the starts, 0 to 999; they are none of those that training and evaluation use."""
    wrong_actions: float = 0.0
    """Probability in [0, 1] that another legal action is written and carried out instead."""
    wrong_thoughts: float = 0.0
    """Probability in [0, 1] that a thought of another turn is written instead."""
    pictures: bool = True
    """Whether every turn's picture is kept, once each; chat formats need them, learning here does not."""
    env: EnvConfig = field(default_factory=EnvConfig)


@dataclass(frozen=True)
class ShowArguments:
    """Count what a folder of demonstrations holds, and write its card anew."""

    folder: tyro.conf.Positional[Path]
    """Made by `rlvlm collect`."""


@dataclass(frozen=True, kw_only=True)
class ExportArguments:
    """Write a folder of demonstrations as chats, or as a table."""

    folder: tyro.conf.Positional[Path]
    """Made by `rlvlm collect`."""
    out: Path
    """The file; one that is there is replaced. Images are named relative to it."""
    form: Literal["llava", "qwen", "parquet"] = "qwen"
    """llava: a JSON array of conversations; qwen: a line of messages per step; parquet: a row per step, unfiltered."""
    filter: FilterConfig = field(default_factory=FilterConfig)


@dataclass(frozen=True, kw_only=True)
class ImportArguments:
    """Add the chats of a LLaVA or Qwen file to a folder of demonstrations."""

    file: tyro.conf.Positional[Path]
    """A JSON array, or one JSON object per line."""
    out: Path
    """Folder of the demonstrations; made where there is none."""
    task: str
    """The task in turns whose actions the answers name."""
    player: str = "imported"
    """Who gave the answers."""
    images: Path | None = None
    """What image files are named relative to, and lie in; by default the file's own folder."""


def collect_command(words: Sequence[str], prog: str) -> int:
    """`collect TASK [options]`."""
    if not words or words[0].startswith("-") and words[0] not in ("-h", "--help"):
        raise UsageError(f"name a task first: {prog} TASK [options]; tasks: {task_summary()}", f"{prog} number_line")
    task, options = ("number_line", words[:1]) if words[0].startswith("-") else (words[0], words[1:])
    default = CollectArguments(out=Path("demonstrations") / task.replace("/", "-"), env=task_env(task))
    try:
        arguments = tyro.cli(CollectArguments, default=default, args=options, prog=f"{prog} {task}")
    except ValueError as error:  # a rule of EnvConfig
        raise UsageError(str(error), f"{prog} {task} --help") from error
    if task_kind(task) != "turns":
        raise UsageError(f"{task} is no world in turns, and only those can be collected", f"{prog} number_line")
    return _collect(task, arguments)


def _collect(task: str, arguments: CollectArguments) -> int:
    from rlvlm.demonstrations.card import write_card
    from rlvlm.demonstrations.collect import collect
    from rlvlm.demonstrations.folder import create_folder
    from rlvlm.demonstrations.players import ScriptedExpert

    world = make_world(task, arguments.env, 0)
    if not world.has_expert:
        raise UsageError(f"{task} has no scripted expert", "choose a task that has one, e.g. doorkey_6x6")
    try:
        player = ScriptedExpert(arguments.wrong_actions, arguments.wrong_thoughts)
        folder = create_folder(arguments.out, task, "turns", world.action_names)
        num_new = collect(world, player, folder, arguments.episodes, arguments.seed, arguments.pictures)
    except ValueError as error:
        raise UsageError(str(error)) from error
    counts = write_card(folder)
    sys.stdout.write(
        f"{num_new:,} new episodes in {arguments.out}: now {counts.episodes:,} with {counts.steps:,} steps, "
        f"{len(counts.pictures):,} distinct pictures and success {counts.successes / max(counts.episodes, 1):.1%}\n"
    )
    return EXIT_DONE


def data_command(words: Sequence[str], prog: str) -> int:
    """`data show | export | import`."""
    wanted = words[0] if words else ""
    if wanted not in _DATA:
        near = difflib.get_close_matches(wanted, _DATA, n=1) or ["show"]
        raise UsageError(
            f"{prog} is followed by {', '.join(_DATA)}; got {wanted or 'nothing'}", f"{prog} {near[0]} --help"
        )
    return _DATA[wanted](words[1:], f"{prog} {wanted}")


def _show(words: Sequence[str], prog: str) -> int:
    arguments = tyro.cli(ShowArguments, args=words, prog=prog)
    from rlvlm.demonstrations.card import write_card
    from rlvlm.demonstrations.folder import open_folder

    write_card(open_folder(arguments.folder))
    sys.stdout.write((arguments.folder / "README.md").read_text())
    return EXIT_DONE


def _export(words: Sequence[str], prog: str) -> int:
    try:
        arguments = tyro.cli(ExportArguments, args=words, prog=prog)
    except ValueError as error:  # a rule of the filter
        raise UsageError(str(error), f"{prog} --help") from error
    from rlvlm.demonstrations.exchange import export_chats
    from rlvlm.demonstrations.folder import open_folder
    from rlvlm.demonstrations.table import export_parquet

    folder = open_folder(arguments.folder)
    if arguments.form == "parquet":
        sys.stdout.write(f"{export_parquet(folder, arguments.out):,} rows in {arguments.out}\n")
        return EXIT_DONE
    count, reasons = export_chats(folder, arguments.out, arguments.form, arguments.filter)
    left_out = "".join(f"; left out {number:,}: {reason}" for reason, number in reasons.most_common())
    sys.stdout.write(f"{count:,} chats in {arguments.out}{left_out}\n")
    return EXIT_DONE


def _import(words: Sequence[str], prog: str) -> int:
    arguments = tyro.cli(ImportArguments, args=words, prog=prog)
    from rlvlm.demonstrations.card import write_card
    from rlvlm.demonstrations.exchange import import_chats
    from rlvlm.demonstrations.folder import create_folder

    if task_kind(arguments.task) != "turns":
        raise UsageError(f"{arguments.task} is no world in turns", "--task number_line")
    names = make_world(arguments.task, task_env(arguments.task), 0).action_names
    folder = create_folder(arguments.out, arguments.task, "turns", names)
    counts = import_chats(arguments.file, folder, arguments.player, arguments.images)
    write_card(folder)
    left_out = "".join(f"; left out {counts[reason]:,}: {reason}" for reason in counts if reason != "added")
    sys.stdout.write(f"{counts['added']:,} chats added to {arguments.out}{left_out}\n")
    return EXIT_DONE


_DATA: dict[str, Callable[[Sequence[str], str], int]] = {"show": _show, "export": _export, "import": _import}
