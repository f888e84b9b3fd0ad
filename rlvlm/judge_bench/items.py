"""Questions to a judge with the simulator's answer: pairs by difficulty, single images, episodes, and turns of played
episodes. Images stay references: snapshots, which are drawn when they are asked about.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray, Frames
from rlvlm.demonstrations.playing import Episode
from rlvlm.envs.env import Env, TurnEnv

NUM_BINS = 10
"""Number of difficulty bins: equal parts of the gap in true progress; the first has the hardest pairs."""
MIN_GAP = 0.02
"""Gap in progress below which pairs are not asked about: the sides cannot be told apart."""
TRACK_IMAGES = 8
"""Number of images of a straight episode that are scored one by one."""
_NEAR = 0.5
"""Final progress from which a failure is a near miss."""

Kind = Literal["pair", "image", "video", "turn"]
CASES = ("success", "near miss", "failure", "cut short")
"""Cases of an episode that is shown as a video."""
HACKED = "hacked"
"""Case of an episode by which a policy has fooled a judge."""
Draw = Callable[[FloatArray, str], Frames]
"""Draws images [N, H, W, 3] of snapshots [N, S], by the camera of that name; the first camera if it is empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One question: two sides to compare, or one to score."""

    kind: Kind
    case: str
    """`pair`; one of `CASES`; `nearer` or `farther` for a turn; `track` for an image; or the name of the control."""
    goal: str
    """Goal in the question."""
    sides: tuple[FloatArray, ...]
    """One or two sides [L, S], each in order of time."""
    paths: tuple[FloatArray, ...] = ()
    """For each side, the moments [P, S] of its episode up to its last; empty if the sides have them all."""
    truth: tuple[float, ...]
    """Simulator's progress at the end of each side, in [0, 1]; 0 if the goal is not the scene's own."""
    progress: tuple[float, ...] = ()
    """For an episode, the simulator's progress at each of its L images; empty for others."""
    success: bool = False
    """For a score, whether the goal is reached at the end; for a turn, whether it came nearer to the goal."""
    source: int = -1
    """For a control or retest, the index of its original item; -1 for others."""
    track: int = -1
    """For an image, the index of its episode; -1 for others."""
    action: str = ""
    """Action of a turn; empty for others."""
    camera: str = ""
    change: str = ""
    """Change to the images, a key of `changes.CHANGES` or `noise`; empty for none."""

    def side_path(self, side: int) -> FloatArray:
        """Returns the [P, S] moments along which the hand's path may be drawn on the last image of a side."""
        return (self.paths or self.sides)[side]

    @property
    def is_pair(self) -> bool:
        """Whether two sides are compared, as opposed to one that is scored."""
        return self.kind == "pair"

    @property
    def is_image(self) -> bool:
        """Whether a single image is scored."""
        return self.kind == "image"

    @property
    def is_video(self) -> bool:
        """Whether a whole episode is scored."""
        return self.kind == "video"

    @property
    def is_motion(self) -> bool:
        """Whether a scored side shows what happens, a video or a turn, as opposed to a single image."""
        return self.kind in ("video", "turn")

    @property
    def gap(self) -> float:
        """For a pair, progress of the right side minus that of the left."""
        return self.truth[1] - self.truth[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskItems:
    """All items of one task, and the functions that draw them."""

    task: str
    items: tuple[Item, ...]
    draw: Draw
    digest: str
    """SHA-256 of the questions, with numbers rounded to a hundredth."""
    looks: tuple[tuple[int, ...], ...]
    """Mean grey levels of 4 x 4 fields of a few images, to compare the images of two machines."""
    close: Callable[[], None] = lambda: None
    paint: Callable[[NDArray[np.uint8], FloatArray, str], NDArray[np.uint8]] | None = None
    """Draws the hand's path through moments [P, S] on a camera's image [H, W, 3]; None if judges are not shown it."""
    note: str = ""
    """Substitute for the truth if the env measures no progress; else empty."""

    def draw_side(self, item: Item, side: int, shown: FloatArray) -> Frames:
        """Returns the images [L, H, W, 3] of moments `shown` [L, S] of a side, up to its last, as shown to a judge."""
        frames = self.draw(shown, item.camera)
        if self.paint:
            frames[-1] = self.paint(frames[-1], item.side_path(side), item.camera)
        return frames

    def closed(self) -> "TaskItems":
        """Returns the items without the env, which takes a hundred megabytes: nothing can be drawn any more."""

        def refuse(snapshots: FloatArray, camera: str) -> Frames:
            raise AssertionError("the env is closed: draw while the task is asked about")

        self.close()
        return replace(self, draw=refuse, close=lambda: None)


def draw_pairs(
    image_key: Callable[[FloatArray], NDArray[np.int64]],
    episodes: Sequence[Episode],
    count: int,
    rng: np.random.Generator,
) -> list[Item]:
    """Draws pairs of different images of one goal, spread as evenly over the difficulty bins as play allows."""
    goals = sorted({episode.goal for episode in episodes})
    pairs: list[Item] = []
    for place, goal in enumerate(goals):
        own = [episode for episode in episodes if episode.goal == goal]
        snapshots = np.concatenate([episode.snapshots[list(episode.looked)] for episode in own])
        whence = [(episode, moment) for episode in own for moment in episode.looked]
        progress = np.concatenate([episode.progress[list(episode.looked)] for episode in own])
        # by drawn image: two states that look alike may differ in progress, and no judge could rank them
        _, first = np.unique(image_key(snapshots), axis=0, return_index=True)
        snapshots, progress = snapshots[first], progress[first]
        wanted = (place + 1) * count // len(goals) - place * count // len(goals)
        for _ in range(4):  # if progress comes in leaps, some gaps do not exist, and others are drawn instead
            # one from each bin in turn, at a random position in it, with the nearer side left or right at random
            sizes = (np.arange(wanted) % NUM_BINS + rng.random(wanted)) / NUM_BINS
            drawn = draw_gap_pairs(progress, (sizes * rng.choice([-1, 1], wanted)).astype(np.float32), rng)
            for left, right in drawn:
                if abs(progress[right] - progress[left]) >= MIN_GAP:
                    sides = (snapshots[[left]], snapshots[[right]])
                    truth = (float(progress[left]), float(progress[right]))
                    origins = [whence[first[side]] for side in (left, right)]
                    paths = tuple(episode.snapshots[: moment + 1] for episode, moment in origins)
                    pairs.append(Item(kind="pair", case="pair", goal=goal, sides=sides, paths=paths, truth=truth))
            wanted = (place + 1) * count // len(goals) - len(pairs)
            if wanted <= 0:
                break
    return pairs


def draw_gap_pairs(progress: FloatArray, gaps: FloatArray, rng: np.random.Generator) -> NDArray[np.int64]:
    """Returns [N, 2] indices of images whose `progress` differs by about `gaps` [N] in [-1, 1], right minus left.

    Images of exactly the same progress are drawn equally often, e.g. mirrored ones and those of a lost ball.
    """
    order = np.argsort(progress)
    ranked = progress[order]
    # left ends from which a step of `gap` stays within the observed range of progress
    low, high = ranked[0] - np.minimum(gaps, 0), ranked[-1] - np.maximum(gaps, 0)
    left_target = low + rng.random(len(gaps)) * np.maximum(high - low, 0)
    grain = 1.0 / len(ranked)  # noise of one rank, or the same few images would recur
    ends = [target + grain * rng.standard_normal(len(gaps)) for target in (left_target, left_target + gaps)]
    # the observed progress nearest to each end, and one of all images with exactly this progress
    met = [ranked[np.clip(np.searchsorted(ranked, end), 0, len(ranked) - 1)] for end in ends]
    ranks = [
        rng.integers(np.searchsorted(ranked, value), np.searchsorted(ranked, value, side="right")) for value in met
    ]
    return np.stack([order[rank] for rank in ranks], axis=1)


def clip_pairs(episodes: Sequence[Episode], sizes: Sequence[str], count: int, rng: np.random.Generator) -> list[Item]:
    """Draws up to `count` pairs of whole clips of one goal and image size that differ in progress."""
    pairs: list[Item] = []
    by_goal: dict[tuple[str, str], list[Episode]] = {}
    for episode, size in zip(episodes, sizes, strict=False):
        by_goal.setdefault((episode.goal, size), []).append(episode)
    drawn: set[tuple[int, int]] = set()
    several = [own for own in by_goal.values() if len({float(episode.progress[-1]) for episode in own}) > 1]
    # goals take turns, so that a goal with a thousand clips does not take all pairs
    for turn in range(20 * count if several else 0):
        own = several[turn % len(several)]
        left, right = (own[place] for place in rng.choice(len(own), 2, replace=False))
        is_new = (min(left.seed, right.seed), max(left.seed, right.seed)) not in drawn
        if is_new and left.progress[-1] != right.progress[-1]:
            drawn.add((min(left.seed, right.seed), max(left.seed, right.seed)))
            sides, truth = (left.snapshots, right.snapshots), (float(left.progress[-1]), float(right.progress[-1]))
            pairs.append(Item(kind="pair", case="pair", goal=left.goal, sides=sides, truth=truth))
        if len(pairs) == count:
            break
    return pairs


def track_items(episodes: Sequence[Episode], count: int, *, grows: bool = False) -> list[Item]:
    """Returns images of successes, from the start to the first moment of success; clips up to them if it `grows`."""
    items = []
    for number, episode in enumerate([episode for episode in episodes if episode.is_success][:count]):
        # moments after the success are successes too, and have no order
        looked = np.array(episode.looked)[: episode.successes.index(True) + 1]
        for place in np.unique(np.linspace(0, len(looked) - 1, TRACK_IMAGES).round().astype(int)):
            moment = looked[place]
            item = Item(
                kind="image",
                case="track",
                goal=episode.goal,
                sides=(episode.snapshots[looked[: place + 1] if grows else [moment]],),
                paths=() if grows else (episode.snapshots[: moment + 1],),
                truth=(float(episode.progress[moment]),),
                success=episode.successes[place],
                track=number,
            )
            items.append(item)
    return items


def video_items(episodes: Sequence[Episode], count: int, *, is_cut: bool = True) -> list[Item]:
    """Returns up to `count` items of each of `CASES`; those missing from play are cut from successes if `is_cut`."""
    found: dict[str, list[Item]] = {case: [] for case in CASES}

    def add(case: str, episode: Episode, last: int) -> None:
        """Adds the episode up to its `last` looked moment."""
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
        elif not episode.is_success:  # an episode with an undone success is neither
            add("near miss" if episode.progress[-1] >= _NEAR else "failure", episode, last)
    for episode in episodes if is_cut else ():
        if not episode.is_success:
            continue
        first = episode.successes.index(True)
        looked = episode.progress[list(episode.looked)][:first]
        if first > 1:
            add("cut short", episode, first // 2)
        # the last moment that is near but no success yet: the hardest failure to recognise
        near = np.flatnonzero((looked >= _NEAR) & (looked < 0.95))
        if len(near):
            add("near miss", episode, int(near[-1]))
    return [item for items in found.values() for item in items]


def turn_items(env: Env, episodes: Sequence[Episode], count: int, rng: np.random.Generator) -> list[Item]:
    """Returns up to `count` turns or chunks that came nearer to the goal, and as many that led away from it."""

    def name_of(reply: str) -> str:
        assert isinstance(env, TurnEnv), "others have no replies"
        action = env.read(reply).action
        return "" if action is None else env.action_names[action]

    found: dict[bool, list[Item]] = {True: [], False: []}
    for episode in episodes:
        for number, (before, after) in enumerate(zip(episode.looked, episode.looked[1:], strict=False)):
            gain = float(episode.progress[after] - episode.progress[before])
            if gain:  # a turn without change is neither useful nor harmful
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
