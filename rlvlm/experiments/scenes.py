"""Scenes for the pocket judge: episodes of rlvlm's tasks, drawn.

`rlvlm.judges.pocket.train` and `evaluate` take this provider by name, because judges may not see the envs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from metaworld.policies import SawyerDrawerOpenV3Policy

from rlvlm.envs.config import EnvConfig
from rlvlm.envs.registry import make_world
from rlvlm.envs.world import World
from rlvlm.judges.pocket.scenes import Scenes, Split
from rlvlm.types import FloatArray

PICTURE_PX = 300
"""As the preference loop draws for a judge."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setup:
    config: EnvConfig
    episodes: int
    max_pictures: int
    share: float


_SETUPS = (
    _Setup(config=EnvConfig(), episodes=60, max_pictures=1600, share=0.6),
    _Setup(config=EnvConfig(start="random"), episodes=72, max_pictures=900, share=0.2),
    _Setup(config=EnvConfig(robot="visible"), episodes=24, max_pictures=450, share=0.1),
    _Setup(config=EnvConfig(start="random", robot="visible"), episodes=48, max_pictures=450, share=0.1),
)


def drawer_open(split: Split, seed: int) -> list[Scenes]:
    """Returns drawer_open in its four set-ups, the paper's first; the splits' episodes have different seeds."""
    first_seed = 100_000 * (2 * seed + (split == "held_out"))
    return [_collect(setup, first_seed + 10_000 * number, split) for number, setup in enumerate(_SETUPS)]


def _collect(setup: _Setup, seed: int, split: Split) -> Scenes:
    """Plays the episodes of one set-up and draws its distinct pictures, evenly spread over progress."""
    world = make_world("drawer_open", setup.config, seed)
    rng = np.random.default_rng(seed)
    shrink = 1 if split == "train" else 2
    played = [pair for episode in range(setup.episodes // shrink) for pair in _play(world, seed + episode, rng)]
    snapshots = np.stack([snapshot for snapshot, _ in played])
    progress = np.array([value for _, value in played], np.float32)
    _, first, frames = np.unique(world.picture_key(snapshots), axis=0, return_index=True, return_inverse=True)
    kept = _spread(progress[first], setup.max_pictures // shrink, rng)
    renumbered = np.full(len(first), -1)
    renumbered[kept] = np.arange(len(kept))
    shown = renumbered[frames.ravel()]
    pictures = world.draw(snapshots[first[kept]], PICTURE_PX)
    world.close()
    return Scenes(
        name=f"drawer_open, robot {setup.config.robot}, {setup.config.start} start",
        goal=world.goal,
        phrase="the drawer is {percent}% open",
        pictures=pictures,
        progress=progress[first[kept]],
        frames=shown[shown >= 0],
        share=setup.share,
    )


def _play(world: World, seed: int, rng: np.random.Generator) -> Iterator[tuple[FloatArray, float]]:
    """Yields snapshot and progress of every step of one episode.

    A noisy scripted policy opens the drawer to a random extent, then holds still or moves at random; some episodes move
    at random from the start.
    """
    policy = SawyerDrawerOpenV3Policy()
    obs, info = world.reset(seed=seed)
    noise, extent = rng.uniform(0.0, 0.8), rng.uniform(0.0, 1.1)
    holds, is_loose, done = rng.random() < 0.5, rng.random() < 0.15, False
    while not done:
        is_loose = is_loose or info["progress"] >= extent
        if is_loose:
            action = np.zeros(4) if holds else rng.uniform(-1, 1, 4)
        else:
            action = policy.get_action(obs.astype(np.float64)) + noise * rng.standard_normal(4)
        obs, _, _, done, info = world.step(np.clip(action, -1, 1).astype(np.float32))
        yield info["snapshot"], info["progress"]


def _spread(progress: FloatArray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns at most `count` indices whose progress is as even as the supply allows."""
    if len(progress) <= count:
        return np.arange(len(progress))
    bins = np.clip((progress * 50).astype(int), 0, 49)
    crowd = np.bincount(bins, minlength=50)[bins]
    chosen = rng.choice(len(progress), size=count, replace=False, p=(1 / crowd) / (1 / crowd).sum())
    return np.sort(chosen)
