"""Controls and retests: items made from others, with a right answer that follows from theirs."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlvlm.judge_bench.items import Item

REWORDED = "your task: "
"""Prefix that rewords a goal: it fits any goal of a user's own."""
FAILURES = ("reversed", "undone", "other task", "other goal", "still", "noise")
"""Controls of a score that must not be called a success: the success backwards, to its end and back to its start,
under the instruction of another task, under another goal of the same scene, its first image alone, and noise instead
of images. In addition `jump` shows the first image until the last, which is the success's own: it was not played
like that, but it reaches the goal."""
RETESTS = ("brighter", "shifted", "reworded", "other camera", "mirrored")
"""Changes that keep the truth: a little more light (for a pair on the farther side alone), a shift by a few pixels,
a reworded goal, another camera if there is one, and a mirror image if neither env nor goal tells left from right."""
_SIDES = re.compile(r"\b(left|right|(counter|anti)?-?clockwise|east|west)", re.IGNORECASE)
"""Words of a goal that tells left from right."""


def pair_controls(pairs: Sequence[Item], count: int, elsewhere: str, rng: np.random.Generator) -> list[Item]:
    """Returns pairs of one image twice, pairs under another task's instruction, and pairs whose nearer side faded."""
    if not pairs:
        return []
    # twice as many under another instruction: only those with a decided original label count
    chosen = rng.permutation(len(pairs))[: 2 * count].tolist()
    twice = [
        replace(
            pairs[place],
            case="same image",
            **{name: getattr(pairs[place], name)[:1] * 2 for name in ("sides", "paths", "truth")},
        )
        for place in chosen[:count]
    ]
    others = [
        replace(pairs[place], case="other task", goal=elsewhere, truth=(0.0, 0.0), source=place) for place in chosen
    ]
    faded = [replace(pairs[place], case="faded", change="faded", source=place) for place in chosen]
    return [*twice, *others, *faded]


def score_controls(
    scored: Sequence[Item], begin: int, count: int, elsewhere: str, goals: Callable[[Item], Sequence[str]]
) -> list[Item]:
    """Returns controls made from the first `count` successes among `scored`.

    Args:
        scored: turns or videos.
        begin: index of the first of `scored` among the task's items.
        count: number of successes.
        elsewhere: goal of another task.
        goals: function that returns the goals of an item's scene; the first that differs from its own is used.
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
        if other := next((goal for goal in goals(item) if goal != item.goal), ""):
            made["other goal"] = {"goal": other}
        controls += [
            replace(item, case=case, truth=(0.0,), success=False, source=place, **change)
            for case, change in made.items()
        ]
    return controls


def retests(
    items: Sequence[Item], count: int, cameras: Sequence[str], is_symmetric: bool, rng: np.random.Generator
) -> list[Item]:
    """Returns all episodes or turns once more, and up to `count` pairs for each of `RETESTS`, each under one of these
    changes; some are mirrored in addition. Empty if `count` is 0.
    """
    if not count:  # a person is asked everything once
        return []
    pairs = [index for index, item in enumerate(items) if item.case == "pair"]
    scored = [index for index, item in enumerate(items) if item.is_motion and item.source < 0]
    changes: list[dict[str, Any]] = [
        {"case": "brighter", "change": "brighter"},
        {"case": "shifted", "change": "shifted"},
        {"case": "reworded"},
        *({"case": "other camera", "camera": camera} for camera in cameras),
    ]
    order = rng.permutation(pairs).tolist()
    found = []
    for indices in (order[: count * len(changes)], scored):
        for number, index in enumerate(indices):
            change, item = changes[number % len(changes)], items[index]
            goal = f"{REWORDED}{item.goal}" if change["case"] == "reworded" else item.goal
            found.append(replace(item, goal=goal, source=index, **change))
    if is_symmetric:
        # pairs from the other end of the order, mostly not asked again above
        sided = [*order[::-1][:count], *scored[:: len(changes)]]
        found += [
            replace(items[index], case="mirrored", change="mirrored", source=index)
            for index in sided
            if not _SIDES.search(items[index].goal)  # the name of an action may tell them apart too, as in `turn left`
            and not _SIDES.search(items[index].action)
        ]
    return found
