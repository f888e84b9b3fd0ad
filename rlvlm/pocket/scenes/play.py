"""Plays a task as its `TaskScenes` say and draws what an agent would meet, from random play to solved."""

from collections.abc import Callable, Iterator

import numpy as np

from rlvlm.core.steps import FloatArray
from rlvlm.envs.registry import make_env
from rlvlm.envs.step_env import StepEnv
from rlvlm.pocket.scenes.pairs import Scenes, Split
from rlvlm.pocket.scenes.tasks import Setup, TaskScenes

PICTURE_PX = 300
"""As the preference loop draws for a judge."""
_LONGEST_MOVE = 20
"""Steps that a random action is held, at most."""
_BINS = 50


def collect(task: TaskScenes, split: Split, seed: int) -> Iterator[Scenes]:
    """Yields the scenes of each set-up, the recipe's own first; the splits' episodes have different seeds."""
    first_seed = 100_000 * (2 * seed + (split == "held_out"))
    for number, setup in enumerate(task.setups):
        yield _collect(task, setup, first_seed + 10_000 * number, split)


def _collect(task: TaskScenes, setup: Setup, seed: int, split: Split) -> Scenes:
    """Plays the episodes of one set-up and draws distinct images: of frames met at random, and of all progress."""
    env = make_env(task.name, setup.config, seed)
    rng = np.random.default_rng(seed)
    shrink = 1 if split == "train" else 2
    played = [pair for episode in range(setup.episodes // shrink) for pair in _play(env, task, seed + episode, rng)]
    snapshots = np.stack([snapshot for snapshot, _ in played])
    progress = np.array([value for _, value in played], np.float32)
    _, first, looks = np.unique(env.image_key(snapshots), axis=0, return_index=True, return_inverse=True)
    count = setup.max_pictures // shrink
    met = rng.choice(looks.ravel(), size=min(len(looks), count // 2), replace=False)
    kept = np.union1d(met, _spread(progress[first], count - len(np.unique(met)), rng))
    images, progress = env.draw(snapshots[first[kept]], PICTURE_PX), progress[first[kept]]
    env.close()
    if split == "train":
        images = np.concatenate([images, *(np.flip(images, axes) for axes in task.mirrors)])
        progress = np.tile(progress, 1 + len(task.mirrors))
    return Scenes(
        task=task.name,
        name=setup.name,
        goal=env.goal,
        phrase=task.phrase,
        images=images,
        progress=progress,
        frames=np.searchsorted(kept, met),
        share=setup.share,
    )


def _play(env: StepEnv, task: TaskScenes, seed: int, rng: np.random.Generator) -> Iterator[tuple[FloatArray, float]]:
    """Yields snapshot and progress of every step of one episode.

    The task's skill, slowed down and with noise, goes on to a random extent, then holds still or moves at random; some
    episodes move at random from the start.
    """
    obs, info = env.reset(seed=seed)
    move_at_random = _random_mover(env, rng)
    noise, extent, pace = rng.uniform(0, task.max_noise), rng.uniform(0, 1.1), rng.uniform(*task.paces)
    is_aimless, holds = rng.random() < task.p_aimless, rng.random() < 0.5
    has_arrived = is_over = False
    while not is_over:
        has_arrived = has_arrived or info["progress"] >= extent
        if is_aimless or (has_arrived and not holds):
            action = move_at_random()
        elif has_arrived:
            action = np.zeros(env.action_space.shape or ())
        else:
            action = pace * task.skill(obs, info["snapshot"]) + noise * rng.standard_normal(env.action_space.shape)
        obs, _, terminated, truncated, info = env.step(np.clip(action, -1, 1).astype(np.float32))
        is_over = terminated or truncated
        yield info["snapshot"], info["progress"]


def _random_mover(env: StepEnv, rng: np.random.Generator) -> Callable[[], FloatArray]:
    """Returns a function that gives uniform actions, each held for up to as many steps as is drawn here once."""
    longest = int(rng.integers(1, _LONGEST_MOVE + 1))
    action, steps_left = np.zeros(env.action_space.shape or (), np.float32), 0

    def move() -> FloatArray:
        nonlocal action, steps_left
        if steps_left == 0:
            action, steps_left = rng.uniform(-1, 1, action.shape).astype(np.float32), int(rng.integers(1, longest + 1))
        steps_left -= 1
        return action

    return move


def _spread(progress: FloatArray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns at most `count` indices whose progress is as even as the supply allows."""
    if len(progress) <= count:
        return np.arange(len(progress))
    bins = np.clip((progress * _BINS).astype(int), 0, _BINS - 1)
    crowd = np.bincount(bins, minlength=_BINS)[bins]
    chosen = rng.choice(len(progress), size=count, replace=False, p=(1 / crowd) / (1 / crowd).sum())
    return np.sort(chosen)
