"""Plays LIBERO's tasks for the pocket video judge: `python -m rlvlm.pocket.video.play --out FILE`.

The tasks' script plays, with more or less noise, and now and then with a gripper that lets go and never closes again,
so that it misses things or drops them. Training and evaluation begin from different saved starts.
"""

import gc
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tyro

from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.chunk_env import FIRST_HELD_OUT_STATE, ChunkEnv
from rlvlm.envs.libero.expert import OPEN
from rlvlm.envs.libero.scene import LiberoScene, shared_scene
from rlvlm.envs.registry import make_env, task_env
from rlvlm.pocket.policy.model import PICTURE_PX
from rlvlm.pocket.video import TASKS
from rlvlm.pocket.video.dataset import MOMENTS, Clips

_LOGGER = logging.getLogger(__name__)
_NOISES, _P_NOISES = (0.02, 0.1, 0.2, 0.6), (0.4, 0.2, 0.1, 0.3)
_EPISODE_STEPS = 144
_P_LETS_GO = 0.4
_LETS_GO = 12
"""The last chunk from which on a gripper may stay open; most things are where they should be by then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayConfig:
    """What is played."""

    out: Path
    """File of the clips."""
    tasks: tuple[str, ...] = TASKS
    """Of LIBERO, each of which asks for one thing in or on another."""
    episodes: int = 60
    """Of each task."""
    held_out: bool = False
    """Whether they begin from the starts that are kept for evaluation."""
    moved: float = 0.02
    """Things are shifted by up to so many metres."""


def play(config: PlayConfig) -> Clips:
    """The episodes of all tasks."""
    first = FIRST_HELD_OUT_STATE if config.held_out else 0
    rng = np.random.default_rng((first, len(config.tasks)))
    played: list[tuple[Frames, dict[str, FloatArray], bool]] = []
    targets: set[str] = set()
    instructions: list[str] = []
    for task in config.tasks:
        suite, _, number = task.partition("/")
        env = replace(task_env(task), moved=config.moved, physics="fast", episode_steps=_EPISODE_STEPS)
        world, scene = make_env(task, env, 0), shared_scene(suite, int(number), env.mesh_cell)
        played += [_episode(world, scene, first + index, rng) for index in range(config.episodes)]
        targets.add(scene.goals[0][2])
        instructions += [scene.instruction] * config.episodes
        _LOGGER.info("%s: %d of %d succeeded", task, sum(one[2] for one in played[-config.episodes :]), config.episodes)
        world.close()
        del world, scene
        gc.collect()  # a compiled task is hundreds of megabytes, and refers to itself
    things = tuple(sorted({name for _, places, _ in played for name in places}))
    nowhere = np.full((MOMENTS, 3), np.nan, np.float32)
    return Clips(
        frames=np.stack([frames for frames, *_ in played]),
        places=np.stack([np.stack([places.get(name, nowhere) for name in things], 1) for _, places, _ in played]),
        things=things,
        targets=tuple(sorted(targets)),
        tasks=tuple(task for task in config.tasks for _ in range(config.episodes)),
        instructions=tuple(instructions),
        success=np.array([success for *_, success in played]),
    )


def _episode(
    world: ChunkEnv, scene: LiberoScene, state_id: int, rng: np.random.Generator
) -> tuple[Frames, dict[str, FloatArray], bool]:
    """Frames of `MOMENTS` moments, where each thing and the place it is wanted at was, and whether it succeeded."""
    noise = float(rng.choice(_NOISES, p=_P_NOISES))
    lets_go = int(rng.integers(_LETS_GO)) if rng.random() < _P_LETS_GO else _EPISODE_STEPS
    things = sorted({*scene.env.objects_dict, *scene.named})

    def places() -> FloatArray:
        return np.stack([scene.place_of(name) for name in things]).astype(np.float32)

    obs, info = world.reset(options={"state_id": state_id})
    snapshots, found, is_over = [obs.snapshots[0]], [places()], False
    while not is_over:
        chunk = world.scripted_chunk(noise, rng)
        assert chunk is not None, "these tasks have a script"
        if len(found) > lets_go:
            chunk[:, -1] = OPEN
        obs, _, terminated, truncated, info = world.step(chunk)
        snapshots.append(obs.snapshots[0])
        found.append(places())
        is_over = terminated or truncated
    moments = np.linspace(0, len(snapshots) - 1, MOMENTS).round().astype(int)
    seen = np.stack(found)[moments]
    return (
        world.draw(np.stack(snapshots)[moments], PICTURE_PX),
        {name: seen[:, place] for place, name in enumerate(things)},
        bool(info["success"]),
    )


def main() -> None:
    """Reads the command line, plays and writes."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    config = tyro.cli(PlayConfig, description=__doc__)
    play(config).save(config.out)


if __name__ == "__main__":
    main()
