"""What a judge is asked, with the answer that the simulator knows: pairs by difficulty, single images, episodes and
turns of played episodes. Images stay references: snapshots, which are drawn when they are asked about.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray, Frames
from rlvlm.demonstrations.playing import Episode
from rlvlm.envs.env import Env, TurnEnv

NUM_BINS = 10
"""Difficulty bins: equal parts of the gap in true progress; the first has the hardest pairs."""
MIN_GAP = 0.02
"""Pairs whose progress differs by less are not asked about: the sides cannot be told apart."""
TRACK_IMAGES = 8
"""Images of a straight episode that are scored one by one."""
_NEAR = 0.5
"""A failure that ends with so much progress is a near miss."""

Kind = Literal["pair", "image", "video", "turn"]
CASES = ("success", "near miss", "failure", "cut short")
"""Cases of an episode that is shown as a video."""
HACKED = "hacked"
"""An episode that a policy has fooled a judge with."""
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
    paths: tuple[FloatArray, ...] = ()
    """For each side the moments of its episode up to its last, [P, S]; empty where the sides have them all."""
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

    def side_path(self, side: int) -> FloatArray:
        """[P, S] moments along which the path of the hand may be drawn on the last image of a side."""
        return (self.paths or self.sides)[side]

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
    paint: Callable[[NDArray[np.uint8], FloatArray, str], NDArray[np.uint8]] | None = None
    """Draws the hand's path through moments [P, S] on an image [H, W, 3] of a camera; None where judges see none."""
    note: str = ""
    """What stands for the truth where the env measures no progress; empty where it does."""

    def draw_side(self, item: Item, side: int, shown: FloatArray) -> Frames:
        """Images [L, H, W, 3] of moments `shown` [L, S] of a side, up to its last, as a judge sees them."""
        frames = self.draw(shown, item.camera)
        if self.paint:
            frames[-1] = self.paint(frames[-1], item.side_path(side), item.camera)
        return frames

    def closed(self) -> "TaskItems":
        """The same without the env, which takes a hundred megabytes: nothing is drawn any more."""

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
    """Pairs of different images of one goal, spread evenly over the bins of difficulty as far as play reaches."""
    goals = sorted({episode.goal for episode in episodes})
    pairs: list[Item] = []
    for place, goal in enumerate(goals):
        own = [episode for episode in episodes if episode.goal == goal]
        snapshots = np.concatenate([episode.snapshots[list(episode.looked)] for episode in own])
        whence = [(episode, moment) for episode in own for moment in episode.looked]
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


def clip_pairs(episodes: Sequence[Episode], sizes: Sequence[str], count: int, rng: np.random.Generator) -> list[Item]:
    """Up to `count` pairs of whole clips of one goal and size, of which more is done in one than in the other."""
    pairs: list[Item] = []
    by_goal: dict[tuple[str, str], list[Episode]] = {}
    for episode, size in zip(episodes, sizes, strict=False):
        by_goal.setdefault((episode.goal, size), []).append(episode)
    drawn: set[tuple[int, int]] = set()
    several = [own for own in by_goal.values() if len({float(episode.progress[-1]) for episode in own}) > 1]
    # goals by turns, so that one with a thousand clips is not all that is asked about
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
    """Images of successes, from the start to the first moment of success; or the clips up to them, where it `grows`."""
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
                sides=(episode.snapshots[looked[: place + 1] if grows else [moment]],),
                paths=() if grows else (episode.snapshots[: moment + 1],),
                truth=(float(episode.progress[moment]),),
                success=episode.successes[place],
                track=number,
            )
            items.append(item)
    return items


def video_items(episodes: Sequence[Episode], count: int, *, is_cut: bool = True) -> list[Item]:
    """Up to `count` of each of `CASES`; those that play does not give are cut from successes where `is_cut`."""
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
    for episode in episodes if is_cut else ():
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


def turn_items(env: Env[Any, Any], episodes: Sequence[Episode], count: int, rng: np.random.Generator) -> list[Item]:
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
