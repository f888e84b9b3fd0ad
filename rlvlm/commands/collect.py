"""`rlvlm collect TASK`."""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rlvlm.algorithms.sft_config import ChunkSFTConfig
from rlvlm.commands.arguments import parse, task_first
from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.demonstrations.vlm_player import PlayerConfig
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.registry import check_unused, full_name, make_env, task_kind
from rlvlm.runs.recipes import recipe


@dataclass(frozen=True)
class CollectArguments:
    """Play episodes with the task's script, or with a VLM, into a folder; again: goes on, or adds to it."""

    out: Path = Path()
    """Folder of the demonstrations; by default `demonstrations/TASK`."""
    episodes: int = 200
    """Episodes wanted in all, >= 1. Of a task in chunks: those that succeed; failures are kept beside them."""
    seed: int = 0
    """Of the starts, 0 to 999; evaluations use none of them. Of a task in chunks, a run of the same seed plays the same
    episodes."""
    wrong_actions: float = 0.0
    """Of tasks in turns: probability in [0, 1] that another legal action is written and carried out instead."""
    wrong_thoughts: float = 0.0
    """Of tasks in turns: probability in [0, 1] that a thought of another turn is written instead."""
    pictures: bool = True
    """Of tasks in turns: whether every turn's image is kept, once each; chat formats need them, learning here does
    not."""
    noise: float = 0.0
    """Of tasks in chunks: standard deviation of what is added to the script's actions, scaled to [-1, 1]."""
    p_perturb: float = 0.0
    """Of tasks in chunks: probability in [0, 1) that an earlier chunk of the episode is carried out again in place of
    the script's, which then begins again; a run learns what the script does about it, and not that chunk."""
    player: PlayerConfig = field(default_factory=PlayerConfig)
    env: EnvConfig = field(default_factory=EnvConfig)

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise ValueError(f"--episodes must be >= 1, got {self.episodes}")
        for name, value in (("--wrong-actions", self.wrong_actions), ("--wrong-thoughts", self.wrong_thoughts)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value:g}")
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"--noise must be >= 0, got {self.noise:g}")
        if not 0 <= self.p_perturb < 1:
            raise ValueError(f"--p-perturb must be in [0, 1), got {self.p_perturb:g}")


def command(words: Sequence[str], prog: str) -> int:
    """`collect TASK [options]`: how many episodes the folder holds now."""
    task, options = task_first(words, prog, "number_line")
    task = full_name(task)
    config = recipe(task)
    default = CollectArguments(out=Path("demonstrations") / task.replace("/", "-"), env=config.env)
    if isinstance(sft := config.sft, ChunkSFTConfig):  # what a run of the task would have its script play
        default = replace(default, episodes=sft.episodes, noise=sft.noise, p_perturb=sft.p_perturb)
    arguments = parse(CollectArguments, options, f"{prog} {task}", default)
    kind = task_kind(task)
    if kind == "steps":
        raise UsageError(f"{task} is an env in steps; those in turns or chunks can be collected", f"{prog} push_block")
    others = ("noise", "p_perturb") if kind == "turns" else ("wrong_actions", "wrong_thoughts", "pictures", "player")
    if odd := [name for name in others if getattr(arguments, name) != getattr(default, name)]:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in odd)
        raise UsageError(f"{named} would have no effect on {task}, an env in {kind}", f"{prog} {task} --help")
    try:
        check_unused(task, arguments.env)
        done = _collect_chunks(task, arguments) if kind == "chunks" else _collect_turns(task, arguments)
    except ValueError as error:
        raise UsageError(str(error), f"{prog} {task} --help") from error
    sys.stdout.write(done)
    return EXIT_DONE


def _collect_turns(task: str, arguments: CollectArguments) -> str:
    """Has the expert of an env in turns play, or a VLM; what the folder holds then."""
    from rlvlm.demonstrations.card import write_card
    from rlvlm.demonstrations.collect import ScriptedExpert, collect
    from rlvlm.demonstrations.folder import create_folder
    from rlvlm.demonstrations.vlm_player import VLMPlayer

    world = make_env(task, arguments.env, 0)
    if arguments.player.model:
        if arguments.wrong_actions or arguments.wrong_thoughts:
            raise UsageError("--wrong-actions and --wrong-thoughts are of the script's play", "leave them out")
        player = VLMPlayer(arguments.player)
    elif arguments.player != PlayerConfig():
        raise UsageError("--player.* would have no effect: no player is named", "--player.model NAME")
    elif not world.has_expert:
        raise UsageError(f"{task} has no scripted expert", "let a VLM play: --player.model NAME")
    else:
        player = ScriptedExpert(arguments.wrong_actions, arguments.wrong_thoughts)
    folder = create_folder(arguments.out, task, "turns", world.action_names, asdict(arguments.env))
    num_new = collect(world, player, folder, arguments.episodes, arguments.seed, keeps_images=arguments.pictures)
    counts = write_card(folder)
    return (
        f"{num_new:,} new episodes in {arguments.out}: now {counts.episodes:,} with {counts.steps:,} steps, "
        f"{len(counts.pictures):,} distinct images and success {counts.successes / max(counts.episodes, 1):.1%}\n"
    )


def _collect_chunks(task: str, arguments: CollectArguments) -> str:
    """Plays the script of an env in chunks; what the folder holds then."""
    from rlvlm.demonstrations.card import write_card
    from rlvlm.demonstrations.collect import Perturbation, collect, form_of
    from rlvlm.demonstrations.folder import create_folder
    from rlvlm.reports.contact_sheet import write_sheet

    env = replace(arguments.env, physics="exact", plays_on=False)  # whatever a run's training has
    world = make_env(task, env, arguments.seed)
    form = asdict(form_of(world))
    folder = create_folder(arguments.out, task, "chunks", env=asdict(env), chunks=form)

    def log(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    perturbation = Perturbation(noise=arguments.noise, p_perturb=arguments.p_perturb)
    num_new = collect(world, perturbation, folder, arguments.episodes, arguments.seed, log=log)
    write_sheet(folder, lambda: world)
    counts = write_card(folder)
    return (
        f"{num_new:,} new episodes in {arguments.out}: now {counts.episodes:,} with {counts.chunks:,} chunks, "
        f"{counts.steps:,} env steps and success {counts.successes / max(counts.episodes, 1):.1%}\n"
    )
