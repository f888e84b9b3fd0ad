"""Asks a judge about recorded episodes: their progress, success and order, and which of them look wrong.

Used by `rlvlm score`. Questions and answers are the bench's, so that its figures hold for both.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlvlm.core.errors import JudgeUnavailable, UsageError
from rlvlm.core.steps import FloatArray, Frames, spread
from rlvlm.demonstrations.trajectory import CorruptEpisode, RobotTrajectory, SuccessRule
from rlvlm.judge_bench.asking import Answer, asking_order, blocks
from rlvlm.judge_bench.items import Item, TaskItems
from rlvlm.judge_bench.task_items import shrink
from rlvlm.judges.agreement import best_threshold
from rlvlm.judges.judge import Judge
from rlvlm.judges.prompts import check_goal
from rlvlm.judges.side_by_side import ASKED_AT_ONCE, Work, side_by_side

Question = Literal["progress", "success", "pairs"]
Numbered = Iterable[tuple[int, RobotTrajectory | CorruptEpisode]]
MIN_FALL = 0.3
"""Fall of progress below its previous best, or difference between two judges, from which an episode looks wrong."""
THRESHOLD = 0.5
"""Score from which an episode is called a success if the data cannot determine a better threshold."""
_UNKNOWN = "unknown"
"""Case of an episode whose success is unknown: no figure of success counts it."""
_STRIP = 6
"""Number of an episode's images that are kept for a page."""
STRIP_PX = 120
MAX_ASKED = 3_000
"""Maximum number of frames of one episode that are asked about: they are in memory together."""
_DRAWN_AT_ONCE = 32
"""Frames in memory at their recorded size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Questions about each episode, and how its images are shown."""

    questions: frozenset[Question] = frozenset({"progress", "success"})
    """progress: the score of images or growing clips; success: the score of the whole episode; pairs: which image is
    nearer to the goal, within an episode, and between the ends of two successive episodes with one goal."""
    every: int = 10
    """Frames from one question to the next, >= 1; the last frame is always included."""
    grows: bool = True
    """Whether progress is asked of the clip up to a frame, and not of the frame alone."""
    pairs: int = 4
    """Pairs of frames per episode, each asked in both orders."""
    num_frames: int = 8
    """Maximum number of images per clip."""
    size_px: int = 300
    """Maximum side length to which images are reduced, in pixels."""
    success: SuccessRule | None = None
    """Rule for the success of episodes whose data do not state it; None leaves it unknown."""
    seed: int = 0
    """Seed of the order of asking, and of the pairs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredEpisode:
    """Episode with a judge's answers; its arrays are empty if it cannot be shown."""

    number: int
    """Index of the episode in the data."""
    name: str
    goal: str
    num_frames: int = 0
    """Number of frames T."""
    truth: bool | None = None
    """Whether the episode succeeded; None if unknown."""
    env_return: float = math.nan
    """Sum of the rewards; NaN if the data have none."""
    reason: str = ""
    """Reason why the episode or some of its frames cannot be shown; empty if all can."""
    indices: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """[T] indices of the frames in the whole data set, if the data have them."""
    frames: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """[n] frames that were asked about."""
    corrected: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    """[n] whether a person had taken over at these; empty if the data do not say."""
    progress: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    """[n] in [0, 1]; NaN if the answer could not be read, or was not asked for."""
    statuses: tuple[str, ...] = ()
    """[n] statuses of the answers; `unreadable` for frames that cannot be shown; empty if progress was not asked."""
    success: float = math.nan
    """Score of the whole episode in [0, 1]; NaN if the answer could not be read, or was not asked for."""
    success_status: str = ""
    """Status of the answer about success; empty if it was not asked."""
    values: FloatArray = field(default_factory=lambda: np.zeros((0, 2), np.float32))
    """[n, 2] learned probability of success at each of `frames`, and its upper expectile; empty if none was learned."""
    outcome: float = math.nan
    """Outcome in [0, 1] that these were learned from; NaN if unknown."""
    strip: Frames = field(default_factory=lambda: np.zeros((0, 1, 1, 3), np.uint8))
    """[m, H, W, 3] small images along the episode, including the first and the last."""
    rows: tuple[tuple[int, Item, Answer], ...] = ()
    """All questions and answers, each with its place in the order of asking; of long clips only the last image."""

    @property
    def worth(self) -> float:
        """Score of the whole episode, else its last progress, else the share of pairs of its frames whose later one was
        called nearer to the goal; NaN without any of these.
        """
        known = self.progress[np.isfinite(self.progress)]
        if math.isfinite(self.success) or len(known):
            return self.success if math.isfinite(self.success) else float(known[-1])
        called = []
        for _, item, answer in self.rows:
            if item.is_pair and answer.label in ("left", "right"):
                left, right = item.sides[::-1] if answer.swapped else item.sides  # as shown
                if left[-1, 0] == right[-1, 0]:  # of one episode
                    called.append((answer.label == "right") == (right[-1, 1] > left[-1, 1]))
        return float(np.mean(called)) if called else math.nan

    @property
    def fall(self) -> float:
        """Largest fall of progress below its previous best, in [0, 1]."""
        known = self.progress[np.isfinite(self.progress)]
        return float((np.maximum.accumulate(known) - known).max()) if len(known) else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shown:
    """Episode to ask about next, with its items and their images by episode and frame."""

    episode: ScoredEpisode
    items: tuple[Item, ...]
    images: dict[tuple[int, int], Frames]


@dataclass(frozen=True, slots=True)
class _Group:
    """Episodes that are asked about together."""

    shown: tuple[_Shown, ...]
    made: TaskItems

    @classmethod
    def of(cls, shown: Sequence[_Shown]) -> Self:
        images = {place: image for each in shown for place, image in each.images.items()}
        items = tuple(item for each in shown for item in each.items)
        return cls(
            tuple(shown), TaskItems(task="recorded", items=items, draw=partial(_drawn, images), digest="", looks=())
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _End:
    """Last image of an episode, to compare with that of the next one with its goal."""

    place: tuple[int, int]
    image: Frames
    truth: bool | None


def score_episodes(
    judge: Judge,
    films: Iterable[RobotTrajectory | CorruptEpisode],
    asked: Asked,
    log: Callable[[str], None] = lambda _: None,
    first: int = 0,
) -> Iterator[ScoredEpisode]:
    """Yields all episodes with the judge's answers, in about their order, including those that cannot be shown.

    Args:
        judge: judge to ask about several episodes at once.
        films: episodes in order; each is drawn once.
        asked: the questions, and how they are shown.
        log: called with a line about questions that the judge cannot be asked.
        first: number of the first episode, if `films` are a part of the data.

    Raises:
        JudgeUnavailable: every question of a block failed; earlier episodes were yielded.
    """
    failures: list[JudgeUnavailable] = []

    orders = count(first * 4 * MAX_ASKED)  # above those of earlier parts
    rows: dict[int, list[tuple[int, Item, Answer]]] = {}  # of the group that is being answered, by item
    last: _Group | None = None
    for group, answers in side_by_side(judge, _work(judge, enumerate(films, first), asked, failures, log)):
        if isinstance(group, ScoredEpisode):
            yield group
        elif answers is None:
            yield from _scored_group(group, rows, asked, is_whole=not failures)
            rows, last = {}, None
        else:
            last = group
            for answer in answers:
                rows.setdefault(answer.item, []).append((next(orders), group.made.items[answer.item], answer))
    if failures:
        if last is not None:  # the answers about these episodes are reported first
            yield from _scored_group(last, rows, asked, is_whole=False)
        raise failures[0]


def _groups(films: Numbered, asked: Asked) -> Iterator["_Group | ScoredEpisode"]:
    """Yields episodes to ask about together, and those of which nothing can be asked."""
    group: list[_Shown] = []
    ends: dict[str, _End] = {}
    for number, film in films:
        shown = _show(number, film, asked, ends)
        if isinstance(shown, ScoredEpisode):
            yield shown
            continue
        # images of one size are asked about together
        sizes = {image.shape for entry in (*group[:1], shown) for image in entry.images.values()}
        if group and (len(sizes) > 1 or sum(len(entry.items) for entry in group) >= ASKED_AT_ONCE):
            yield _Group.of(group)
            group = []
        group.append(shown)
    if group:
        yield _Group.of(group)


def _show(
    number: int, film: RobotTrajectory | CorruptEpisode, asked: Asked, ends: dict[str, _End]
) -> _Shown | ScoredEpisode:
    """Returns an episode's items and images, or the episode alone if nothing of it can be asked."""
    if isinstance(film, CorruptEpisode):
        return ScoredEpisode(number=number, name=film.file.name, goal="", reason=film.reason)
    length = len(film.actions)
    episode = ScoredEpisode(
        number=number,
        name=film.name,
        goal=film.instruction,
        num_frames=length,
        truth=film.known_success(asked.success) if film.success is not None or asked.success else None,
        env_return=math.nan if film.rewards is None else float(film.rewards.sum()),
        indices=np.zeros(0, np.int64) if film.indices is None else film.indices,
        frames=np.unique(np.append(np.arange(0, length, asked.every), length - 1)) if length else np.zeros(0, np.int64),
    )
    try:
        goal = check_goal(film.instruction)
    except ValueError as error:
        return replace(episode, reason=f"no goal that can be asked about: {error}", goal="", frames=episode.frames[:0])
    if len(episode.frames) > MAX_ASKED:
        what = f"{len(episode.frames):,} frames would be asked about, at most {MAX_ASKED:,} are: raise --every"
        return replace(episode, reason=what, frames=episode.frames[:0])
    readable, reason = _draw_frames(film, episode.frames, asked.size_px)
    episode = replace(episode, goal=goal, reason=reason)
    if not readable:
        return replace(episode, reason=reason or "it has no frame", frames=episode.frames[:0])
    if film.corrected is not None:
        episode = replace(episode, corrected=film.corrected[episode.frames])
    images = {(number, frame): image for frame, image in readable.items()}
    items = _items(episode, np.array(sorted(readable)), film.progress, asked)
    if "pairs" in asked.questions:
        end = _End(place=max(images), image=images[max(images)], truth=episode.truth)
        before = ends.get(goal)
        if before and before.image.shape == end.image.shape:
            sides = tuple(_side(ending.place[0], ending.place[1]) for ending in (before, end))
            truth = tuple(math.nan if ending.truth is None else float(ending.truth) for ending in (before, end))
            items += (Item(kind="pair", case="pair", goal=goal, sides=sides, truth=truth),)
            images[before.place] = before.image
        ends[goal] = end
    return _Shown(episode=episode, items=items, images=images)


def _draw_frames(film: RobotTrajectory, frames: NDArray[np.int64], size_px: int) -> tuple[dict[int, Frames], str]:
    """Returns the readable images [H, W, 3] by frame, and the reason why others cannot be read."""
    found: dict[int, Frames] = {}
    reason = ""

    def draw(part: NDArray[np.int64]) -> None:
        nonlocal reason
        try:
            found.update(zip(part.tolist(), shrink(film.images(part)[:, 0], size_px), strict=True))
        except UsageError as error:
            reason = reason or str(error)
            if len(part) > 1:  # one unreadable frame hides the others only if they are read together
                for frame in part:
                    draw(frame[None])

    for part in np.array_split(frames, range(_DRAWN_AT_ONCE, len(frames), _DRAWN_AT_ONCE)):
        draw(part)
    return found, reason


def _side(number: int, frames: ArrayLike) -> FloatArray:
    """Returns [L, 2] snapshots (episode, frame) for frames of an episode, see `TaskItems`."""
    steps = np.ravel(frames)
    return np.stack([np.full(len(steps), number), steps], axis=1).astype(np.float32)


def _items(
    episode: ScoredEpisode, frames: NDArray[np.int64], progress: FloatArray | None, asked: Asked
) -> tuple[Item, ...]:
    """Returns the questions about an episode whose `frames` [n] can be shown."""
    goal, number = episode.goal, episode.number
    # in a success the share of its time stands for progress, unless the data have it; in others it is unknown
    share = frames / max(episode.num_frames - 1, 1) if episode.truth else np.full(len(frames), math.nan)
    truths = share if progress is None else progress[frames]
    items: list[Item] = []
    if "pairs" in asked.questions and len(frames) > 1:
        rng = np.random.default_rng((asked.seed, number))
        chosen: set[tuple[int, int]] = set()
        while len(chosen) < min(asked.pairs, len(frames) * (len(frames) - 1) // 2):
            chosen.add(tuple(sorted(rng.choice(len(frames), 2, replace=False).tolist())))
        for pair in sorted(chosen):
            left, right = rng.permutation(pair)
            sides = (_side(number, frames[left]), _side(number, frames[right]))
            truth = (float(truths[left]), float(truths[right]))
            items.append(Item(kind="pair", case="pair", goal=goal, sides=sides, truth=truth))
    if "progress" in asked.questions:
        for place, frame in enumerate(frames):
            item = Item(
                kind="image",
                case="track",
                goal=goal,
                sides=(_side(number, frames[: place + 1] if asked.grows else frame),),
                truth=(float(truths[place]),),
                track=number,
            )
            items.append(item)
    if "success" in asked.questions:
        case = {None: _UNKNOWN, True: "success", False: "failure"}[episode.truth]
        truth = float(truths[-1]) if progress is not None else float(bool(episode.truth))
        sides = (_side(number, frames),)
        items.append(Item(kind="video", case=case, goal=goal, sides=sides, truth=(truth,), success=bool(episode.truth)))
    return tuple(items)


def _work(
    judge: Judge,
    films: Numbered,
    asked: Asked,
    failures: list[JudgeUnavailable],
    log: Callable[[str], None],
) -> Iterator[Work["tuple[_Group | ScoredEpisode, list[Answer] | None]"]]:
    """Yields the blocks of each group, and after them, or for an episode that is alone, one without answers."""
    for group in _groups(films, asked):
        if isinstance(group, _Group):
            for block in blocks(judge, group.made, asking_order(group.made, asked.seed), asked.num_frames, log):
                if failures:  # what is under way is still answered
                    return
                yield Work(partial(_answered, group, block, failures), block.num_bytes)
        yield Work(partial(_ended, group))


def _answered(
    group: "_Group", block: Work[list[Answer]], failures: list[JudgeUnavailable]
) -> "tuple[_Group, list[Answer]]":
    try:
        return group, block.ask()
    except JudgeUnavailable as error:
        failures.append(error)
        return group, []


def _ended(group: "_Group | ScoredEpisode") -> "tuple[_Group | ScoredEpisode, None]":
    return group, None


def _scored_group(
    group: "_Group", rows: dict[int, list[tuple[int, Item, Answer]]], asked: Asked, *, is_whole: bool
) -> Iterator[ScoredEpisode]:
    """Yields the group's episodes with their `rows`; if not all was answered, those that have some."""
    begin = 0
    for shown in group.shown:
        own = [row for index in range(begin, begin + len(shown.items)) for row in rows.get(index, ())]
        begin += len(shown.items)
        if own or is_whole:
            yield _scored(shown, own, asked)


def _drawn(images: dict[tuple[int, int], Frames], rows: FloatArray, _: str) -> Frames:
    return np.stack([images[number, frame] for number, frame in rows.astype(int).tolist()])


def _scored(shown: _Shown, rows: Sequence[tuple[int, Item, Answer]], asked: Asked) -> ScoredEpisode:
    episode, images = (
        shown.episode,
        {frame: image for (number, frame), image in shown.images.items() if number == shown.episode.number},
    )
    said = {int(item.sides[0][-1, 1]): answer for _, item, answer in rows if item.is_image}
    whole = next((answer for _, item, answer in rows if item.is_video), None)
    frames = episode.frames.tolist()
    statuses = tuple(
        "unreadable" if frame not in images else said[frame].status if frame in said else "" for frame in frames
    )
    strip = spread(np.array([frame for frame in frames if frame in images]), _STRIP)
    return replace(
        episode,
        progress=np.array([said[frame].value if frame in said else math.nan for frame in frames], np.float32),
        statuses=statuses if "progress" in asked.questions else (),
        success=math.nan if whole is None else whole.value,
        success_status="" if whole is None else whole.status,
        strip=shrink(np.stack([images[frame] for frame in strip.tolist()]), STRIP_PX),
        # growing clips would take the square of an episode's length
        rows=tuple(
            (order, replace(item, sides=tuple(side[-1:] for side in item.sides)), answer)
            for order, item, answer in rows
        ),
    )


def known_rows(episodes: Iterable[ScoredEpisode]) -> tuple[list[Item], list[Answer]]:
    """Returns the questions and the answers, in the order of asking, for the bench's figures and faults.

    Progress and pairs count only where their truth is known: along successes, where the order in time is the truth.
    Episodes whose success is unknown have a case of their own, so that only faults that need no truth see them.
    """
    indices: dict[tuple[int, int], int] = {}
    rows = [
        # both orders of a pair have one index, and no two episodes share one
        (order, item, replace(answer, item=indices.setdefault((episode.number, answer.item), len(indices))))
        for episode in episodes
        for order, item, answer in episode.rows
        if np.isfinite(item.truth).all() and (not item.is_image or episode.truth)
    ]
    rows.sort(key=lambda row: row[0])
    return [item for _, item, _ in rows], [answer for _, _, answer in rows]


def find_threshold(episodes: Sequence[ScoredEpisode]) -> tuple[float, bool]:
    """Returns the worth from which an episode counts as a success, and whether the data determine it."""
    known = [
        (episode.worth, episode.truth)
        for episode in episodes
        if episode.truth is not None and math.isfinite(episode.worth)
    ]
    if {truth for _, truth in known} != {True, False}:
        return THRESHOLD, False
    threshold, _ = best_threshold([worth for worth, _ in known], [truth for _, truth in known])
    return threshold, True


def suspicions(episode: ScoredEpisode, threshold: float, other: float = math.nan) -> list[str]:
    """Returns what looks wrong about an episode, in words; empty if nothing does.

    Args:
        episode: episode with its labels.
        threshold: threshold from `find_threshold`.
        other: another judge's worth of the episode; NaN if none was asked.
    """
    found = []
    worth = episode.worth
    num_unread = sum(status in ("invalid", "failed") for status in (*episode.statuses, episode.success_status))
    if not math.isfinite(worth) and (episode.reason or num_unread):
        found.append("unreadable")
    elif episode.reason:
        found.append("some frames cannot be shown")
    elif num_unread:
        found.append(f"{num_unread} answers could not be read")
    if episode.fall >= MIN_FALL:
        found.append(f"progress falls by {episode.fall:.2f}")
    best = np.nanmax([worth, *episode.progress]) if math.isfinite(worth) else math.nan
    if episode.truth is True and best < threshold:
        found.append("a success that never looks like one")
    if episode.truth is False and worth >= threshold:
        found.append("a failure that looks like a success")
    if abs(other - worth) >= MIN_FALL:
        found.append(f"two judges disagree: {worth:.2f} and {other:.2f}")
    return found
