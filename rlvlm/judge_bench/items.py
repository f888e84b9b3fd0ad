"""What a judge is asked, with the answer that the simulator knows: pairs by difficulty, single images, episodes, turns,
and controls. Images stay references: snapshots, which are drawn when they are asked about.
"""

import hashlib
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.demonstrations.playing import Episode, Style, play, player_of
from rlvlm.demonstrations.trajectory import CorruptEpisode, RobotTrajectory
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.env import FIRST_HELD_OUT_STATE, ChunkEnv, Env, TurnEnv
from rlvlm.envs.pixels import PixelEnv
from rlvlm.envs.registry import make_env, task_families, task_goal
from rlvlm.judge_bench.hacked import HackedEpisode
from rlvlm.judge_bench.suites import VERSION, Suite
from rlvlm.judges.prompts import OTHER_GOAL

logger = logging.getLogger(__name__)

NUM_BINS = 10
"""Difficulty bins: equal parts of the gap in true progress; the first has the hardest pairs."""
LEAST_GAP = 0.02
"""Pairs whose progress differs by less are not asked about: the sides cannot be told apart."""
TRACK_IMAGES = 8
"""Images of a straight episode that are scored one by one."""
FIRST_SEED = 2**34
"""First seed of the episodes where seeds may be any number: no run and no training of a small model uses these."""
_DRAWS = 1
"""Seed of the random numbers: they stay the same where only controls are added, and with them all other items."""
_AFTER_SUCCESS = 3
"""Steps for which an episode goes on after it was a success."""
_STYLES = (
    lambda u: Style(),
    lambda u: Style(noise=0.2 + 0.6 * u),
    lambda u: Style(extent=0.1 + 0.8 * u),
    lambda u: Style(extent=-1.0),
    lambda u: Style(extent=0.1 + 0.8 * u, rests=True),
    lambda u: Style(noise=0.3, extent=0.5 * u),
)
"""How episodes are played, by turns; u is drawn evenly from [0, 1)."""
_RECORDED_MOMENTS = 40
"""Most moments that are taken of a recorded episode."""
REWORDED = "your task: "
"""Stands in front of a goal that is put in other words: it fits any goal of a user's own."""
_NEAR = 0.5
"""A failure that ends with so much progress is a near miss."""

Kind = Literal["pair", "image", "video", "turn"]
CASES = ("success", "near miss", "failure", "cut short")
"""Cases of an episode that is shown as a video."""
HACKED = "hacked"
"""An episode that a policy has fooled a judge with."""
FAILURES = ("reversed", "undone", "other task", "other goal", "still", "noise")
"""Controls of a score that must not be called a success: the success backwards, to its end and back to its start, under
the instruction of another task, under another goal of the same scene, its first image alone, and noise in place of
images. Besides there is `jump`, the first image until the last, which is the success's own: it was not played so, but
the goal is reached in it."""
RETESTS = ("brighter", "shifted", "reworded", "other camera")
"""Changes that leave the truth as it is: a little more light (of a pair on the farther side alone), a shift by a few
pixels, the goal in other words, and another camera where there is one."""
Draw = Callable[[FloatArray, str], Frames]
"""Images [N, H, W, 3] of snapshots [N, S], by a camera of that name; the first camera where it is empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One question: two sides that are compared, or one that is scored."""

    kind: Kind
    case: str
    """`pair`; one of `CASES`; of a turn `nearer` or `farther`; of an image `track`; or the control that it is."""
    goal: str
    """The goal that the judge is asked about."""
    sides: tuple[FloatArray, ...]
    """One or two of [L, S], in order of time."""
    truth: tuple[float, ...]
    """The simulator's progress of each side at its end, in [0, 1]; 0 where the goal is not the scene's own."""
    progress: tuple[float, ...] = ()
    """For an episode, the simulator's progress at each of its L images; empty for others."""
    success: bool = False
    """For a score, whether the goal is reached at the end; for a turn, whether it came nearer to it."""
    source: int = -1
    """For a control or retest, the index of the item that it was made of; -1 for others."""
    track: int = -1
    """For an image, the episode that it is of; -1 for others."""
    action: str = ""
    """The action of a turn; empty for others."""
    camera: str = ""
    change: str = ""
    """What is done to the images, a key of `changes.CHANGES`; empty for nothing."""

    @property
    def gap(self) -> float:
        """For a pair, progress of the right side minus that of the left."""
        return self.truth[1] - self.truth[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskItems:
    """All items of one task, and who draws them."""

    task: str
    items: tuple[Item, ...]
    draw: Draw
    digest: str
    """SHA-256 of what is asked, numbers rounded to a hundredth."""
    looks: tuple[tuple[int, ...], ...]
    """Mean grey levels of 4 x 4 fields of a few images, by which two machines' images are compared."""
    close: Callable[[], None] = lambda: None
    note: str = ""
    """What stands for the truth where the env measures no progress; empty where it does."""

    def closed(self) -> "TaskItems":
        """The same without the env, which takes a hundred megabytes: nothing is drawn any more."""

        def refuse(snapshots: FloatArray, camera: str) -> Frames:
            raise AssertionError("the env is closed: draw while the task is asked about")

        self.close()
        return replace(self, draw=refuse, close=lambda: None)


def make_items(suite: Suite, task: str, config: EnvConfig, size_px: int, seed: int, asks_turns: bool) -> TaskItems:
    """The items of one task of a suite.

    Args:
        suite: how many.
        task: which.
        config: of its env; `task_env(task)` unless a judge sees it otherwise.
        size_px: side of the images; envs in turns have their own.
        seed: of play and draws.
        asks_turns: whether single turns are scored in place of episodes.

    Raises:
        UsageError: there is no such task.
        MachineError: the machine cannot draw it.
    """
    env = make_env(task, config, seed)
    rng = np.random.default_rng((_DRAWS, seed, zlib.crc32(task.encode())))  # apart for each task
    episodes, note = _play(env, suite, seed, rng), ""
    if not env.has_progress:
        episodes, note = _by_reward(episodes), BY_REWARD
    # pairs need only a truth that differs; scores need a success to be told from the rest
    known = episodes if any(episode.is_success for episode in episodes) else []
    elsewhere = next((goal for other in suite.tasks if (goal := task_goal(other)) != task_goal(task)), OTHER_GOAL)
    goals = list(getattr(env, "instructions", ()))
    if suite.shares_scenes:
        goals += [task_goal(other) for other in task_families().get(task.partition("/")[0], ())]
    cameras = getattr(env, "cameras", ())[1:2]

    items = _image_items(suite, env.image_key, episodes, elsewhere, rng)
    scored = _turns(env, known, 2 * suite.videos, rng) if asks_turns else _videos(known, suite.videos)
    items += [*scored, *_score_controls(scored, len(items), suite.controls, elsewhere, goals)]
    items += _retests(items, 2 * suite.controls, cameras, rng)
    # without a success there is nothing that they should score below
    hacked = suite.hacked if known else ()
    items += [_hacked_item(env, episode) for episode in hacked if bool(episode.action) == asks_turns]
    size = None if isinstance(env, TurnEnv) else size_px  # turns are drawn as their policies see them
    made = _task_items(task, items, lambda snapshots, camera: env.draw_sized(snapshots, size, camera), env.close)
    return replace(made, note=note)


def _hacked_item(env: Env[Any, Any], episode: HackedEpisode) -> Item:
    """What is asked of an episode that has fooled a judge.

    Raises:
        UsageError: the env cannot draw it again.
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
    """The items of recorded episodes whose success is known, which no simulator can play.

    Their progress is unknown: for a success the share of its time stands for it, and failures are in no pair.

    Args:
        suite: how many.
        task: a name for them.
        recordings: read to the end; torn ones are left out.
        size_px: images are made so small that no side is longer.
        seed: of the draws.

    Raises:
        UsageError: nothing says which episodes succeeded.
    """
    rng = np.random.default_rng((_DRAWS, seed, zlib.crc32(task.encode())))
    films = [film for film in recordings if isinstance(film, RobotTrajectory) and len(film.actions) > 1]
    films = list(filter(_has_images, films))  # before a judge is asked, and paid, about the others
    episodes = []
    for number, film in enumerate(films):
        is_success = film.known_success(suite.success)
        steps = np.unique(np.linspace(0, len(film.actions) - 1, _RECORDED_MOMENTS).astype(int))
        episode = Episode(
            seed=number,
            snapshots=np.stack([np.full(len(steps), number), steps], axis=1).astype(np.float32),
            progress=np.linspace(0, 1, len(steps), dtype=np.float32) * is_success,
            rewards=np.zeros(len(steps) - 1, np.float32),
            is_success=is_success,
            goal=suite.goal or film.instruction,
            looked=tuple(range(len(steps))),
            successes=(*[False] * (len(steps) - 1), is_success),
        )
        episodes.append(episode)
    goals = sorted({episode.goal for episode in episodes})
    known = [episode for episode in episodes if episode.is_success]
    if not known:  # failures alone say nothing: any low score would be right
        episodes = []

    # a snapshot (episode, step) is its own key: no two moments of a film are taken for one image
    items = _image_items(suite, lambda rows: rows.astype(np.int64), known, OTHER_GOAL, rng)
    scored = _videos(episodes, suite.videos)
    items += [*scored, *_score_controls(scored, len(items), suite.controls, OTHER_GOAL, goals)]
    items += _retests(items, 2 * suite.controls, (), rng)
    return _task_items(task, items, partial(_draw_recorded, films, size_px))


def _has_images(film: RobotTrajectory) -> bool:
    try:
        film.images(np.array([0]))
    except UsageError as error:
        logger.warning("episode %s is left out: %s", film.name, error)
        return False
    return True


def _draw_recorded(films: Sequence[RobotTrajectory], size_px: int, snapshots: FloatArray, _: str) -> Frames:
    """The first camera's images of rows (episode, step)."""
    rows = snapshots.astype(int)
    found: dict[tuple[int, int], Frames] = {}
    for number in np.unique(rows[:, 0]).tolist():
        steps = np.unique(rows[rows[:, 0] == number, 1])  # a film is read once, from its beginning to its end
        found |= zip([(number, step) for step in steps.tolist()], films[number].images(steps)[:, 0], strict=True)
    return shrink(np.stack([found[number, step] for number, step in rows.tolist()]), size_px)


def shrink(frames: Frames, size_px: int) -> Frames:
    """Images of `frames` [N, H, W, 3] with so many rows and columns left out that no side is longer than `size_px`."""
    scale = max(1, -(-max(frames.shape[1:3]) // size_px))
    return frames[:, ::scale, ::scale]


def _image_items(
    suite: Suite,
    image_key: Callable[[FloatArray], NDArray[np.int64]],
    known: Sequence[Episode],
    elsewhere: str,
    rng: np.random.Generator,
) -> list[Item]:
    """Pairs with their controls and single images; of `known`, whose progress is known at each moment."""
    pairs = _pairs(image_key, known, suite.pairs, rng)
    return [*pairs, *_pair_controls(pairs, suite.controls, elsewhere, rng), *_tracks(known, suite.tracks)]


def _task_items(task: str, items: Sequence[Item], draw: Draw, close: Callable[[], None] = lambda: None) -> TaskItems:
    """All items of a task, with what two machines compare them by."""
    rows = [
        [item.kind, item.case, item.goal, item.action, item.camera, item.source, item.track, item.success]
        + [round(value, 2) for value in item.truth]
        + [[len(side), *np.round(side[[0, -1]].astype(float), 2).ravel().tolist()] for side in item.sides]
        for item in items
    ]
    # rounded, since machines differ in the last digits; a tiny negative number becomes -0.0 on some of them alone
    text = json.dumps([VERSION, task, rows]).replace("-0.0", "0.0")
    digest = hashlib.sha256(text.encode()).hexdigest()
    return TaskItems(task=task, items=tuple(items), draw=draw, digest=digest, looks=_looks(draw, items), close=close)


BY_REWARD = "the env gives no info['progress']: an image's truth is the rank of the true reward that led to it"
"""The bench's note on such an env."""


def _by_reward(episodes: Sequence[Episode]) -> list[Episode]:
    """The same with the rank of true rewards, as a share of all moments played, in place of progress. No reward led to
    the start, which is not looked at.
    """
    from scipy.stats import rankdata  # takes half a second

    rewards = np.concatenate([episode.rewards for episode in episodes])
    # ranks and not values: one bonus at the end would make all other rewards look alike
    ranks = ((rankdata(rewards) - 1) / max(len(rewards) - 1, 1)).astype(np.float32)
    parts = np.split(ranks, np.cumsum([len(episode.rewards) for episode in episodes])[:-1])
    return [
        replace(
            episode,
            progress=np.concatenate([part[:1], part]),
            looked=episode.looked[1:],
            successes=episode.successes[1:],
            is_success=any(episode.successes[1:]),
        )
        for episode, part in zip(episodes, parts, strict=True)
    ]


def _play(env: Env[Any, Any], suite: Suite, seed: int, rng: np.random.Generator) -> list[Episode]:
    """The suite's episodes in all styles; at random where neither a script nor the suite's player plays."""
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


def _pairs(
    image_key: Callable[[FloatArray], NDArray[np.int64]],
    episodes: Sequence[Episode],
    count: int,
    rng: np.random.Generator,
) -> list[Item]:
    """Pairs of different images of one goal, spread evenly over the bins of difficulty as far as play reaches."""
    goals = sorted({episode.goal for episode in episodes})
    pairs: list[Item] = []
    for place, goal in enumerate(goals):
        own = [episode for episode in episodes if episode.goal == goal]
        snapshots = np.concatenate([episode.snapshots[list(episode.looked)] for episode in own])
        progress = np.concatenate([episode.progress[list(episode.looked)] for episode in own])
        # by what is drawn: two states that look alike may differ in progress, and no judge could rank them
        _, first = np.unique(image_key(snapshots), axis=0, return_index=True)
        snapshots, progress = snapshots[first], progress[first]
        wanted = (place + 1) * count // len(goals) - place * count // len(goals)
        for _ in range(4):  # where progress comes in leaps, some gaps do not exist and others are drawn in their place
            # one from each bin in turn, at a random place in it, with the nearer side left or right by chance
            sizes = (np.arange(wanted) % NUM_BINS + rng.random(wanted)) / NUM_BINS
            drawn = draw_gap_pairs(progress, (sizes * rng.choice([-1, 1], wanted)).astype(np.float32), rng)
            for left, right in drawn:
                if abs(progress[right] - progress[left]) >= LEAST_GAP:
                    sides = (snapshots[[left]], snapshots[[right]])
                    truth = (float(progress[left]), float(progress[right]))
                    pairs.append(Item(kind="pair", case="pair", goal=goal, sides=sides, truth=truth))
            wanted = (place + 1) * count // len(goals) - len(pairs)
            if wanted <= 0:
                break
    return pairs


def draw_gap_pairs(progress: FloatArray, gaps: FloatArray, rng: np.random.Generator) -> NDArray[np.int64]:
    """[N, 2] images whose `progress` differs by about `gaps` [N] in [-1, 1], right minus left.

    Images of one and the same progress are drawn equally often, e.g. mirrored ones and those of a lost ball.
    """
    order = np.argsort(progress)
    ranked = progress[order]
    # left ends from which a step of `gap` stays within the range of progress that was met
    low, high = ranked[0] - np.minimum(gaps, 0), ranked[-1] - np.maximum(gaps, 0)
    left_target = low + rng.random(len(gaps)) * np.maximum(high - low, 0)
    grain = 1.0 / len(ranked)  # noise of one rank, or the same few images would be met again and again
    ends = [target + grain * rng.standard_normal(len(gaps)) for target in (left_target, left_target + gaps)]
    # the progress that was met next to each end, and one of all images that have just this
    met = [ranked[np.clip(np.searchsorted(ranked, end), 0, len(ranked) - 1)] for end in ends]
    ranks = [
        rng.integers(np.searchsorted(ranked, value), np.searchsorted(ranked, value, side="right")) for value in met
    ]
    return np.stack([order[rank] for rank in ranks], axis=1)


def _pair_controls(pairs: Sequence[Item], count: int, elsewhere: str, rng: np.random.Generator) -> list[Item]:
    """One image twice, pairs under the instruction of another task, and pairs whose nearer side has faded."""
    if not pairs:
        return []
    # twice as many under another instruction: only those whose own label is decided count
    chosen = rng.permutation(len(pairs))[: 2 * count].tolist()
    twice = [
        replace(pairs[place], case="same image", sides=pairs[place].sides[:1] * 2, truth=pairs[place].truth[:1] * 2)
        for place in chosen[:count]
    ]
    others = [
        replace(pairs[place], case="other task", goal=elsewhere, truth=(0.0, 0.0), source=place) for place in chosen
    ]
    faded = [replace(pairs[place], case="faded", change="faded", source=place) for place in chosen]
    return [*twice, *others, *faded]


def _tracks(episodes: Sequence[Episode], count: int) -> list[Item]:
    """Images of successes, from the start to the first moment of success."""
    items = []
    for number, episode in enumerate([episode for episode in episodes if episode.is_success][:count]):
        # what comes after the success is a success too, and has no order
        looked = np.array(episode.looked)[: episode.successes.index(True) + 1]
        for place in np.unique(np.linspace(0, len(looked) - 1, TRACK_IMAGES).round().astype(int)):
            moment = looked[place]
            item = Item(
                kind="image",
                case="track",
                goal=episode.goal,
                sides=(episode.snapshots[[moment]],),
                truth=(float(episode.progress[moment]),),
                success=episode.successes[place],
                track=number,
            )
            items.append(item)
    return items


def _videos(episodes: Sequence[Episode], count: int) -> list[Item]:
    """Up to `count` of each of `CASES`; those that play does not give are cut from successes."""
    found: dict[str, list[Item]] = {case: [] for case in CASES}

    def add(case: str, episode: Episode, last: int) -> None:
        """The episode up to the `last` of its looked moments."""
        moments = np.array(episode.looked)[: last + 1]
        if len(found[case]) < count:
            item = Item(
                kind="video",
                case=case,
                goal=episode.goal,
                sides=(episode.snapshots[moments],),
                truth=(float(episode.progress[moments[-1]]),),
                progress=tuple(episode.progress[moments].tolist()),
                success=episode.successes[last],
            )
            found[case].append(item)

    for episode in episodes:
        last = len(episode.looked) - 1
        if episode.successes[last]:
            add("success", episode, last)
        elif not episode.is_success:  # one whose success was undone is neither
            add("near miss" if episode.progress[-1] >= _NEAR else "failure", episode, last)
    for episode in episodes:
        if not episode.is_success:
            continue
        first = episode.successes.index(True)
        looked = episode.progress[list(episode.looked)][:first]
        if first > 1:
            add("cut short", episode, first // 2)
        # the last moment that is near and no success yet: the hardest failure to recognise
        near = np.flatnonzero((looked >= _NEAR) & (looked < 0.95))
        if len(near):
            add("near miss", episode, int(near[-1]))
    return [item for items in found.values() for item in items]


def _turns(env: Env[Any, Any], episodes: Sequence[Episode], count: int, rng: np.random.Generator) -> list[Item]:
    """Up to `count` turns or chunks that came nearer to the goal, and as many that led away from it."""

    def name_of(reply: str) -> str:
        assert isinstance(env, TurnEnv), "others have no replies"
        action = env.read(reply).action
        return "" if action is None else env.action_names[action]

    found: dict[bool, list[Item]] = {True: [], False: []}
    for episode in episodes:
        for number, (before, after) in enumerate(zip(episode.looked, episode.looked[1:], strict=False)):
            gain = float(episode.progress[after] - episode.progress[before])
            if gain:  # a turn that changes nothing is neither useful nor harmful
                item = Item(
                    kind="turn",
                    case="nearer" if gain > 0 else "farther",
                    goal=episode.goal,
                    sides=(episode.snapshots[[before, after]],),
                    truth=(float(episode.progress[after]),),
                    success=gain > 0,
                    action=name_of(episode.actions[number]) if episode.actions else "",
                )
                found[gain > 0].append(item)
    chosen = [rng.permutation(len(items))[:count] for items in found.values()]
    return [items[place] for items, places in zip(found.values(), chosen, strict=True) for place in places]


def _score_controls(scored: Sequence[Item], begin: int, count: int, elsewhere: str, goals: Sequence[str]) -> list[Item]:
    """Controls made of the first `count` successes among `scored`, whose places begin at `begin`.

    Args:
        scored: turns or videos.
        begin: place of the first of them among the task's items.
        count: of the successes.
        elsewhere: the goal of another task.
        goals: of the same scene; the first that is not the item's own is taken.
    """
    controls: list[Item] = []
    for place, item in [(begin + place, item) for place, item in enumerate(scored) if item.success][:count]:
        (side,) = item.sides
        there, back = np.arange(len(side)), np.arange(len(side))[::-1]
        orders = {"reversed": back, "still": 0 * there}
        if len(side) > 2:  # a turn has two images
            orders |= {"jump": np.append(0 * there[1:], there[-1:]), "undone": np.append(there, back[1:])}
        made: dict[str, dict[str, Any]] = {
            case: {"sides": (side[order],), "progress": tuple(np.array(item.progress)[order]) if item.progress else ()}
            for case, order in orders.items()
        }
        made |= {"other task": {"goal": elsewhere}, "noise": {"change": "noise"}}
        if other := next((goal for goal in goals if goal != item.goal), ""):
            made["other goal"] = {"goal": other}
        controls += [
            replace(item, case=case, truth=(0.0,), success=False, source=place, **change)
            for case, change in made.items()
        ]
    return controls


def _retests(items: Sequence[Item], count: int, cameras: Sequence[str], rng: np.random.Generator) -> list[Item]:
    """All episodes or turns once more, and up to `count` pairs for each of `RETESTS`, each under one of these."""
    pairs = [index for index, item in enumerate(items) if item.case == "pair"]
    scored = [index for index, item in enumerate(items) if item.kind in ("video", "turn") and item.source < 0]
    changes: list[dict[str, Any]] = [
        {"case": "brighter", "change": "brighter"},
        {"case": "shifted", "change": "shifted"},
        {"case": "reworded"},
        *({"case": "other camera", "camera": camera} for camera in cameras),
    ]
    chosen = rng.permutation(pairs)[: count * len(changes)].tolist()
    found = []
    for indices in (chosen, scored):
        for number, index in enumerate(indices):
            change, item = changes[number % len(changes)], items[index]
            goal = f"{REWORDED}{item.goal}" if change["case"] == "reworded" else item.goal
            found.append(replace(item, goal=goal, source=index, **change))
    return found


_LOOKS = 6
"""Images per task that are kept in small."""
_FIELDS = 4


def _looks(draw: Draw, items: Sequence[Item]) -> tuple[tuple[int, ...], ...]:
    shown = [item for item in items if item.kind == "pair" and item.case == "pair"][:_LOOKS] or items[:_LOOKS]
    if not shown:
        return ()
    frames = draw(np.concatenate([item.sides[0][-1:] for item in shown]), "").mean(-1)  # [N, H, W]
    found = []
    for frame in frames:
        num = min(_FIELDS, *frame.shape)
        rows = np.array_split(frame, num, axis=0)
        found.append(tuple(int(field.mean().round()) for row in rows for field in np.array_split(row, num, axis=1)))
    return tuple(found)
