"""Plays episodes of an env in turns into a folder of demonstrations."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rlvlm.demonstrations.folder import DemonstrationFolder
from rlvlm.demonstrations.players import Player
from rlvlm.demonstrations.records import EpisodeRecord, StepRecord
from rlvlm.envs.turn_env import TurnEnv
from rlvlm.labels.images import image_digest

FIRST_SEED = 2**33
"""Demonstrations start from seeds from here on, which neither training nor evaluation uses."""
Rating = Callable[[NDArray[np.uint8], str, NDArray[np.uint8]], float | None]
"""Scores a step in [0, 1] by the image before it, the reply, and the image after it."""


def collect(
    env: TurnEnv,
    player: Player,
    folder: DemonstrationFolder,
    episodes: int,
    seed: int,
    keeps_pictures: bool = True,
    rate: Rating | None = None,
) -> int:
    """Plays until the folder has `episodes` episodes of this player from this seed on, and returns how many were new.

    Args:
        env: of the folder's task.
        player: plays; what it writes is kept as it is.
        folder: what is there already is not played again, so that a collection that was stopped goes on.
        episodes: wanted in all.
        seed: of the collection, 0 to 999; episode i starts from `FIRST_SEED + 10**7 * seed + i`.
        keeps_pictures: whether each turn's image is written beside its snapshot; chat formats need them.
        rate: a judge of steps, where there is one.

    Raises:
        ValueError: the seed is out of range.
        OSError: the disk refused.
    """
    if not 0 <= seed < 1_000 or not 0 <= episodes <= 10**7:
        raise ValueError(f"0 <= seed < 1000 and 0 <= episodes <= 10 million are wanted, got {seed} and {episodes}")
    known = {record.id for record in folder.episodes()}
    num_new = 0
    for start in range(FIRST_SEED + 10**7 * seed, FIRST_SEED + 10**7 * seed + episodes):
        if f"{player.name}-{start}" not in known:
            record, frames = play(env, player, folder.task, start, rate is not None or keeps_pictures)
            if rate is not None:
                record = _rated(record, frames, rate)
            folder.add(record if keeps_pictures else _without_pictures(record), frames if keeps_pictures else ())
            num_new += 1
    return num_new


def play(
    env: TurnEnv, player: Player, task: str, seed: int, draws: bool = True
) -> tuple[EpisodeRecord, NDArray[np.uint8]]:
    """One whole episode, and its images [T + 1, H, W, 3]; none where `draws` is False."""
    turn, _ = env.reset(seed=seed)
    player.begin(seed)
    snapshots, goal = [turn.snapshot], env.goal
    steps: list[StepRecord] = []
    terminated = truncated = False
    while not (terminated or truncated):
        prompt, written = turn.prompt, player.reply(env, turn)
        action = env.read(written.text).action
        turn, reward, terminated, truncated, info = env.step(written.text)
        snapshots.append(turn.snapshot)
        steps.append(
            StepRecord(
                prompt=prompt,
                text=written.text,
                action=None if action is None else env.action_names[action],
                env_reward=reward,
                success=info["success"],
                progress=info["progress"],
                is_noise=written.is_noise,
            )
        )
    shots = np.stack(snapshots)
    frames = env.draw(shots) if draws else np.empty((0, *env.picture_px, 3), np.uint8)
    record = EpisodeRecord(
        id=f"{player.name}-{seed}",
        task=task,
        kind="turns",
        seed=seed,
        player=player.name,
        goal=goal,
        env_return=float(sum(step.env_reward for step in steps)),
        success=steps[-1].success,
        terminated=terminated,
        steps=tuple(steps),
        arrays={"snapshots": shots},
    )
    return (_with_pictures(record, frames) if draws else record), frames


def _with_pictures(record: EpisodeRecord, frames: NDArray[np.uint8]) -> EpisodeRecord:
    *before, last = (image_digest(frame) for frame in frames)
    steps = tuple(replace(step, pictures=(digest,)) for step, digest in zip(record.steps, before, strict=True))
    return replace(record, steps=steps, last_pictures=(last,))


def _without_pictures(record: EpisodeRecord) -> EpisodeRecord:
    return replace(record, steps=tuple(replace(step, pictures=()) for step in record.steps), last_pictures=())


def _rated(record: EpisodeRecord, frames: NDArray[np.uint8], rate: Rating) -> EpisodeRecord:
    """The record with a judge's score of every step."""
    scores = [rate(frames[t], step.text, frames[t + 1]) for t, step in enumerate(record.steps)]
    steps = tuple(replace(step, quality=score) for step, score in zip(record.steps, scores, strict=True))
    return replace(record, steps=steps)
