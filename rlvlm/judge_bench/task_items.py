"""Makes all items of a task: from episodes played in a simulator, or from recorded ones."""

import hashlib
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.demonstrations.playing import Episode, Style, play, player_of, reward_ranks
from rlvlm.demonstrations.trajectory import CorruptEpisode, RobotTrajectory
from rlvlm.envs.config import ChunkEnvConfig, EnvConfig
from rlvlm.envs.env import FIRST_HELD_OUT_STATE, ChunkEnv, Env, TurnEnv
from rlvlm.envs.pixels import PixelEnv
from rlvlm.envs.registry import make_env, task_families, task_goal
from rlvlm.judge_bench.attempts import attempt_items, line_items
from rlvlm.judge_bench.controls import pair_controls, retests, score_controls
from rlvlm.judge_bench.hacked import HackedEpisode
from rlvlm.judge_bench.items import (
    HACKED,
    Draw,
    Item,
    TaskItems,
    clip_pairs,
    draw_pairs,
    track_items,
    turn_items,
    video_items,
)
from rlvlm.judge_bench.suites import VERSION, Suite
from rlvlm.judges.prompts import OTHER_GOAL

logger = logging.getLogger(__name__)

FIRST_SEED = 2**34
"""First seed of the episodes if seeds may be any number: no run and no training of a small model uses these."""
_DRAWS = 1
"""Seed of the draws: they stay the same if only controls are added, and so do all other items."""
_AFTER_SUCCESS = 3
"""Steps for which an episode continues after its success."""
_STYLES = (
    lambda u: Style(),
    lambda u: Style(noise=0.2 + 0.6 * u),
    lambda u: Style(extent=0.1 + 0.8 * u),
    lambda u: Style(extent=-1.0),
    lambda u: Style(extent=0.1 + 0.8 * u, rests=True),
    lambda u: Style(noise=0.3, extent=0.5 * u),
)
"""Styles in which episodes are played, in turn; u is uniform in [0, 1)."""
_RECORDED_MOMENTS = 40
"""Maximum number of moments taken from a recorded episode."""
_LOOKS = 6
"""Number of small images kept per task."""
_FIELDS = 4
BY_REWARD = "the env gives no info['progress']: an image's truth is the rank of the true reward that led to it"
"""Note of the bench on such an env."""


def make_items(suite: Suite, task: str, config: EnvConfig, size_px: int, seed: int, asks_turns: bool) -> TaskItems:
    """Returns the items of one task of a suite.

    Args:
        suite: sets the number of items.
        task: name of the task.
        config: config of its env; `task_env(task)` unless a judge sees it otherwise.
        size_px: side length of the images; envs in turns have their own.
        seed: seed of play and draws.
        asks_turns: whether single turns are scored instead of episodes.

    Raises:
        UsageError: there is no such task.
        MachineError: the machine cannot draw the task.
    """
    env = make_env(task, config, seed)
    rng = np.random.default_rng((_DRAWS, seed, zlib.crc32(task.encode())))  # a separate stream for each task
    episodes, note = _play(env, suite, seed, rng), ""
    if not env.has_progress:
        episodes, note = _by_reward(episodes), BY_REWARD
    # pairs need only a truth that differs; scores need successes among other cases
    known = episodes if any(episode.is_success for episode in episodes) else []
    elsewhere = next((goal for other in suite.tasks if (goal := task_goal(other)) != task_goal(task)), OTHER_GOAL)
    shared = [task_goal(other) for other in task_families().get(task.partition("/")[0], ()) if suite.shares_scenes]
    cameras = getattr(env, "cameras", ())[1:2]

    items = _image_items(suite, env.image_key, episodes, elsewhere, rng)
    scored = turn_items(env, known, 2 * suite.videos, rng) if asks_turns else video_items(known, suite.videos)

    def goals_of(item: Item) -> list[str]:
        return [*env.goals_in_view(item.sides[0][-1]), *shared]  # of something that nobody sees the answer is easy

    items += [*scored, *score_controls(scored, len(items), suite.controls, elsewhere, goals_of)]
    items += retests(items, 2 * suite.controls, cameras, env.is_symmetric, rng)
    # without a success they have nothing to score below
    hacked = suite.hacked if known else ()
    items += [_hacked_item(env, episode) for episode in hacked if bool(episode.action) == asks_turns]
    if known and not asks_turns:  # last, so that all other items stay as they are
        played = attempt_items(env, known, suite.attempts, seed, suite.start) + _line_items(
            task, config, suite.line, seed
        )
        items += [replace(item, goal=suite.goal or item.goal) for item in played]
    size = None if isinstance(env, TurnEnv) else size_px  # turns are drawn as their policies see them
    made = _task_items(task, items, lambda snapshots, camera: env.draw_sized(snapshots, size, camera), env.close)
    return replace(made, note=note, paint=env.draw_path if env.draws_path else None)


def _line_items(task: str, config: EnvConfig, count: int, seed: int) -> list[Item]:
    if not count:
        return []
    if isinstance(config, ChunkEnvConfig):  # or nothing would be seen beyond the success
        config = replace(config, continue_after_success=True)
    with closing(make_env(task, config, seed)) as env:
        return line_items(env, count, seed)


def _hacked_item(env: Env, episode: HackedEpisode) -> Item:
    """Returns the item of an episode that has fooled a judge.

    Raises:
        UsageError: the env cannot draw the episode.
    """
    if episode.snapshots.shape[1] != env.snapshot_size or isinstance(env, PixelEnv):
        sizes = f"{env.snapshot_size} numbers, and a hacked episode has {episode.snapshots.shape[1]}"
        raise UsageError(
            f"the env draws states of {sizes}",
            "harvest it from a run of this task, of an env that can draw its past again",
        )
    return Item(
        kind="turn" if episode.action else "video",
        case=HACKED,
        goal=episode.goal,
        sides=(episode.snapshots,),
        truth=(episode.progress,),
        action=episode.action,
    )


def recorded_items(
    suite: Suite, task: str, recordings: Iterable[RobotTrajectory | CorruptEpisode], size_px: int, seed: int
) -> TaskItems:
    """Returns the items of recorded episodes with known success, which no simulator can play.

    Their progress is unknown: in a success the share of its time stands for it, and failures are in no pair. For a
    table of clips with labels, pairs show whole clips instead, and nothing is cut.

    Args:
        suite: sets the number of items.
        task: name for the recordings.
        recordings: read to the end; corrupt ones are left out, which the note reports.
        size_px: maximum side length to which images are reduced.
        seed: seed of the draws.

    Raises:
        UsageError: it is unknown which episodes succeeded.
    """
    rng = np.random.default_rng((_DRAWS, seed, zlib.crc32(task.encode())))
    films: list[RobotTrajectory] = []
    sizes: list[str] = []
    num_cameras: list[int] = []
    torn: list[str] = []
    for film in recordings:
        if isinstance(film, CorruptEpisode):
            torn.append(film.reason)
        elif not (suite.goal or film.instruction).strip():
            torn.append(f"{film.name}: its task is empty")
        elif len(film.actions) > 1:
            try:  # before a judge is asked, and paid, about the others
                cameras, height, width = film.images(np.array([0])).shape[1:4]
            except UsageError as error:
                torn.append(f"{film.name}: {error}")
                continue
            films.append(film)
            sizes.append(f"{width}x{height}")
            num_cameras.append(cameras)
    episodes = []
    for number, film in enumerate(films):
        is_success = film.known_success(suite.success)
        quality = float(is_success) if film.quality is None else film.quality
        steps = np.unique(np.linspace(0, len(film.actions) - 1, _RECORDED_MOMENTS).astype(int))
        episode = Episode(
            seed=number,
            snapshots=np.stack([np.full(len(steps), number), steps], axis=1).astype(np.float32),
            progress=np.linspace(0, 1, len(steps), dtype=np.float32) * np.float32(quality),
            rewards=np.zeros(len(steps) - 1, np.float32),
            is_success=is_success,
            goal=suite.goal or film.instruction,
            looked=tuple(range(len(steps))),
            successes=(*[False] * (len(steps) - 1), is_success),
        )
        episodes.append(episode)
    goals = sorted({episode.goal for episode in episodes})
    known = [episode for episode in episodes if episode.is_success]
    if not known:  # failures alone are uninformative: any low score would be right
        episodes = []

    if suite.is_table:
        pairs = clip_pairs(episodes, sizes, suite.pairs, rng)
        items = [*pairs, *track_items(known, suite.tracks, grows=True)]
        goals = []  # a table has many scenes, and the goal of another one is another task
    else:
        # a snapshot (episode, step) is its own key: no two moments of an episode count as one image
        items = _image_items(suite, lambda rows: rows.astype(np.int64), known, OTHER_GOAL, rng)
    scored = video_items(episodes, suite.videos, is_cut=not suite.is_table)
    items += [*scored, *score_controls(scored, len(items), suite.controls, OTHER_GOAL, lambda _: goals)]
    others = [f"#{place}" for place in range(1, min(num_cameras, default=1))]  # each changes only who looks
    items += retests(items, 2 * suite.controls, others, False, rng)
    if len(set(sizes)) > 1:  # images of one camera are drawn together, and have one size
        items = [replace(item, camera=f"{sizes[int(item.sides[0][0, 0])]}{item.camera}") for item in items]
    made = _task_items(task, items, partial(_draw_recorded, films, size_px))
    shown = "; ".join(torn[:3]).encode("ascii", "backslashreplace").decode()
    return replace(made, note=f"{len(torn)} recorded episodes are left out: {shown}"[:500] if torn else "")


def _draw_recorded(films: Sequence[RobotTrajectory], size_px: int, snapshots: FloatArray, camera: str) -> Frames:
    """Draws a camera's images of rows (episode, step): the first one's, or of another one that ends with `#PLACE`."""
    place = int(camera.partition("#")[2] or 0)
    rows = snapshots.astype(int)
    found: dict[tuple[int, int], Frames] = {}
    for number in np.unique(rows[:, 0]).tolist():
        steps = np.unique(rows[rows[:, 0] == number, 1])  # a film is read once, from beginning to end
        found |= zip([(number, step) for step in steps.tolist()], films[number].images(steps)[:, place], strict=True)
    return shrink(np.stack([found[number, step] for number, step in rows.tolist()]), size_px)


def shrink(frames: Frames, size_px: int) -> Frames:
    """Subsamples `frames` [N, H, W, 3] by whole rows and columns so that no side is longer than `size_px`."""
    scale = max(1, -(-max(frames.shape[1:3]) // size_px))
    return frames[:, ::scale, ::scale]


def _image_items(
    suite: Suite,
    image_key: Callable[[FloatArray], NDArray[np.int64]],
    known: Sequence[Episode],
    elsewhere: str,
    rng: np.random.Generator,
) -> list[Item]:
    """Returns pairs with their controls, and single images, of episodes `known` with progress at each moment."""
    pairs = draw_pairs(image_key, known, suite.pairs, rng)
    return [*pairs, *pair_controls(pairs, suite.controls, elsewhere, rng), *track_items(known, suite.tracks)]


def _task_items(task: str, items: Sequence[Item], draw: Draw, close: Callable[[], None] = lambda: None) -> TaskItems:
    """Returns all items of a task, with a digest and small images by which two machines are compared."""
    rows = [
        [item.kind, item.case, item.goal, item.action, item.camera, item.source, item.track, item.success]
        + [round(value, 2) for value in item.truth]
        + [[len(side), *np.round(side[[0, -1]].astype(float), 2).ravel().tolist()] for side in item.sides]
        for item in items
    ]
    # rounded, since machines differ in the last digits; only some turn tiny negative numbers into -0.0
    text = json.dumps([VERSION, task, rows]).replace("-0.0", "0.0")
    digest = hashlib.sha256(text.encode()).hexdigest()
    return TaskItems(task=task, items=tuple(items), draw=draw, digest=digest, looks=_looks(draw, items), close=close)


def _by_reward(episodes: Sequence[Episode]) -> list[Episode]:
    """Returns the episodes with the rank of true rewards among all played moments in place of progress.

    The start, to which no reward led, is not looked at.
    """
    met = np.sort(np.concatenate([episode.rewards for episode in episodes]))
    return [
        replace(
            episode,
            progress=reward_ranks(episode, met),
            looked=episode.looked[1:],
            successes=episode.successes[1:],
            is_success=any(episode.successes[1:]),
        )
        for episode in episodes
    ]


def _play(env: Env, suite: Suite, seed: int, rng: np.random.Generator) -> list[Episode]:
    """Plays the suite's episodes in all styles; at random if neither a script nor the suite's player plays."""
    # no state that a run or a small model has trained on, or the bench would measure memory
    first = (FIRST_HELD_OUT_STATE if isinstance(env, ChunkEnv) else FIRST_SEED) + 10_000 * seed
    found = []
    for number in range(suite.episodes):
        style = _STYLES[number % len(_STYLES)](rng.random())
        episode = None
        for manner in (style, Style(extent=-1.0)):
            chosen = player_of(env, first + number, manner, suite.player)
            if (episode := play(env, first + number, chosen, _AFTER_SUCCESS)) is not None:
                break
        assert episode is not None, "random play always answers"
        found.append(replace(episode, goal=suite.goal or episode.goal))
    return found


def _looks(draw: Draw, items: Sequence[Item]) -> tuple[tuple[int, ...], ...]:
    shown = [item for item in items if item.is_pair and item.case == "pair"][:_LOOKS] or items[:_LOOKS]
    if not shown:
        return ()
    found = []
    for item in shown:
        frame = draw(item.sides[0][-1:], item.camera)[0].mean(-1)  # [H, W]
        num = min(_FIELDS, *frame.shape)
        rows = np.array_split(frame, num, axis=0)
        found.append(tuple(int(field.mean().round()) for row in rows for field in np.array_split(row, num, axis=1)))
    return tuple(found)
