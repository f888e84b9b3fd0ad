"""Tries a task in turns: its contract, what it costs, how far random play and its expert get, and a contact sheet."""

import time
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console

from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.core.steps import Frames
from rlvlm.demonstrations.collect import play
from rlvlm.demonstrations.players import Player, RandomPlayer, ScriptedExpert
from rlvlm.demonstrations.records import EpisodeRecord
from rlvlm.envs.contracts.turns import check_turn_env
from rlvlm.envs.registry import make_env, task_env, task_goal
from rlvlm.envs.turn_env import TurnEnv
from rlvlm.reports.task.check import COLUMNS, PICTURE_PX, Row, contact_sheet

_CONTRACT = "docs/policies.md says how an env in turns is made, and rlvlm/envs/turn_env.py what it promises"
_FIRST_ROWS = 3
"""Episodes of each player on the sheet."""


def check_turn_task(task: str, out: Path, num_episodes: int, seed: int) -> int:
    """Checks a task in turns, prints what was found, writes the sheet, and returns the exit code.

    Args:
        task: a name of the registry, or `package.module:NAME`.
        out: the image to write.
        num_episodes: of each player; >= 1.
        seed: of the first episode; the others follow.

    Raises:
        UsageError: there is no such task, or it breaks a promise of `TurnEnv`.
    """
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(f"{task}: {task_goal(task)}", style="bold")
    env, twin = (make_env(task, task_env(task), seed) for _ in range(2))
    try:
        check_turn_env(env, twin)
    except AssertionError as error:
        raise UsageError(f"{task} breaks a promise of its env: {error}", _CONTRACT) from error
    console.print("keeps every promise of an env in turns")
    console.print(f"{'prompt':<12} {env.reset(seed=seed)[0].prompt}")
    players: list[Player] = [RandomPlayer(), *([ScriptedExpert()] if env.has_expert else [])]
    rows = []
    for player in players:
        started = time.process_time()
        played = [play(env, player, task, seed + n) for n in range(num_episodes)]
        cost_ms = (time.process_time() - started) / sum(len(record.steps) + 1 for record, _ in played) * 1e3
        console.print(
            f"{player.name:<12} {_findings([record for record, _ in played])}; {cost_ms:.2g} ms a turn, drawn"
        )
        console.print(f"{'':<12} e.g. {played[0][0].steps[0].text}")
        rows += [_row(env, record, frames) for record, frames in played[:_FIRST_ROWS]]
    out.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(f"{task}: {task_goal(task)}", rows).save(out)
    console.print(f"look at {out}: can you read off the images what the player has to know?")
    return EXIT_DONE


def _findings(records: list[EpisodeRecord]) -> str:
    wins, turns = sum(record.success for record in records), [len(record.steps) for record in records]
    returns = np.array([record.env_return for record in records])
    looks = set().union(*(record.digests() for record in records))
    return (
        f"success in {wins} of {len(records)}, return above 0 in {int((returns > 0).sum())}, mean return "
        f"{returns.mean():.4g}, mean length {np.mean(turns):.1f}; {len(looks)} different images in {sum(turns)} turns"
    )


def _row(env: TurnEnv, record: EpisodeRecord, frames: Frames) -> Row:
    """An episode, shown at the turns that a row has room for."""
    turns = np.unique(np.linspace(0, len(record.steps), COLUMNS).astype(int))
    height, width = env.picture_px
    size = (round(width * PICTURE_PX / height), PICTURE_PX)
    small = np.stack([np.asarray(Image.fromarray(frames[turn]).resize(size, Image.Resampling.BOX)) for turn in turns])
    labels = [
        f"{turn}: {record.steps[turn].action or 'unreadable'}"
        if turn < len(record.steps)
        else f"return {record.env_return:g}"
        for turn in turns
    ]
    return Row(title=f"{record.player}, seed {record.seed}", images=small, labels=tuple(labels))
