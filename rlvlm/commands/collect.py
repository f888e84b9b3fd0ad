"""`rlvlm collect TASK`: plays episodes into a folder of demonstrations."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rlvlm.algorithms.sft_config import SFTConfig
from rlvlm.core.checks import Bound, PositiveInt, Share, check_bounds
from rlvlm.core.console.arguments import parse, print_progress
from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.demonstrations.vlm_player import PlayerConfig
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.registry import check_env_settings, full_name, make_env
from rlvlm.runs.settings.arguments import task_first
from rlvlm.runs.settings.recipes import recipe

if TYPE_CHECKING:
    from rlvlm.demonstrations.collect import Demonstrator


@dataclass(frozen=True)
class CollectArguments:
    """Play episodes with the task's script, or with a VLM, into a folder; an existing one is continued or extended."""

    out: Path = Path()
    """Folder of the demonstrations; by default `demonstrations/TASK`."""
    episodes: PositiveInt = 200
    """Number of episodes in all, >= 1. For a task in chunks only successes count; failures are kept beside them."""
    seed: int = 0
    """Seed of the starts, which evaluations never use; 0 to 999 for tasks in turns. In chunks, a run of the same
    seed plays the same episodes."""
    wrong_actions: Share = 0.0
    """For tasks in turns: probability in [0, 1] that another legal action is written and carried out instead."""
    wrong_thoughts: Share = 0.0
    """For tasks in turns: probability in [0, 1] that a thought of another turn is written instead."""
    pictures: bool = True
    """For tasks in turns: whether to keep every turn's image, once each; chat formats need them, training here does
    not."""
    noise: Annotated[float, Bound("[0, inf)")] = 0.0
    """For tasks in chunks: standard deviation of noise added to the script's actions, which are scaled to [-1, 1]."""
    p_perturb: Annotated[float, Bound("[0, 1)")] = 0.0
    """For tasks in chunks: probability in [0, 1) that an earlier chunk of the episode is repeated instead of the
    script's, which then starts again; a run learns the script's reaction, and not that chunk."""
    player: PlayerConfig = field(default_factory=PlayerConfig)
    env: EnvConfig = field(default_factory=EnvConfig)

    def __post_init__(self) -> None:
        check_bounds(self, "--")


def command(words: Sequence[str], prog: str) -> int:
    """Runs `collect TASK [options]`: prints how many episodes the folder holds now."""
    task, options = task_first(words, prog, "number_line")
    task = full_name(task)
    config = recipe(task)
    sft = config.section(SFTConfig)
    if sft is None:
        raise UsageError(f"{task} is an env in steps; those in turns or chunks can be collected", f"{prog} push_block")
    default = CollectArguments(out=Path("demonstrations") / task.replace("/", "-"), env=config.env)
    default = replace(default, **sft.script_options())  # the script's settings in a run of the task
    arguments = parse(CollectArguments, options, f"{prog} {task}", default)
    kind = config.kind.name
    # settings of the other kind of env: the recipe's own are defaults and no mistakes, other values are
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
    """Plays with the task's script or a VLM, and returns a summary of the folder."""
    from rlvlm.demonstrations.card import write_card
    from rlvlm.demonstrations.chunk_form import form_of
    from rlvlm.demonstrations.collect import Disturbance, collect
    from rlvlm.demonstrations.folder import create_folder
    from rlvlm.reports.contact_sheet import write_sheet

    out, config, seed = arguments.out, arguments.env, arguments.seed
    if kind == "turns":
        env = make_env(task, config, 0)
        player = _player_of_turns(task, arguments, has_expert=env.has_expert)
        folder = create_folder(out, task, kind, env.action_names, asdict(config))
        num_new = collect(env, player, folder, arguments.episodes, seed, keeps_images=arguments.pictures)
    else:
        config = config.for_demonstrations()  # without the settings of a run's training
        env = make_env(task, config, seed)
        folder = create_folder(out, task, kind, env=asdict(config), chunks=asdict(form_of(env)))
        disturbance = Disturbance(noise=arguments.noise, p_perturb=arguments.p_perturb)
        num_new = collect(env, disturbance, folder, arguments.episodes, seed, log=print_progress)
        write_sheet(folder, lambda: env)
    counts = write_card(folder)
    parts = {
        "turns": f"{counts.steps:,} steps, {len(counts.images):,} distinct images",
        "chunks": f"{counts.chunks:,} chunks, {counts.steps:,} env steps",
    }
    success = counts.successes / max(counts.episodes, 1)
    return f"{num_new:,} new episodes in {out}: now {counts.episodes:,} with {parts[kind]} and success {success:.1%}\n"


def _player_of_turns(task: str, arguments: CollectArguments, has_expert: bool) -> "Demonstrator":
    """Returns the player of an env in turns, the named VLM, else the task's script; raises UsageError if there is
    neither, a setting of one is given for the other, or the seed is out of range.
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
