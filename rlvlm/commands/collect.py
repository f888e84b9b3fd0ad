"""`rlvlm collect TASK`."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlvlm.commands.arguments import parse, print_progress, task_first
from rlvlm.core.checks import check_interval, check_least, check_shares
from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.demonstrations.vlm_player import PlayerConfig
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.registry import check_env_settings, find_task, full_name, make_env
from rlvlm.runs.recipes import recipe

if TYPE_CHECKING:
    from rlvlm.demonstrations.collect import Demonstrator


@dataclass(frozen=True)
class CollectArguments:
    """Play episodes with the task's script, or with a VLM, into a folder; again: goes on, or adds to it."""

    out: Path = Path()
    """Folder of the demonstrations; by default `demonstrations/TASK`."""
    episodes: int = 200
    """Episodes wanted in all, >= 1. Of a task in chunks: those that succeed; failures are kept beside them."""
    seed: int = 0
    """Seed of the starts, none of which evaluations use; for tasks in turns 0 to 999. In chunks, a run of the same seed
    plays the same episodes."""
    wrong_actions: float = 0.0
    """For tasks in turns: probability in [0, 1] that another legal action is written and carried out instead."""
    wrong_thoughts: float = 0.0
    """For tasks in turns: probability in [0, 1] that a thought of another turn is written instead."""
    pictures: bool = True
    """For tasks in turns: whether every turn's image is kept, once each; chat formats need them, learning here does
    not."""
    noise: float = 0.0
    """For tasks in chunks: standard deviation of what is added to the script's actions, scaled to [-1, 1]."""
    p_perturb: float = 0.0
    """For tasks in chunks: probability in [0, 1) that an earlier chunk of the episode is carried out again in place of
    the script's, which then begins again; a run learns what the script does about it, and not that chunk."""
    player: PlayerConfig = field(default_factory=PlayerConfig)
    env: EnvConfig = field(default_factory=EnvConfig)

    def __post_init__(self) -> None:
        check_least(self, "--", 1, "episodes")
        check_shares(self, "--", "wrong_actions", "wrong_thoughts")
        check_interval(self, "--", "[0, inf)", "noise")
        check_interval(self, "--", "[0, 1)", "p_perturb")


def command(words: Sequence[str], prog: str) -> int:
    """`collect TASK [options]`: how many episodes the folder holds now."""
    task, options = task_first(words, prog, "number_line")
    task = full_name(task)
    config = recipe(task)
    default = CollectArguments(out=Path("demonstrations") / task.replace("/", "-"), env=config.env)
    default = replace(default, **config.script_options())  # what a run of the task would have its script play
    arguments = parse(CollectArguments, options, f"{prog} {task}", default)
    kind = find_task(task).kind
    if kind == "steps":
        raise UsageError(f"{task} is an env in steps; those in turns or chunks can be collected", f"{prog} push_block")
    # settings of the other kind of env: a recipe's default is no mistake, what was set beside it is
    others = ("noise", "p_perturb") if kind == "turns" else ("wrong_actions", "wrong_thoughts", "pictures", "player")
    if odd := [name for name in others if getattr(arguments, name) != getattr(default, name)]:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in odd)
        raise UsageError(f"{named} would have no effect on {task}, an env in {kind}", f"{prog} {task} --help")
    try:
        check_env_settings(task, arguments.env)
        sys.stdout.write(_collect(task, kind, arguments))
    except ValueError as error:
        raise UsageError(str(error), f"{prog} {task} --help") from error
    return EXIT_DONE


def _collect(task: str, kind: str, arguments: CollectArguments) -> str:
    """Has the task's script play, or a VLM; what the folder holds then."""
    from rlvlm.demonstrations.card import write_card
    from rlvlm.demonstrations.chunk_form import form_of
    from rlvlm.demonstrations.collect import Perturbation, collect
    from rlvlm.demonstrations.folder import create_folder
    from rlvlm.reports.contact_sheet import write_sheet

    out, config, seed = arguments.out, arguments.env, arguments.seed
    if kind == "turns":
        env = make_env(task, config, 0)
        player = _player_of_turns(task, arguments, has_expert=env.has_expert)
        folder = create_folder(out, task, kind, env.action_names, asdict(config))
        num_new = collect(env, player, folder, arguments.episodes, seed, keeps_images=arguments.pictures)
    else:
        config = config.for_demonstrations()  # whatever a run's training has
        env = make_env(task, config, seed)
        folder = create_folder(out, task, kind, env=asdict(config), chunks=asdict(form_of(env)))
        perturbation = Perturbation(noise=arguments.noise, p_perturb=arguments.p_perturb)
        num_new = collect(env, perturbation, folder, arguments.episodes, seed, log=print_progress)
        write_sheet(folder, lambda: env)
    counts = write_card(folder)
    parts = {
        "turns": f"{counts.steps:,} steps, {len(counts.images):,} distinct images",
        "chunks": f"{counts.chunks:,} chunks, {counts.steps:,} env steps",
    }
    success = counts.successes / max(counts.episodes, 1)
    return f"{num_new:,} new episodes in {out}: now {counts.episodes:,} with {parts[kind]} and success {success:.1%}\n"


def _player_of_turns(task: str, arguments: CollectArguments, has_expert: bool) -> "Demonstrator":
    """Who plays an env in turns: the VLM that is named, else the task's script.

    Raises:
        UsageError: there is neither, a setting of the one is given for the other, or the seed is out of range.
    """
    from rlvlm.demonstrations.collect import ScriptedExpert
    from rlvlm.demonstrations.vlm_player import VLMPlayer

    if not 0 <= arguments.seed < 1_000:
        raise UsageError(f"--seed must be 0 to 999, got {arguments.seed}", "those are starts that no evaluation uses")
    if arguments.player.model:
        if arguments.wrong_actions or arguments.wrong_thoughts:
            raise UsageError("--wrong-actions and --wrong-thoughts apply to the scripted expert", "leave them out")
        return VLMPlayer(arguments.player)
    if arguments.player != PlayerConfig():
        raise UsageError("--player.* would have no effect without --player.model", "--player.model NAME")
    if not has_expert:
        raise UsageError(f"{task} has no scripted expert", "let a VLM play: --player.model NAME")
    return ScriptedExpert(arguments.wrong_actions, arguments.wrong_thoughts)
