"""`rlvlm collect TASK`."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tyro

from rlvlm.envs.config import EnvConfig
from rlvlm.envs.registry import check_heeded, make_world, task_kind, task_summary
from rlvlm.errors import EXIT_DONE, UsageError
from rlvlm.runs.recipes import recipe


@dataclass(frozen=True)
class CollectArguments:
    """Play episodes with the task's scripted expert into a folder; again: goes on, or adds to it."""

    out: Path = Path()
    """Folder of the demonstrations; by default `demonstrations/TASK`."""
    episodes: int = 200
    """Episodes wanted in all, >= 1."""
    seed: int = 0
    """Of the starts, 0 to 999; they are none of those that training and evaluation use."""
    wrong_actions: float = 0.0
    """Probability in [0, 1] that another legal action is written and carried out instead."""
    wrong_thoughts: float = 0.0
    """Probability in [0, 1] that a thought of another turn is written instead."""
    pictures: bool = True
    """Whether every turn's picture is kept, once each; chat formats need them, learning here does not."""
    env: EnvConfig = field(default_factory=EnvConfig)


def command(words: Sequence[str], prog: str) -> int:
    """`collect TASK [options]`: how many episodes the folder holds now."""
    if not words or words[0].startswith("-") and words[0] not in ("-h", "--help"):
        raise UsageError(f"name a task first: {prog} TASK [options]; tasks: {task_summary()}", f"{prog} number_line")
    task, options = ("number_line", words[:1]) if words[0].startswith("-") else (words[0], words[1:])
    default = CollectArguments(out=Path("demonstrations") / task.replace("/", "-"), env=recipe(task).env)
    try:
        arguments = tyro.cli(CollectArguments, default=default, args=options, prog=f"{prog} {task}")
    except ValueError as error:  # a rule of EnvConfig
        raise UsageError(str(error), f"{prog} {task} --help") from error
    if task_kind(task) != "turns":
        raise UsageError(f"{task} is no world in turns, and only those can be collected", f"{prog} number_line")
    if arguments.episodes < 1:
        raise UsageError(f"--episodes must be >= 1, got {arguments.episodes}", "leave it out for 200")
    try:
        check_heeded(task, arguments.env)
    except ValueError as error:
        raise UsageError(str(error), f"{prog} {task} --help") from error
    from rlvlm.demonstrations.card import write_card
    from rlvlm.demonstrations.collect import collect
    from rlvlm.demonstrations.folder import create_folder
    from rlvlm.demonstrations.players import ScriptedExpert

    world = make_world(task, arguments.env, 0)
    if not world.has_expert:
        raise UsageError(f"{task} has no scripted expert", "choose a task that has one, e.g. doorkey_6x6")
    try:
        player = ScriptedExpert(arguments.wrong_actions, arguments.wrong_thoughts)
        folder = create_folder(arguments.out, task, "turns", world.action_names, asdict(arguments.env))
        num_new = collect(world, player, folder, arguments.episodes, arguments.seed, arguments.pictures)
    except ValueError as error:
        raise UsageError(str(error)) from error
    counts = write_card(folder)
    sys.stdout.write(
        f"{num_new:,} new episodes in {arguments.out}: now {counts.episodes:,} with {counts.steps:,} steps, "
        f"{len(counts.pictures):,} distinct pictures and success {counts.successes / max(counts.episodes, 1):.1%}\n"
    )
    return EXIT_DONE
