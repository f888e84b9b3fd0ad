"""Tries a task: its contract, what it costs, how far play gets, and a contact sheet of its images."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console

from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.contracts.steps import check_step_env
from rlvlm.envs.registry import full_name, make_env, task_families, task_goal, task_names
from rlvlm.envs.step_env import StepEnv
from rlvlm.reports.task import play
from rlvlm.reports.task.play import Episode
from rlvlm.runs.recipes import recipe

Plays = dict[str, list[Episode]]
"""Episodes, at least one of each, by how they were played: `fixed start, random play` and the like."""

COLUMNS = 7
"""Images per row of the sheet."""
PICTURE_PX = 150
SHORT_EPISODE = 25
"""Steps per episode while the contract is checked, so that it meets their end."""
CONTRACT = "docs/tasks.md says what a task promises"
MARGIN_PX, TITLE_PX, LABEL_PX = 12, 26, 20
PAPER, INK, FAINT = (250, 250, 248), (38, 70, 83), (120, 132, 138)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Images that belong together."""

    title: str
    images: Frames
    """[N, H, W, 3], N >= 1, all rows of a sheet with the same H and W."""
    labels: tuple[str, ...]
    """N short texts, one below each image."""


def check_task(task: str, out: Path, num_episodes: int, seed: int) -> int:
    """Checks a task, prints what was found, writes the sheet, and returns the exit code.

    Args:
        task: a name of the registry, or `package.module:NAME`.
        out: the image to write.
        num_episodes: of each way to play, from each of the two starts; >= 1.
        seed: of the first episode; the others follow.

    Raises:
        UsageError: there is no such task, or it breaks a promise of `StepEnv`.
        MachineError: the machine cannot draw it.
    """
    config = recipe(task).env
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{task}[/bold]: {task_goal(task)}")
    plays = _play(task, config, num_episodes, seed)
    check_contract(task, config, seed, [episode for episodes in plays.values() for episode in episodes])
    console.print("keeps every promise of an env, from both starts")
    world = make_env(task, config, seed)
    if world.note:
        console.print(f"note: {world.note}")
    for name, text in _findings(world, plays).items():
        console.print(f"{name:<30} {text}")
    out.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(f"{task}: {task_goal(task)}", _rows(world, plays)).save(out)
    console.print(f"look at {out}: can you tell from the images how far the task is done?")
    return EXIT_DONE


def list_tasks(which: str = "") -> int:
    """Prints tasks with their goals, and returns the exit code.

    Args:
        which: a family or a task; without one all tasks, with one line for each family.

    Raises:
        UsageError: there is no such family or task.
    """
    console = Console(highlight=False, soft_wrap=True)
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
        console.print(f"[bold]{name:<{width}}[/bold]  {count}{task_goal(first)}")
    if not which:
        console.print("all of a family, with their goals: rlvlm check-task FAMILY --list")
    return EXIT_DONE


def check_contract(task: str, config: EnvConfig, seed: int, episodes: Sequence[Episode]) -> None:
    """Holds both starts of a task to the contract, with scenes that were met in play.

    Raises:
        UsageError: it breaks a promise; the message says which.
    """
    for start in ("fixed", "random"):
        short = replace(config, start=start, episode_steps=min(SHORT_EPISODE, config.episode_steps))
        world, twin = (make_env(task, short, seed) for _ in range(2))
        scenes = play.different_looks(world, np.concatenate([episode.snapshots for episode in episodes]), count=4)
        try:
            assert world.goal == task_goal(task), "the env's goal phrase is the task's"
            assert len(scenes) > 1, "play and random starts change the image, at 64 pixels"
            check_step_env(world, twin, scenes)
        except AssertionError as error:
            raise UsageError(f"{task} with start {start} breaks a promise of its env: {error}", CONTRACT) from error
        finally:
            world.close()
            twin.close()


def _play(task: str, config: EnvConfig, num_episodes: int, seed: int) -> Plays:
    """Random play from both starts, then scripted play where the env has a script."""
    plays: Plays = {}
    worlds = {start: make_env(task, replace(config, start=start), seed) for start in ("fixed", "random")}
    for start, world in worlds.items():
        plays[f"{start} start, random play"] = [play.play_randomly(world, seed + n) for n in range(num_episodes)]
    for start, world in worlds.items():
        scripted = [play.play_by_script(world, seed + n) for n in range(num_episodes)]
        plays[f"{start} start, its script"] = [episode for episode in scripted if episode is not None]
        world.close()
    return {name: episodes for name, episodes in plays.items() if episodes}


def _findings(world: StepEnv, plays: Plays) -> dict[str, str]:
    """Sizes, costs, and how far each way to play gets."""
    shapes = (world.observation_space.shape, world.action_space.shape)
    sizes = f"observation {shapes[0]}, action {shapes[1]}, snapshot ({world.snapshot_size},)"
    findings = {"sizes": sizes, "costs": _costs(world, next(iter(plays.values()))[0].snapshots)}
    for name, episodes in plays.items():
        reached = [episode.progress.max() for episode in episodes]
        returns = [episode.rewards.sum() for episode in episodes]
        wins = sum(episode.is_success for episode in episodes)
        snapshots = np.concatenate([episode.snapshots for episode in episodes])
        looks = len(np.unique(world.image_key(snapshots), axis=0))
        findings[name] = (
            f"progress up to {max(reached):.2f} (mean {np.mean(reached):.2f}), success in {wins} of {len(episodes)}, "
            f"mean return {np.mean(returns):.4g}; {looks} different images in {len(snapshots)} steps"
        )
    return findings


def _costs(world: StepEnv, snapshots: FloatArray) -> str:
    """Milliseconds of processor time per step and per image."""
    shape = world.action_space.shape
    costs = []
    world.reset(seed=0)
    started = time.process_time()
    for _ in range(len(snapshots) - 1):
        world.step(np.zeros(shape, np.float32))
    costs.append(f"{(time.process_time() - started) / (len(snapshots) - 1) * 1e3:.2g} ms a step")
    some = snapshots[:20]
    for size_px in (64, 300):
        world.draw(some[:1], size_px)  # opens the renderer
        started = time.process_time()
        world.draw(some, size_px)
        costs.append(f"{(time.process_time() - started) / len(some) * 1e3:.2g} ms an image of {size_px} pixels")
    return ", ".join(costs)


def _rows(world: StepEnv, plays: Plays) -> list[Row]:
    """One episode of each way to play, least to most progress of all, and starts."""

    def row(title: str, snapshots: FloatArray, labels: Sequence[str]) -> Row:
        return Row(title=title, images=world.draw(snapshots, PICTURE_PX), labels=tuple(labels))

    rows = []
    for name, episodes in plays.items():
        best = max(episodes, key=lambda episode: float(episode.progress.max()))
        steps = np.unique(np.linspace(0, len(best.snapshots) - 1, COLUMNS).astype(int))
        labels = [f"step {step}, progress {best.progress[step]:.2f}" for step in steps]
        rows.append(row(f"{name}, seed {best.seed}", best.snapshots[steps], labels))
    everything = [episode for episodes in plays.values() for episode in episodes]
    spread, progress = play.spread_of_progress(everything, COLUMNS)
    rows.append(row("least to most progress met", spread, [f"progress {value:.2f}" for value in progress]))
    for name, episodes in list(plays.items())[:2]:
        some = episodes[:COLUMNS]
        starts = np.stack([episode.snapshots[0] for episode in some])
        rows.append(row(name.partition(",")[0], starts, [f"seed {episode.seed}" for episode in some]))
    return rows


def contact_sheet(title: str, rows: Sequence[Row]) -> Image.Image:
    """The rows below one another under a title, as wide as the longest of them."""
    height, width = rows[0].images.shape[1:3]
    columns = max(len(row.images) for row in rows)
    row_px = TITLE_PX + height + LABEL_PX
    size = (MARGIN_PX + columns * (width + MARGIN_PX), TITLE_PX + MARGIN_PX + len(rows) * row_px + MARGIN_PX)
    page = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(page)
    large, small = ImageFont.load_default(size=16), ImageFont.load_default(size=12)
    draw.text((MARGIN_PX, MARGIN_PX // 2), title, fill=INK, font=large)
    for number, row in enumerate(rows):
        top = TITLE_PX + MARGIN_PX + number * row_px
        draw.text((MARGIN_PX, top + 6), row.title, fill=INK, font=small)
        for column, (image, label) in enumerate(zip(row.images, row.labels, strict=True)):
            left = MARGIN_PX + column * (width + MARGIN_PX)
            page.paste(Image.fromarray(np.ascontiguousarray(image)), (left, top + TITLE_PX))
            draw.text((left, top + TITLE_PX + height + 3), label, fill=FAINT, font=small)
    return page
