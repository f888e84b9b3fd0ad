"""The price of a bench, before it is asked: questions, images, seconds, and USD where the judge reports a price."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from rlvlm.judge_bench.asking import Answer, KnowsItems, ask, asking_order
from rlvlm.judge_bench.items import TaskItems
from rlvlm.judges.judge import Judge

_TRIED = 2
"""Items of each kind that are asked to learn what an answer takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """What a part of a bench takes."""

    what: str
    questions: int
    images: int
    seconds: float
    """Estimate from a measured answer; NaN if none was given."""
    usd: float
    """NaN if the judge reports no price."""


def price_of(
    judge: Judge | KnowsItems, tasks: Iterable[TaskItems], num_frames: int, rehearse: int, seed: int
) -> list[Price]:
    """Returns the price of each task's pairs and scores, and of its rehearsals, without kinds that a judge refuses.

    Asks a judge about two items of each kind and task, which is a price too.

    Args:
        judge: the judge.
        tasks: the items of each task, whose images can be drawn.
        num_frames: maximum number of images per episode.
        rehearse: questions of each rehearsal; 0 for none.
        seed: seed of the order of asking.

    Raises:
        JudgeUnavailable: the judge does not answer.
    """
    found = []
    for made in tasks:
        for kind, order in asking_order(made, seed).items():
            if not order:
                continue
            shown = {
                place: sum(min(len(side), num_frames) for side in item.sides) for place, item in enumerate(made.items)
            }
            tried = replace(made, items=tuple(made.items[place] for place, _ in order[:_TRIED]))
            unasked: list[str] = []
            blocks = ask(judge, tried, num_frames, seed, unasked.append)
            answers: list[Answer] = [answer for block in blocks for answer in block]
            if unasked:
                continue
            seconds = float(np.mean([answer.latency_s for answer in answers]))
            costs = [answer.cost_usd for answer in answers if math.isfinite(answer.cost_usd)]
            usd = float(np.mean(costs)) if costs else math.nan
            images = sum(shown[place] for place, _ in order)
            sizes = {f"{made.task}: {kind}": (len(order), images)}
            if rehearse:
                # ends of episodes, as long as they are; images of pairs are single
                sizes[f"{made.task}: rehearsal of {kind}"] = rehearse, rehearse * (2 if kind == "pairs" else num_frames)
            found += [
                Price(what=what, questions=count, images=number, seconds=count * seconds, usd=count * usd)
                for what, (count, number) in sizes.items()
            ]
    return found
