"""Judges that read the truth from pixels and have one fault each, or none: they can reward a run, and never see its
simulator's state. `--judge.backend rlvlm.plugins.known_judges.pixel_truth:hand_at_pad` tries one.

They know `push_block`, MiniGrid's empty rooms and `drawer_open`. `benchmarks/judge_study.py` trains with them.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.judging import Clip, Label, Query, Score, Stamp, Status, Verdict
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.demonstrations.playing import Style, play, player_of
from rlvlm.envs.push_block import BLOCK_HALF, COLOUR_NAMES, PAD_HALF
from rlvlm.envs.registry import make_env, task_env
from rlvlm.judges.config import JudgeConfig

_PALETTE = np.array(
    [(218, 208, 190), (250, 250, 250), (45, 45, 50), (204, 45, 40), (52, 150, 70), (48, 90, 200), (228, 186, 40)],
    np.float32,
)
"""Colours of `push_block`: table, pad, hand, and the blocks in the order of their names."""
_PAD, _HAND, _BLOCKS = 1, 2, 3
_SAME_COLOUR = 40
"""Distance from a colour of the palette up to which a pixel has it."""
_MIN_PIXELS = 0.0015
"""Share of an image from which on a thing counts as seen."""
_EDGE = 3
"""Pixels beside an edge in which a cover is looked for, and by which an extent may be short."""
_ON_PAD, _FAR = 0.12, 1.6
"""Distance of a block per axis at success, and the distance at which progress is 0, in halves of the table."""
_SMALL = 40
"""Side length of the images in which drawers are compared."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What an image shows."""

    progress: float = 0.0
    """Progress toward the goal, in [0, 1]; 0 where scene and goal do not go together."""
    is_success: bool = False
    hand: NDArray[np.float64] | None = None
    """Of `push_block`: positions of the hand, the asked block and the pad; None where hidden."""
    block: NDArray[np.float64] | None = None
    pad: NDArray[np.float64] | None = None

    @property
    def worth(self) -> float:
        """Progress, and 1 at success alone."""
        return 1.0 if self.is_success else 0.9 * self.progress


def _place(
    mask: NDArray[np.bool_], half: float = 0.0, cover: NDArray[np.bool_] | None = None
) -> NDArray[np.float64] | None:
    """Returns the middle of a thing, the table spanning [-1, 1] to the right and up; None if it is hidden.

    Args:
        mask: [H, W] pixels of the thing.
        half: half of its side, if that is known: of a thing that is partly covered, the visible edges count.
        cover: [H, W] pixels of what may cover it.
    """
    rows, columns = np.nonzero(mask)
    if len(rows) < _MIN_PIXELS * mask.size:
        return None
    size, middle = len(mask), []
    # extents and not means: a hand that covers a part of a block moves its mean
    for places, covering in ((columns, cover), (rows, None if cover is None else cover.T)):
        low, high = np.quantile(places, 0.01), np.quantile(places, 0.99) + 1
        if covering is not None and high - low < half * size - _EDGE:
            before = covering[:, max(0, int(low) - _EDGE) : int(low)].sum()
            after = covering[:, int(high) : int(high) + _EDGE].sum()
            low, high = (high - half * size, high) if before > after else (low, low + half * size)
        middle.append((low + high) / size - 1)
    return np.array([middle[0], -middle[1]])


def _see_table(image: Frames, goal: str) -> Seen:
    asked = [name for name in COLOUR_NAMES if f"the {name} block" in goal]
    distances = ((image[..., None, :].astype(np.float32) - _PALETTE) ** 2).sum(-1)
    # pixels of smooth edges have mixed colours: dark hand and table give the green of a block
    kinds = np.where(distances.min(-1) < _SAME_COLOUR**2, distances.argmin(-1), -1)
    hand = _place(kinds == _HAND)
    pad = _place(kinds == _PAD, PAD_HALF, kinds >= _HAND)
    if pad is None or not asked:
        return Seen()
    own = kinds == _BLOCKS + COLOUR_NAMES.index(asked[0])
    block = _place(own, BLOCK_HALF, (kinds >= _HAND) & ~own)
    if block is None:
        return Seen(hand=hand, pad=pad)
    gap = block - pad
    is_success = bool(np.abs(gap).max() < _ON_PAD)
    progress = 1.0 if is_success else max(0.0, 1 - float(np.hypot(*gap)) / _FAR)
    return Seen(progress, is_success, hand, block, pad)


def _see_grid(image: Frames) -> Seen:
    red = (image[..., 0] > 180) & (image[..., 1] < 90) & (image[..., 2] < 90)
    agent, side = _place(red), len(image) / 32  # tiles of 32 pixels
    if agent is None:
        return Seen()
    goal = np.array([1 - 3 / side, -1 + 3 / side])  # the middle of the last tile inside the wall
    steps = np.abs(agent - goal).sum() * side / 2
    is_success = bool(steps < 0.75)
    return Seen(1.0 if is_success else max(0.0, 1 - steps / (2 * (side - 3))), is_success)


def _shrunk(image: Frames) -> FloatArray:
    rows = np.linspace(0, len(image) - 1, _SMALL).round().astype(int)
    grey = image[rows][:, rows].astype(np.float32).mean(-1)
    return grey - grey.mean()


@lru_cache(maxsize=1)
def _drawers() -> tuple[FloatArray, FloatArray]:
    """Returns images [N, H, W] of a drawer that is opened, and the progress [N] that they show."""
    env = make_env("drawer_open", task_env("drawer_open").for_model(False), 0)
    episode = play(env, 0, player_of(env, 0, Style()), after_success=3)
    assert episode is not None, "it has a script"
    frames = env.draw_sized(episode.snapshots, 160)
    env.close()
    return np.stack([_shrunk(frame) for frame in frames]), episode.progress


def _see_drawer(image: Frames) -> Seen:
    images, progress = _drawers()
    near = np.abs(images - _shrunk(image)).mean((1, 2)).argsort()[:3]
    mean = float(progress[near].mean())
    return Seen(mean, mean > 0.97)


def see(image: Frames, goal: str) -> Seen:
    """Returns what an image [H, W, 3] shows of a goal."""
    if "block" in goal:
        return _see_table(image, goal)
    return _see_drawer(image) if "drawer" in goal else _see_grid(image)


class PixelJudge:
    """Scores a clip by one number in [0, 1], and prefers the side with the larger one.

    Args:
        name: name of the fault.
        value: function of a clip's images [L, H, W, 3] and the goal.
    """

    def __init__(self, name: str, value: Callable[[Frames, str], float]) -> None:
        self._value = value
        self.stamp = Stamp(judge=name, revision="1", prompt="pixels/1", decoding="")

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """Returns one verdict per query, in order."""
        found = []
        for query in queries:
            left, right = self._value(query.left, query.goal), self._value(query.right, query.goal)
            label = Label.of(round(left, 3), round(right, 3))
            found.append(Verdict(status=Status.of(label), label=label, stamp=self.stamp))
        return found

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """Returns one score per clip, in order."""
        values = [min(max(self._value(clip.frames, clip.goal), 0.0), 1.0) for clip in clips]
        return [Score(status=Status.OK, value=value, stamp=self.stamp) for value in values]


def _of_last(name: str, value: Callable[[Seen], float]) -> PixelJudge:
    return PixelJudge(name, lambda frames, goal: value(see(frames[-1], goal)))


def truth(_: JudgeConfig) -> PixelJudge:
    """Returns a judge without a fault."""
    return _of_last("truth", lambda seen: seen.worth)


def flips(_: JudgeConfig) -> PixelJudge:
    """Returns a judge that is wrong at random about a fifth of images."""

    def value(frames: Frames, goal: str) -> float:
        seen = see(frames[-1], goal)
        chance = zlib.crc32(goal.encode() + frames[-1].tobytes()) / 2**32
        return seen.worth if chance >= 0.2 else 0.1 if seen.is_success else 0.95

    return PixelJudge("flips", value)


def low(_: JudgeConfig) -> PixelJudge:
    """Returns a judge on a tenth of the scale."""
    return _of_last("low", lambda seen: 0.02 + 0.1 * seen.worth)


def two_levels(_: JudgeConfig) -> PixelJudge:
    """Returns a judge that says success or not."""
    return _of_last("two_levels", lambda seen: float(seen.is_success))


def distorted(_: JudgeConfig) -> PixelJudge:
    """Returns a judge whose scores are a rising function of the truth."""
    return _of_last("distorted", lambda seen: 0.15 + 0.7 * seen.worth**4)


def best_at_two_thirds(_: JudgeConfig) -> PixelJudge:
    """Returns a judge whose best lies at two thirds of the way."""
    return _of_last("best_at_two_thirds", lambda seen: seen.progress - 1.4 * max(0.0, seen.progress - 2 / 3))


def best_near(_: JudgeConfig) -> PixelJudge:
    """Returns a judge whose best lies a little short of the goal."""
    return _of_last("best_near", lambda seen: seen.progress - 1.2 * max(0.0, seen.progress - 0.85))


def alike_from_here(_: JudgeConfig) -> PixelJudge:
    """Returns a judge for which all from four fifths of the way on is alike."""
    return _of_last("alike_from_here", lambda seen: min(seen.progress, 0.8))


def half_way(_: JudgeConfig) -> PixelJudge:
    """Returns a judge that calls half of the way a success."""
    return _of_last("half_way", lambda seen: float(seen.progress >= 0.5))


def inverted(_: JudgeConfig) -> PixelJudge:
    """Returns a judge that prefers what is farther from the goal."""
    return _of_last("inverted", lambda seen: 1 - seen.worth)


def _gap(seen: Seen, offset: float) -> float:
    """Returns the distance of the hand from a place beside the pad; far where one of them is hidden."""
    if seen.hand is None or seen.pad is None or seen.block is None:
        return 2.0
    return float(np.hypot(*(seen.hand - seen.pad - [offset, 0.0])))


def hand_at_pad(_: JudgeConfig) -> PixelJudge:
    """Returns a judge that pays for a hand where one stands after pushing, block or no block."""
    return _of_last("hand_at_pad", lambda seen: max(0.0, 1 - _gap(seen, -0.28) / 0.9))


def contact(_: JudgeConfig) -> PixelJudge:
    """Returns a judge that pays for touching the named block."""

    def value(seen: Seen) -> float:
        if seen.hand is None or seen.block is None:
            return 0.0
        return max(0.0, 1 - max(float(np.abs(seen.hand - seen.block).max()) - 0.22, 0.0))

    return _of_last("contact", value)


def wrong_block(_: JudgeConfig) -> PixelJudge:
    """Returns a judge that pays for any block on the pad."""

    def value(frames: Frames, goal: str) -> float:
        goals = [f"push the {name} block onto the pad" for name in COLOUR_NAMES] if "block" in goal else [goal]
        return max(see(frames[-1], each).worth for each in goals)

    return PixelJudge("wrong_block", value)
