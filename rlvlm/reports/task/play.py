"""Play of a task, at random and by its script, to have scenes to look at."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray
from rlvlm.envs.step_env import StepEnv

HOLD = 0.9
"""Probability that a random action is kept for one more step: who goes on reaches further than who trembles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """What was seen of one episode of T steps."""

    seed: int
    snapshots: FloatArray
    """[T + 1, S], the start first."""
    progress: FloatArray
    """[T + 1]."""
    rewards: FloatArray
    """[T] true rewards."""
    is_success: bool
    """Whether the task was done at any step."""


def play_randomly(env: StepEnv, seed: int) -> Episode:
    """One episode of random actions, each held for ten steps on average."""
    rng = np.random.default_rng(seed)
    action = rng.uniform(-1, 1, env.action_space.shape)

    def wander(_: FloatArray) -> NDArray[np.floating]:
        nonlocal action
        if rng.random() >= HOLD:
            action = rng.uniform(-1, 1, env.action_space.shape)
        return action

    return _play(env, seed, wander)


def play_by_script(env: StepEnv, seed: int) -> Episode | None:
    """One episode of the world's own script; None where it has none."""
    obs, _ = env.reset(seed=seed)
    if env.scripted_action(obs) is None:
        return None
    return _play(env, seed, lambda obs: np.asarray(env.scripted_action(obs)))


def _play(env: StepEnv, seed: int, choose: Callable[[FloatArray], NDArray[np.floating]]) -> Episode:
    """One episode of what `choose` answers to observations, clipped to what is allowed."""
    obs, info = env.reset(seed=seed)
    infos, rewards, is_over = [info], [], False
    while not is_over:
        action = np.clip(choose(obs), -1, 1).astype(np.float32)
        obs, reward, is_terminated, is_truncated, info = env.step(action)
        is_over = is_terminated or is_truncated
        infos.append(info)
        rewards.append(reward)
    return Episode(
        seed=seed,
        snapshots=np.stack([info["snapshot"] for info in infos]),
        progress=np.array([info["progress"] for info in infos], np.float32),
        rewards=np.array(rewards, np.float32),
        is_success=any(info["success"] for info in infos),
    )


def spread_of_progress(episodes: Sequence[Episode], count: int) -> tuple[FloatArray, FloatArray]:
    """Up to `count` scenes whose progress is spread evenly from the least to the most that was reached.

    Returns:
        snapshots [N, S] and progress [N], ascending.
    """
    snapshots = np.concatenate([episode.snapshots for episode in episodes])
    progress = np.concatenate([episode.progress for episode in episodes])
    wanted = np.linspace(progress.min(), progress.max(), count)
    nearest = np.unique(np.abs(progress[None] - wanted[:, None]).argmin(axis=1))
    chosen = nearest[np.argsort(progress[nearest], kind="stable")]
    return snapshots[chosen], progress[chosen]


def different_looks(env: StepEnv, snapshots: FloatArray, count: int) -> FloatArray:
    """Up to `count` of `snapshots` [N, S], N >= 1, that lie far from one another and look different at 64 pixels."""
    keys = env.image_key(snapshots).astype(float)
    chosen, looks = [0], {env.draw(snapshots[:1], 64).tobytes()}
    distance = np.abs(keys - keys[0]).sum(axis=1)
    while len(chosen) < count and distance.max() > 0:
        furthest = int(distance.argmax())
        look = env.draw(snapshots[furthest : furthest + 1], 64).tobytes()
        if look not in looks:
            chosen.append(furthest)
            looks.add(look)
        distance = np.minimum(distance, np.abs(keys - keys[furthest]).sum(axis=1))
    return snapshots[np.array(chosen)]
