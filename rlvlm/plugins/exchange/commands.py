"""`rlvlm data import` and `rlvlm data export`."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from rlvlm.core.checks import PositiveInt, check_bounds
from rlvlm.core.console.arguments import parse, print_progress
from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.core.foreign import visible
from rlvlm.core.grippers import GripperUnits
from rlvlm.demonstrations.card import FilterConfig
from rlvlm.envs.registry import find_task, full_name, make_env, task_env
from rlvlm.plugins.exchange.cutting import CutConfig


@dataclass(frozen=True, kw_only=True)
class LeRobotForm:
    """For lerobot."""

    gripper: GripperUnits | None = None
    """Units of the gripper in the data set. None: those of the imported data, else minus_one_opens, LIBERO's."""
    image_px: PositiveInt = 256
    """Side of drawn images, pixels; those that the folder keeps stay as they are."""
    fps: PositiveInt = 20
    """Env steps per second; LIBERO has 20."""

    def __post_init__(self) -> None:
        check_bounds(self, "lerobot")


@dataclass(frozen=True, kw_only=True)
class ExportArguments:
    """Export demonstrations as chats, as a table, or as a data set of LeRobot's."""

    folder: tyro.conf.Positional[Path]
    """Folder made by `rlvlm collect` or `rlvlm data import`."""
    out: Path
    """File to write; an existing one is replaced. Image paths are relative to it. For lerobot a new folder."""
    form: Literal["llava", "qwen", "parquet", "lerobot"] = "qwen"
    """llava: a JSON array of conversations; qwen: a line of messages per step; parquet: a row per step, unfiltered;
    lerobot: a LeRobot data set, version 3.0, of episodes in chunks."""
    filter: FilterConfig = field(default_factory=FilterConfig)
    lerobot: LeRobotForm = field(default_factory=LeRobotForm)
    trust: bool = False
    """For lerobot: trust the code that the folder names: its env is imported, and plays the episodes again."""


@dataclass(frozen=True, kw_only=True)
class ImportArguments:
    """Import chats or recorded robot trajectories into a folder of demonstrations."""

    file: tyro.conf.Positional[Path]
    """For chats, a file with a JSON array, or one JSON object per line; else a file or the folder of a data set."""
    out: Path
    """Folder of the demonstrations; created if missing."""
    task: str
    """For chats, the task in turns whose actions the answers name; else the task in chunks with the instructions."""
    form: Literal["chats", "libero", "lerobot", "rlds"] = "chats"
    """Format of the data. chats: chats of LLaVA or Qwen; libero: LIBERO's HDF5 files; lerobot: a LeRobot data set,
    version 2 or 3; rlds: TFRecord files such as those of modified_libero_rlds."""
    player: str = "imported"
    """For chats: name of the player that gave the answers."""
    images: Path | None = None
    """For chats: folder of the image files, to which their names are relative; by default the file's own."""
    cut: CutConfig = field(default_factory=CutConfig)
    """For trajectories."""


def export(words: Sequence[str], prog: str) -> int:
    """Runs `data export DIR --out FILE`."""
    sys.stdout.write(visible(_export(parse(ExportArguments, words, prog))))
    return EXIT_DONE


def import_file(words: Sequence[str], prog: str) -> int:
    """Runs `data import FILE --out DIR --task TASK`."""
    sys.stdout.write(visible(_import(parse(ImportArguments, words, prog))))
    return EXIT_DONE


def _export(arguments: ExportArguments) -> str:
    """Exports demonstrations, and returns how many rows or chats were written, and why others were left out."""
    from rlvlm.demonstrations.folder import open_folder
    from rlvlm.plugins.exchange.chats import export_chats, export_parquet

    folder = open_folder(arguments.folder)
    if arguments.form == "lerobot":
        from rlvlm.plugins.exchange.lerobot import export_lerobot
        from rlvlm.reports.contact_sheet import folder_env

        if not folder.has_chunks:
            raise UsageError(f"{folder.path} holds {folder.kind}, and LeRobot's data are of chunks", "--form qwen")
        env = folder_env(folder, trust=arguments.trust)
        count, reasons = export_lerobot(folder, arguments.out, env, arguments.filter, **vars(arguments.lerobot))
        return f"{count:,} episodes in {arguments.out}{_told(reasons)}\n"
    if arguments.form == "parquet":
        return f"{export_parquet(folder, arguments.out):,} rows in {arguments.out}\n"
    count, reasons = export_chats(folder, arguments.out, arguments.form, arguments.filter)
    return f"{count:,} chats in {arguments.out}{_told(reasons)}\n"


def _told(reasons: Counter[str]) -> str:
    """Returns how many were left out, by reason."""
    return "".join(f"; left out {number:,}: {reason}" for reason, number in reasons.most_common())


def _import(arguments: ImportArguments) -> str:
    """Imports data, and returns how many chats or trajectories were added, and why others were left out.

    Raises:
        UsageError: an option is for the other kind of data, the data are missing or of another kind of task, or nothing
            of them was or had been added.
    """
    from rlvlm.demonstrations.card import write_card
    from rlvlm.demonstrations.folder import create_folder
    from rlvlm.plugins.exchange.chats import import_chats
    from rlvlm.plugins.exchange.trajectories import import_trajectories
    from rlvlm.reports.contact_sheet import write_sheet

    task, file, out, form = full_name(arguments.task), arguments.file, arguments.out, arguments.form
    kind, example = ("turns", "number_line") if form == "chats" else ("chunks", "libero_object/0")
    if form == "chats" and arguments.cut != CutConfig():
        what = "--cut and --success are for trajectories, and have no effect on chats"
        raise UsageError(what, "say what the data are: --form libero")
    if form != "chats" and (arguments.player, arguments.images) != ("imported", None):
        raise UsageError("--player and --images are for chats, and have no effect on trajectories", "leave them out")
    if find_task(task).kind != kind:
        raise UsageError(f"{task} is not an env in {kind}", f"--task {example}")
    if not (file.is_file() if form == "chats" else file.exists()):
        wanted = (
            "a JSON array of chats, or a file with one chat per line" if form == "chats" else "a file or a data set"
        )
        raise UsageError(f"{file} is not a file", f"name {wanted}")
    env = make_env(task, task_env(task), 0)
    if form == "chats":
        folder = create_folder(out, task, kind, env.action_names)
        counts = import_chats(file, folder, arguments.player, arguments.images)
    else:
        folder, counts = import_trajectories(file, form, out, task, env, arguments.cut, print_progress)
        write_sheet(folder, lambda: env)
    write_card(folder)
    left_out = Counter({reason: number for reason, number in counts.items() if reason != "added"})
    text = f"{counts['added']:,} {'chats' if form == 'chats' else 'episodes'} added to {out}{_told(left_out)}"
    # importing the same data again adds nothing, and is no mistake
    if not counts["added"] and not counts["there already"]:
        raise UsageError(text, "name data of this task, or give the data's task with --task")
    return f"{text}\n"
