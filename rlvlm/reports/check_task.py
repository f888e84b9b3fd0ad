"""`rlvlm check-task`: checks the contract of a task's env, and shows images of play.

One report for all kinds of env: the contract, its costs, results of random play and of the script, a contact sheet.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.text import Text

from rlvlm.algorithms.sft_config import NO_EXPERT_FIX
from rlvlm.core.console.screen import QuietConsole
from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.core.steps import FloatArray
from rlvlm.demonstrations.playing import Episode, players
from rlvlm.envs.check import check_chunk_env, check_form, check_step_env, check_turn_env
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.env import ChunkEnv, Env, StepEnv, TurnEnv, place_of
from rlvlm.envs.registry import full_name, make_env, task_env, task_families, task_goal, task_names
from rlvlm.reports.contact_sheet import COLUMNS, IMAGE_PX, Row, contact_sheet
from rlvlm.runs.settings.recipes import recipe

_SHORT_EPISODE = {StepEnv: 25, ChunkEnv: 20}
"""Env steps per episode in the check of the contract, few enough to reach the time limit."""
_STARTS = 100
"""Seeds from which starts in turns are counted."""
_ROWS = 3
"""Episodes of each player on the sheet, for envs in turns."""


Plays = dict[str, list[Episode]]
"""Episodes, at least one of each, by player."""


def check_task(task: str, out: Path, num_episodes: int, seed: int) -> int:
    """Checks a task, prints the findings, writes the sheet, and returns the exit code.

    Args:
        task: name in the registry, or `package.module:NAME`.
        out: the image to write.
        num_episodes: episodes of each player (for envs in steps from each of the two starts), >= 1.
        seed: seed of the first episode; the others follow.

    Raises:
        UsageError: there is no such task, it breaks the env contract, or `out` is not the name of an image.
        MachineError: the machine cannot draw the task.
    """
    if out.suffix.lower() not in Image.registered_extensions():  # raised before minutes of play, not after
        raise UsageError(f"{out} is not the name of an image", f"--out {out.name}.png")
    console = QuietConsole(soft_wrap=True)
    console.print(f"{task}: {task_goal(task)}", style="bold")
    env: Env = make_env(task, task_env(task), seed)
    with _violations_named(task, env):
        check_form(env)
    # only envs in steps have a fixed and a random start; the others draw each start from the seed
    is_steps = isinstance(env, StepEnv)
    starts = {f"{start} start, ": start for start in ("fixed", "random")} if is_steps else {"": None}
    plays: Plays = {}
    for prefix, start in starts.items():
        player_env = make_env(task, replace(recipe(task).env, start=start), seed) if start else env
        for name, play in players(player_env).items():
            # processor time: on a busy machine wall-clock time says little
            began = time.process_time()
            some = [episode for n in range(num_episodes) if (episode := play(seed + n)) is not None]
            if not some:  # a script is optional; without one nothing is played
                console.print(f"{prefix + name:<12} there is none")
                continue
            plays[prefix + name] = some
            cost_ms = (time.process_time() - began) / sum(len(episode.rewards) for episode in some) * 1e3
            console.print(f"{prefix + name:<12} {_findings(player_env, some)}; {cost_ms:.2g} ms a step")
        if start:
            player_env.close()
    check_contract(task, recipe(task).env if is_steps else task_env(task), seed, sum(plays.values(), []))
    console.print("passes the env contract" + (", from both starts" if is_steps else ""))
    for note in filter(None, (env.note, env.pixels and env.pixels.note)):
        console.print(f"note: {note}")
    if isinstance(env, StepEnv):
        shapes = (env.observation_space.shape, env.action_space.shape)
        console.print(f"observation {shapes[0]}, action {shapes[1]}, snapshot ({env.snapshot_size},)")
    console.print(_drawing_costs(env, next(iter(plays.values()))[0].snapshots[:20]))
    if isinstance(env, TurnEnv):
        if not env.has_expert:
            console.print(f"{'script':<12} there is none, so a run needs {NO_EXPERT_FIX}")
        console.print(f"prompt: {env.reset(seed=seed)[0].prompt}")
        count = env.count_starts(_STARTS)
        again = ": evaluations on other seeds meet them again" if count < _STARTS / 2 else ""
        console.print(f"{count} different starts in {_STARTS} seeds{again}")
        console.print(f"e.g. {next(iter(plays.values()))[0].actions[0]}")
    out.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(f"{task}: {task_goal(task)}", _rows(env, plays)).save(out)
    console.print(f"look at {out}: can you tell from the images what the task is, and how much of it is done?")
    env.close()
    return EXIT_DONE


@contextmanager
def _violations_named(task: str, env: Env, when: str = "") -> Iterator[None]:
    """Converts a violation of the contract into a UsageError that says where the env is defined."""
    try:
        yield
    except AssertionError as error:
        source = env.source_class
        raise UsageError(
            f"{task}{when} breaks the env contract: {error}", f"mend {source.__name__}: {place_of(source)}"
        ) from error


def check_contract(task: str, config: EnvConfig, seed: int, episodes: Sequence[Episode]) -> None:
    """Checks the contract of a task's kind; envs in steps from all starts, with scenes from play.

    Raises:
        UsageError: the env breaks the contract; says how, and where the env is defined.
    """
    env = make_env(task, config, seed)
    kind = next(kind for kind in (StepEnv, TurnEnv, ChunkEnv) if isinstance(env, kind))
    starts: Any = [{"start": start} for start in ("fixed", "near", "random")] if kind is StepEnv else [{}]
    for start in starts:
        # the contract covers the time limit, which a full episode takes long to reach
        length = min(_SHORT_EPISODE.get(kind, config.episode_steps), config.episode_steps)
        short = replace(config, **start, episode_steps=length)
        env, twin = (make_env(task, short, seed) for _ in range(2))
        try:
            with _violations_named(task, env, f" with start {start['start']}" if start else ""):
                assert env.goal == task_goal(task) or kind is not StepEnv, "the env's goal phrase is the task's"
                if kind is StepEnv:
                    scenes = different_looks(env, np.concatenate([episode.snapshots for episode in episodes]), count=4)
                    # an image that never changes teaches nothing, whatever the reward
                    assert len(scenes) > 1, "play and random starts change the image, at 64 pixels"
                    check_step_env(env, twin, scenes)
                elif kind is TurnEnv:
                    check_turn_env(env, twin)
                else:
                    check_chunk_env(env, twin, num_chunks=3)
                    _check_continues(task, config, episodes)
        finally:
            env.close()
            twin.close()


def _check_continues(task: str, config: Any, episodes: Sequence[Episode]) -> None:
    """Raises AssertionError unless a solved chunk episode continues to its limit with `continue_after_success`: an end
    at success would reveal the truth to a judge.
    """
    solved = next((episode.seed for episode in episodes if episode.is_success), None)
    if solved is None:
        return
    env = make_env(task, replace(config, continue_after_success=True), solved)
    played = players(env)["script"](solved)
    env.close()
    is_whole = played is None or not played.is_success or len(played.rewards) == config.episode_steps
    assert is_whole, "with env.continue_after_success an episode goes on after its success, to its time limit"


def list_tasks(which: str = "") -> int:
    """Prints tasks with their goals, and returns the exit code.

    Args:
        which: a family or a task; empty for all tasks, with one line per family.

    Raises:
        UsageError: there is no such family or task.
    """
    console = QuietConsole(soft_wrap=True)
    families = task_families()
    members = {f"{family}/NAME": names for family, names in families.items()}
    if which in families:
        shown = [*([which] if which in task_names() else []), *families[which]]
    elif which:
        shown = [full_name(which)]
    else:
        shown = [*(name for name in task_names() if "/" not in name), *members]
    width = max(map(len, shown))
    for name in shown:
        first = members.get(name, [name])[0]
        count = f"{len(members[name])} tasks, e.g. {first}: " if name in members else ""
        console.print(Text.assemble((f"{name:<{width}}", "bold"), f"  {count}{task_goal(first)}"))
    if not which:
        console.print("all of a family, with their goals: rlvlm check-task FAMILY --list")
    return EXIT_DONE


def _findings(env: Env, episodes: Sequence[Episode]) -> str:
    """Returns the results of a player in words."""
    returns = np.array([episode.rewards.sum() for episode in episodes])
    reached = [float(episode.progress.max()) for episode in episodes]
    wins = sum(episode.is_success for episode in episodes)
    snapshots = np.concatenate([episode.snapshots for episode in episodes])
    looks = len(np.unique(env.image_key(snapshots), axis=0))
    success = f"success in {wins} of {len(episodes)}" if env.has_success else "success is not defined"
    return (
        f"{success}, return above 0 in {int((returns > 0).sum())}, mean return {returns.mean():.4g}, mean length "
        f"{np.mean([len(episode.rewards) for episode in episodes]):.1f}, progress up to {max(reached):.2f} (mean "
        f"{np.mean(reached):.2f}); {looks} different images in {len(snapshots)} moments"
    )


def _drawing_costs(env: Env, snapshots: FloatArray) -> str:
    costs = []
    for size_px in (None,) if isinstance(env, TurnEnv) else (64, 300):
        env.draw_sized(snapshots[:1], size_px)  # opens the renderer
        began = time.process_time()
        env.draw_sized(snapshots, size_px)
        size = "" if size_px is None else f" of {size_px} pixels"
        costs.append(f"{(time.process_time() - began) / len(snapshots) * 1e3:.2g} ms an image{size}")
    return ", ".join(costs)


def _rows(env: Env, plays: Plays) -> list[Row]:
    """Returns rows with episodes of each player; for envs in steps also scenes by progress, and starts."""

    def row(title: str, snapshots: FloatArray, labels: Sequence[str], camera: str = "") -> Row:
        return Row(title=title, images=env.draw_sized(snapshots, IMAGE_PX, camera), labels=tuple(labels))

    rows = []
    for name, episodes in plays.items():
        best = max(episodes, key=lambda episode: float(episode.progress.max()))
        for episode in episodes[:_ROWS] if isinstance(env, TurnEnv) else [best]:
            moments = np.unique(np.linspace(0, len(episode.snapshots) - 1, COLUMNS).astype(int))
            labels = [f"step {moment}, progress {episode.progress[moment]:.2f}" for moment in moments]
            for camera in getattr(env, "cameras", ("",)):
                # the goal is shown if it differs from episode to episode
                asked = f": {episode.goal}" if episode.goal != env.goal else ""
                title = f"{name}, seed {episode.seed}" + (f", {camera}" if camera else "") + asked
                rows.append(row(title, episode.snapshots[moments], labels, camera))
    if isinstance(env, StepEnv):
        everything = [episode for episodes in plays.values() for episode in episodes]
        spread, progress = spread_of_progress(everything, COLUMNS)
        rows.append(row("least to most progress met", spread, [f"progress {value:.2f}" for value in progress]))
        for start in ("fixed start", "random start"):
            some = next((some[:COLUMNS] for name, some in plays.items() if name.startswith(start)), [])
            firsts = np.stack([episode.snapshots[0] for episode in some])
            rows.append(row(start, firsts, [f"seed {episode.seed}" for episode in some]))
    return rows


def spread_of_progress(episodes: Sequence[Episode], count: int) -> tuple[FloatArray, FloatArray]:
    """Returns up to `count` scenes whose progress is spread evenly between the lowest and the highest reached.

    Returns:
        snapshots [N, S] and progress [N], ascending.
    """
    snapshots = np.concatenate([episode.snapshots for episode in episodes])
    progress = np.concatenate([episode.progress for episode in episodes])
    wanted = np.linspace(progress.min(), progress.max(), count)
    # equal scenes are shown once, so a sheet may have fewer images than columns
    nearest = np.unique(np.abs(progress[None] - wanted[:, None]).argmin(axis=1))
    chosen = nearest[np.argsort(progress[nearest], kind="stable")]
    return snapshots[chosen], progress[chosen]


def different_looks(env: StepEnv, snapshots: FloatArray, count: int) -> FloatArray:
    """Returns up to `count` of `snapshots` [N, S], N >= 1, that are far apart and look different at 64 pixels."""
    keys = env.image_key(snapshots).astype(float)
    chosen, looks = [0], {env.draw(snapshots[:1], 64).tobytes()}
    distance = np.abs(keys - keys[0]).sum(axis=1)
    while len(chosen) < count and distance.max() > 0:
        # greedy k-centre: each next scene is the one furthest from all chosen ones
        furthest = int(distance.argmax())
        look = env.draw(snapshots[furthest : furthest + 1], 64).tobytes()
        if look not in looks:
            chosen.append(furthest)
            looks.add(look)
        distance = np.minimum(distance, np.abs(keys - keys[furthest]).sum(axis=1))
    return snapshots[np.array(chosen)]
