"""Asks a judge about items, in a random order that reveals no answer, and keeps its answers."""

import hashlib
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import numpy as np

from rlvlm.core.errors import JudgeUnavailable, UnsupportedQuestion, first_line
from rlvlm.core.judging import Clip, Label, Query, Score, Stamp, Status, Verdict
from rlvlm.core.steps import Frames, spread
from rlvlm.judge_bench.changes import changed
from rlvlm.judge_bench.items import CASES, Item, TaskItems
from rlvlm.judges.judge import Judge
from rlvlm.judges.side_by_side import ASKED_AT_ONCE, Work, side_by_side


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A judge's answer to one item, in one order."""

    task: str
    item: int
    """Index of the item within its task."""
    swapped: bool
    """Whether the sides of a pair were exchanged; label and numbers are in the order that was shown."""
    status: str
    label: str = ""
    """left, right or tie; empty for scores and unreadable answers."""
    value: float = np.nan
    """Score in [0, 1]; NaN if there is none."""
    p: tuple[float, float, float] | None = None
    """Probabilities of left, right and tie, if the judge gives them."""
    text: str = ""
    latency_s: float = 0.0
    tokens: float = np.nan
    cost_usd: float = np.nan
    colours: tuple[tuple[float, float, float], ...] = ()
    """Mean red, green and blue, 0 to 255, of the last image of each side, as shown."""


class KnowsItems(Protocol):
    """Answerer that is given the items themselves and draws what it needs; a `Judge` is shown images."""

    def answers(self, asked: Sequence[tuple[Item, bool]]) -> Sequence[Verdict | Score]:
        """Returns one answer per item, asked with its sides exchanged or not, in order."""
        ...


class Reference:
    """Answers from the truth, or without looking: the baselines for every judge.

    Args:
        name: oracle, random, or left (always the first image; always 0.5).
    """

    def __init__(self, name: Literal["oracle", "random", "left"]) -> None:
        self.name = name
        self.stamp = Stamp(judge=name, revision="", prompt="none", decoding="")

    def answers(self, asked: Sequence[tuple[Item, bool]]) -> list[Verdict | Score]:
        said: list[Verdict | Score] = []
        for item, swapped in asked:
            # derived from the question, so that the same suite always gives the same row
            key = hashlib.sha256(repr((item.kind, item.case, item.goal, item.truth, swapped)).encode())
            for side in item.sides:
                key.update(side.tobytes())
            chance = int.from_bytes(key.digest()[:8], "big") / 2**64
            if len(item.sides) == 1:
                truth = float(item.success) if item.is_motion else item.truth[0]
                value = {"oracle": truth, "random": chance, "left": 0.5}[self.name]
                said.append(Score(status=Status.OK, value=value, stamp=self.stamp))
                continue
            left, right = item.truth[::-1] if swapped else item.truth
            chosen = Label.LEFT if chance < 0.5 else Label.RIGHT
            label = {"oracle": Label.of(left, right), "random": chosen, "left": Label.LEFT}[self.name]
            said.append(Verdict(status=Status.of(label), label=label, stamp=self.stamp))
        return said


def ask(
    judge: Judge | KnowsItems,
    made: TaskItems,
    num_frames: int,
    seed: int,
    log: Callable[[str], None] = lambda _: None,
    *,
    is_person: bool = False,
    most: int | None = None,
) -> Iterator[list[Answer]]:
    """Yields the answers to the items of a task, block by block; pairs are asked in both orders, far apart.

    Kinds of question that the judge does not support (it only scores, or only compares) are left out, which is logged.

    Args:
        judge: judge to ask.
        made: the items.
        num_frames: maximum number of images per episode, evenly spread.
        seed: seed of the order.
        log: called with a line per kind that is left out.
        is_person: whether people answer, whose pages say how long each answer took; of others the time of a block is
            shared out evenly.
        most: asks the questions that `first_for_person` picks; None: all.

    Raises:
        JudgeUnavailable: every question of a block failed.
    """
    order = asking_order(made, seed)
    if most is not None:
        order = first_for_person(made, order, most)
    yield from filter(None, side_by_side(judge, blocks(judge, made, order, num_frames, log, is_person=is_person)))


def blocks(  # noqa: PLR0913 - all of what `ask` is given
    judge: Judge | KnowsItems,
    made: TaskItems,
    order: Mapping[str, Sequence[tuple[int, bool]]],
    num_frames: int,
    log: Callable[[str], None],
    *,
    is_person: bool = False,
) -> Iterator[Work[list[Answer]]]:
    """Yields the questions of `asking_order`, drawn, block by block; the answers to those that are left out are empty.

    An image is drawn when its block is wanted and in the thread that wants it: renderers belong to one thread.
    """
    for kind, questions in order.items():
        unsupported: list[UnsupportedQuestion] = []

        def answered(block: "_Block", unsupported: list[UnsupportedQuestion] = unsupported) -> list[Answer]:
            try:
                return [] if unsupported else _ask(judge, block, is_person)
            except UnsupportedQuestion as error:  # of this kind of question; the other may do
                unsupported.append(error)
                return []

        for begin in range(0, len(questions), ASKED_AT_ONCE):
            if unsupported:
                break
            block = _drawn(judge, made, questions[begin : begin + ASKED_AT_ONCE], num_frames)
            yield Work(partial(answered, block), sum(side.nbytes for sides in block.shown for side in sides))
        if unsupported:
            log(f"{made.task}: {kind} are left out: {first_line(unsupported[0])}")


def asking_order(made: TaskItems, seed: int) -> dict[str, list[tuple[int, bool]]]:
    """Returns a task's questions in the order of asking, `pairs` before `scores`.

    Each is the index of an item, and whether the sides of a pair are exchanged.
    """
    rng = np.random.default_rng((seed, zlib.crc32(made.task.encode())))  # a different order for each task
    places = {
        "pairs": [place for place, item in enumerate(made.items) if item.is_pair],
        "scores": [place for place, item in enumerate(made.items) if not item.is_pair],
    }
    questions = {
        kind: [(place, swapped) for place in own for swapped in ((False, True) if kind == "pairs" else (False,))]
        for kind, own in places.items()
    }
    # shuffled, or a pair's two questions would follow each other
    return {kind: [asked[place] for place in rng.permutation(len(asked))] for kind, asked in questions.items()}


def first_for_person(
    made: TaskItems, order: Mapping[str, Sequence[tuple[int, bool]]], most: int
) -> dict[str, list[tuple[int, bool]]]:
    """Of `asking_order` the first `most` questions of each kind, without controls, which would be half of them."""
    plain = {place for place, item in enumerate(made.items) if item.case == "pair" or item.case in CASES}
    return {kind: [asked for asked in own if asked[0] in plain][:most] for kind, own in order.items()}


@dataclass(frozen=True, slots=True)
class _Block:
    """Questions of one kind about one task."""

    task: str
    places: Sequence[tuple[int, bool]]
    """Index of each item, and whether its sides are exchanged."""
    asked: Sequence[tuple[Item, bool]]
    shown: Sequence[list[Frames]]
    """Images of each side of each item; empty for those who know the items."""


def _drawn(judge: Judge | KnowsItems, made: TaskItems, places: Sequence[tuple[int, bool]], num_frames: int) -> _Block:
    asked = [(made.items[place], swapped) for place, swapped in places]
    shown = _draw(made, asked, num_frames) if isinstance(judge, Judge) else [[] for _ in asked]
    return _Block(made.task, places, asked, shown)


def _ask(judge: Judge | KnowsItems, block: _Block, is_person: bool) -> list[Answer]:
    asked, shown = block.asked, block.shown
    said: Sequence[Verdict | Score]
    if not isinstance(judge, Judge):
        said = judge.answers(asked)
        elapsed = 0.0
    else:
        # a block holds only one kind, so one of the two lists is empty
        queries = [
            Query(goal=item.goal, left=s[0], right=s[1]) for (item, _), s in zip(asked, shown, strict=True) if s[1:]
        ]
        clips = [
            Clip(goal=item.goal, frames=sides[0], action=item.action)
            for (item, _), sides in zip(asked, shown, strict=True)
            if not sides[1:]
        ]
        began = time.perf_counter()
        said = judge.compare(queries) if queries else judge.score(clips)
        elapsed = (time.perf_counter() - began) / len(asked)  # drawing is the bench's time and not the judge's
        if all(answer.status is Status.FAILED for answer in said):
            raise JudgeUnavailable(
                f"none of {len(said)} questions about {block.task} was answered: {said[0].text or 'no reason given'}",
                "check the judge with `rlvlm doctor`; what was measured before is kept",
            )
    return [
        Answer(
            task=block.task,
            item=place,
            swapped=swapped,
            status=str(answer.status),
            label=str(answer.label or "") if isinstance(answer, Verdict) else "",
            value=answer.value if isinstance(answer, Score) and answer.value is not None else np.nan,
            p=answer.probabilities if isinstance(answer, Verdict) else None,
            text=answer.text[:500],
            latency_s=answer.latency_s if is_person else elapsed,
            tokens=answer.usage.tokens_in + answer.usage.tokens_out if answer.usage else np.nan,
            cost_usd=np.nan if answer.usage is None or answer.usage.cost_usd is None else answer.usage.cost_usd,
            colours=tuple(_mean_colour(side[-1]) for side in sides),
        )
        for (place, swapped), answer, sides in zip(block.places, said, shown, strict=True)
    ]


def _mean_colour(image: Frames) -> tuple[float, float, float]:
    red, green, blue = image.mean((0, 1)).round(3).tolist()
    return red, green, blue


def _draw(made: TaskItems, asked: Sequence[tuple[Item, bool]], num_frames: int) -> list[list[Frames]]:
    """Draws the images of each item, one clip per side; everything that one camera sees is drawn in one call."""
    shown: list[list[Frames]] = [[] for _ in asked]
    for camera in {item.camera for item, _ in asked}:
        indices = [index for index, (item, _) in enumerate(asked) if item.camera == camera]
        sides = [
            side[-1:] if num_frames == 1 else spread(side, num_frames)  # with one image alone, the end counts
            for index in indices
            for side in (asked[index][0].sides[::-1] if asked[index][1] else asked[index][0].sides)
        ]
        # the same moment is drawn once: controls show those of their original
        distinct, inverse = np.unique(np.concatenate(sides), axis=0, return_inverse=True)
        frames = made.draw(distinct, camera)[inverse.ravel()]
        parts = iter(np.split(frames, np.cumsum([len(side) for side in sides])[:-1]))
        for index in indices:
            item, swapped = asked[index]
            sides = [next(parts) for _ in item.sides]
            if made.paint:
                for number, side in enumerate(sides):
                    path = item.side_path(len(sides) - 1 - number if swapped else number)
                    side[-1] = made.paint(side[-1], path, camera)
            shown[index] = changed(item, sides[::-1] if swapped else sides)
            if swapped:
                shown[index].reverse()
    return shown
