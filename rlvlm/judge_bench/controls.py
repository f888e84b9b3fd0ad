"""Controls and retests: items that are made of others, whose right answer follows from theirs."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlvlm.judge_bench.items import Item

REWORDED = "your task: "
"""Stands in front of a goal that is put in other words: it fits any goal of a user's own."""
FAILURES = ("reversed", "undone", "other task", "other goal", "still", "noise")
"""Controls of a score that must not be called a success: the success backwards, to its end and back to its start, under
the instruction of another task, under another goal of the same scene, its first image alone, and noise in place of
images. Besides there is `jump`, the first image until the last, which is the success's own: it was not played so, but
the goal is reached in it."""
RETESTS = ("brighter", "shifted", "reworded", "other camera", "mirrored")
"""Changes that leave the truth as it is: a little more light (of a pair on the farther side alone), a shift by a few
pixels, the goal in other words, another camera where there is one, and left and right exchanged where neither the env
nor the goal knows one from the other."""
_SIDES = re.compile(r"\b(left|right|(counter|anti)?-?clockwise|east|west)", re.IGNORECASE)
"""Words of a goal that knows left from right."""


def pair_controls(pairs: Sequence[Item], count: int, elsewhere: str, rng: np.random.Generator) -> list[Item]:
    """One image twice, pairs under the instruction of another task, and pairs whose nearer side has faded."""
    if not pairs:
        return []
    # twice as many under another instruction: only those whose own label is decided count
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


def score_controls(scored: Sequence[Item], begin: int, count: int, elsewhere: str, goals: Sequence[str]) -> list[Item]:
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


def retests(
    items: Sequence[Item], count: int, cameras: Sequence[str], is_symmetric: bool, rng: np.random.Generator
) -> list[Item]:
    """All episodes or turns once more, and up to `count` pairs for each of `RETESTS`, each under one of these; some of
    them mirrored besides. Nothing where `count` is 0.
    """
    if not count:  # a person is asked everything once
        return []
    pairs = [index for index, item in enumerate(items) if item.case == "pair"]
    scored = [index for index, item in enumerate(items) if item.kind in ("video", "turn") and item.source < 0]
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
        # pairs from the other end of the order: as a rule those that were not asked again above
        sided = [*order[::-1][:count], *scored[:: len(changes)]]
        found += [
            replace(items[index], case="mirrored", change="mirrored", source=index)
            for index in sided
            if not _SIDES.search(items[index].goal)  # the name of an action knows them too, as in `turn left`
            and not _SIDES.search(items[index].action)
        ]
    return found
