"""Converts a task's items to the rows of a frozen suite, and back; `archive` describes the file."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray, Frames, spread
from rlvlm.judge_bench.archive import FIX, MAX_FRAMES, MAX_TASK_BYTES, Archive
from rlvlm.judge_bench.attempts import ATTEMPTS, LINE
from rlvlm.judge_bench.changes import CHANGES, changed
from rlvlm.judge_bench.controls import FAILURES, RETESTS
from rlvlm.judge_bench.items import CASES, HACKED, Item, Kind, TaskItems
from rlvlm.judge_bench.task_items import shrink

Colour = tuple[float, float, float]
"""Mean red, green and blue, 0 to 255."""
_CASES = {
    "pair": {"pair", "same image", "other task", "faded", LINE, *RETESTS},
    "image": {"track"},
    "video": {*CASES, *FAILURES, "jump", *RETESTS, HACKED, *ATTEMPTS, LINE},
    "turn": {"nearer", "farther", *FAILURES, "jump", *RETESTS, HACKED},
}
assert _CASES.keys() == set(get_args(Kind))
_DEFAULTS: dict[str, Any] = {
    "progress": [], "success": False, "source": -1, "track": -1, "action": "", "camera": "", "change": ""
}  # fmt: skip
"""Default values of a question's parts, which are left out of the file."""
_DRAWN_AT_ONCE = 64
_GREY = [127.5] * 3


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenItems:
    """Items of a task, and the colours of their images."""

    made: TaskItems
    colours: tuple[tuple[Colour, ...], ...]
    """For each item, mean colours of the last image of each side, as in `asking.Answer`."""


def frozen_rows(made: TaskItems, num_frames: int) -> tuple[list[dict[str, Any]], list[Frames]]:
    """Returns a task's items as JSON values, with sides as image indices, and the images by size.

    Args:
        made: the items; each image is drawn once.
        num_frames: maximum number of images per episode, evenly spread.

    Raises:
        UsageError: they exceed the limits on reading.
    """
    shown = [[spread(side, num_frames) if num_frames > 1 else side[-1:] for side in item.sides] for item in made.items]
    groups: list[Frames] = []
    numbers: dict[tuple[str, bytes], int] = {}
    for camera in sorted({item.camera for item in made.items}):
        sides = [side for item, own in zip(made.items, shown, strict=True) if item.camera == camera for side in own]
        distinct = np.unique(np.concatenate(sides), axis=0)
        parts, num_bytes = [], sum(group.nbytes for group in groups)
        for begin in range(0, len(distinct), _DRAWN_AT_ONCE):
            parts.append(made.draw(distinct[begin : begin + _DRAWN_AT_ONCE], camera))
            num_bytes += parts[-1].nbytes
            if num_bytes > MAX_TASK_BYTES:  # before the memory is full
                what = f"the images of {made.task} are more than {MAX_TASK_BYTES:,} bytes"
                raise UsageError(what, "fewer --pairs and --episodes, or a smaller --image-px")
        first = sum(map(len, groups))
        numbers |= {(camera, row.tobytes()): first + place for place, row in enumerate(distinct)}
        groups.append(np.concatenate(parts))
    images = [image for group in groups for image in group]
    rows = []
    for item, own in zip(made.items, shown, strict=True):
        sides = [[numbers[item.camera, row.tobytes()] for row in side] for side in own]
        last = changed(item, [images[side[-1]][None] for side in sides])
        whole = {
            "kind": item.kind,
            "case": item.case,
            "goal": item.goal,
            "sides": sides,
            "truth": [round(value, 6) for value in item.truth],
            "progress": np.round(spread(np.array(item.progress), num_frames), 6).tolist() if num_frames > 1 else [],
            "success": item.success,
            "source": item.source,
            "track": item.track,
            "action": item.action,
            "camera": item.camera,
            "change": item.change,
            # no rule uses the colour of noise, and it would differ when items are frozen again
            "colours": [
                _GREY if item.change == "noise" else frames[-1].mean((0, 1)).round(3).tolist() for frames in last
            ],
        }
        rows.append({name: value for name, value in whole.items() if value != _DEFAULTS.get(name, ...)})
    return rows, groups


def frozen_items(archive: Archive, task: str, size_px: int | None) -> FrozenItems:
    """Returns the items of a task of an archive.

    Args:
        archive: the archive.
        task: name of one of its tasks.
        size_px: maximum side length to which images are reduced; None draws nothing and reads no pixel.

    Raises:
        UsageError: the file is damaged, was altered, or lacks the pixels to draw.
    """
    number = [entry.task for entry in archive.tasks].index(task)
    entry = archive.tasks[number]
    ends = np.cumsum([count for count, _, _ in entry.groups])
    lines, items, colours = list(archive.lines(number)), [], []
    group_of: dict[str, int] = {}
    for place, row in lines:
        try:
            item, own = _item(row, entry.num_images, len(lines))
            # everything that one camera shows is drawn in one call, so it has one size
            groups = {int(np.searchsorted(ends, image, side="right")) for side in item.sides for image in side.ravel()}
            if groups != {group_of.setdefault(item.camera, min(groups))}:
                raise ValueError(f"images of one camera ({item.camera or 'the first'}) have two sizes")
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise UsageError(f"{place}: it is no question: {type(error).__name__}: {error}", FIX) from error
        items.append(item)
        colours.append(own)
    drawn = None if size_px is None else archive.images(number)

    def draw(snapshots: FloatArray, _: str) -> Frames:
        if drawn is None or size_px is None:
            raise AssertionError("read without pixels")
        wanted = snapshots[:, 0].astype(int)
        group = int(np.searchsorted(ends, wanted[0], side="right"))
        return shrink(drawn[group][wanted - (ends[group] - len(drawn[group]))], size_px)

    made = TaskItems(
        task=task, items=tuple(items), draw=draw, digest=archive.task_digest(number), looks=(), note=entry.note
    )
    return FrozenItems(made=made, colours=tuple(colours))


def _item(row: Mapping[str, Any], num_images: int, num_items: int) -> tuple[Item, tuple[Colour, ...]]:
    """Returns a question and its colours.

    Raises:
        ValueError, TypeError, KeyError: a part is missing, of the wrong type or out of range.
    """
    if not isinstance(row, dict) or row.keys() - {"kind", "case", "goal", "sides", "truth", "colours", *_DEFAULTS}:
        raise ValueError("it is no object with the parts of a question")
    row = _DEFAULTS | row
    kind, sides = row["kind"], row["sides"]
    if kind not in _CASES or row["case"] not in _CASES[kind]:
        raise ValueError(f"there is no {row['case']!r} of kind {kind!r}")
    texts = {name: row[name] for name in ("case", "goal", "action", "camera", "change")}
    if not all(isinstance(text, str) and len(text) <= 2_000 for text in texts.values()) or not row["goal"].strip():
        raise ValueError("its goal is empty, or a part of it no text of at most 2,000 characters")
    if row["change"] not in ("", "noise", *CHANGES):
        raise ValueError(f"there is no change {row['change']!r}")
    if len(sides) != (2 if kind == "pair" else 1) or not all(
        1 <= len(side) <= MAX_FRAMES and all(_is_index(image, 0, num_images) for image in side) for side in sides
    ):
        raise ValueError(f"its sides are not numbers of 1 to {MAX_FRAMES} of {num_images} images")
    truth, progress = _shares(row["truth"], (len(sides),)), _shares(row["progress"], (0, len(sides[0])))
    if not (
        isinstance(row["success"], bool) and all(_is_index(row[name], -1, num_items) for name in ("source", "track"))
    ):
        raise ValueError("success is true or false, source and track are places of other questions")
    colours = np.array(row["colours"], np.float64)
    if colours.shape != (len(sides), 3) or not ((colours >= 0) & (colours <= 255)).all():
        raise ValueError("its colours are not three numbers in [0, 255] for each side")
    item = Item(
        kind=kind,
        sides=tuple(np.array(side, np.float32)[:, None] for side in sides),
        truth=truth,
        progress=progress,
        success=row["success"],
        source=row["source"],
        track=row["track"],
        **texts,
    )
    return item, tuple((red, green, blue) for red, green, blue in colours.tolist())


def _is_index(value: object, least: int, end: int) -> bool:
    return type(value) is int and least <= value < end


def _shares(values: Sequence[float], lengths: Sequence[int]) -> tuple[float, ...]:
    if len(values) not in lengths or not all(
        type(value) in (int, float) and math.isfinite(value) and 0 <= value <= 1 for value in values
    ):
        raise ValueError("truth or progress are not numbers in [0, 1], one for each side or image")
    return tuple(map(float, values))
