"""Tries a task in chunks: its contract, what it costs, how far random play and its script get, and a contact sheet."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from rlvlm.core.errors import EXIT_DONE, UsageError
from rlvlm.core.steps import FloatArray
from rlvlm.envs.chunk_env import ChunkEnv
from rlvlm.envs.contracts.chunks import check_chunk_env
from rlvlm.envs.registry import make_env, task_env, task_goal
from rlvlm.reports.task.check import COLUMNS, PICTURE_PX, Row, contact_sheet

_CONTRACT = "docs/vla.md says how an env in chunks is made, and rlvlm/envs/chunk_env.py what it promises"
_SHORT_EPISODE = 20
"""Env steps per episode while the contract is checked, so that it meets their end within a chunk."""
_NOISE = 0.02
"""Of the script's actions, as in a run's demonstrations."""

Player = Callable[[ChunkEnv, np.random.Generator], FloatArray | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """An episode, from its first moment to its last."""

    state_id: int
    snapshots: FloatArray
    """[T + 1, S]."""
    progress: float
    success: bool


def check_chunk_task(task: str, out: Path, num_episodes: int, seed: int) -> int:
    """Checks a task in chunks, prints what was found, writes the sheet, and returns the exit code.

    Args:
        task: a name of the registry, or `package.module:NAME`.
        out: the image to write.
        num_episodes: of each player; >= 1.
        seed: the first initial state; the others follow.

    Raises:
        UsageError: there is no such task, or it breaks a promise of `ChunkEnv`.
    """
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(f"{task}: {task_goal(task)}", style="bold")
    short = replace(task_env(task), episode_steps=_SHORT_EPISODE)
    try:
        check_chunk_env(make_env(task, short, seed), make_env(task, short, seed), num_chunks=3)
    except AssertionError as error:
        raise UsageError(f"{task} breaks a promise of its env: {error}", _CONTRACT) from error
    console.print("keeps every promise of an env in chunks")
    env: ChunkEnv = make_env(task, task_env(task), seed)
    players: dict[str, Player] = {"random": _random, "script": lambda env, rng: env.scripted_chunk(_NOISE, rng)}
    rows, rng = [], np.random.default_rng(seed)
    for name, player in players.items():
        started = time.process_time()
        episodes = [_play(env, player, state_id, rng) for state_id in range(seed, seed + num_episodes)]
        played = [episode for episode in episodes if episode is not None]
        if not played:
            console.print(f"{name:<12} there is none")
            continue
        steps = [len(episode.snapshots) - 1 for episode in played]
        speed = sum(steps) / (time.process_time() - started)
        console.print(
            f"{name:<12} success in {sum(episode.success for episode in played)} of {len(played)}, mean length "
            f"{np.mean(steps):.1f}, mean progress {np.mean([episode.progress for episode in played]):.2f}; "
            f"{speed:,.0f} env steps a second of one core"
        )
        rows += [_row(env, name, played[0], camera) for camera in env.cameras]
    out.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(f"{task}: {task_goal(task)}", rows).save(out)
    console.print(f"look at {out}: can you read off the images what the robot has to do, and whether it has done it?")
    env.close()
    return EXIT_DONE


def _random(env: ChunkEnv, rng: np.random.Generator) -> FloatArray:
    shape = (env.chunk_steps, len(env.action_low))
    return rng.uniform(env.action_low, env.action_high, shape).astype(np.float32)


def _play(env: ChunkEnv, player: Player, state_id: int, rng: np.random.Generator) -> Played | None:
    """One episode; None where the player does not play this env."""
    obs, info = env.reset(options={"state_id": state_id})
    trail, is_over = [obs.snapshots], False
    while not is_over:
        chunk = player(env, rng)
        if chunk is None:
            return None
        _, _, terminated, truncated, info = env.step(chunk)
        trail.append(info["snapshots"])
        is_over = terminated or truncated
    return Played(
        state_id=state_id,
        snapshots=np.concatenate(trail),
        progress=float(info["progress"]),
        success=bool(info["success"]),
    )


def _row(env: ChunkEnv, name: str, episode: Played, camera: str) -> Row:
    """An episode as one camera sees it, at the moments that a row has room for."""
    moments = np.unique(np.linspace(0, len(episode.snapshots) - 1, COLUMNS).astype(int))
    ending = "success" if episode.success else f"progress {episode.progress:.2f}"
    labels = [f"step {moment}" for moment in moments[:-1]] + [f"step {moments[-1]}, {ending}"]
    images = env.draw(episode.snapshots[moments], PICTURE_PX, camera)
    return Row(title=f"{name}, state {episode.state_id}, {camera}", images=images, labels=tuple(labels))
