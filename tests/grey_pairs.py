"""A store with answers about pairs of greys, of which the brighter is nearer to the goal, and the truth."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from rlvlm.core.judging import Query
from rlvlm.judges.cache import CachedJudge
from rlvlm.judges.judge import Judge
from rlvlm.labels.records import Origin, Truth
from rlvlm.labels.store import LabelStore


def grey_pair(left: int, right: int) -> Query:
    sides = [np.full((1, 24, 24, 3), level, np.uint8) for level in (left, right)]
    return Query(goal="brighten it", left=sides[0], right=sides[1])


def fill_store(folder: Path, judge: Judge, levels: Iterable[tuple[int, int]], both_orders: bool = False) -> LabelStore:
    """The store at `folder` with what `judge` says of each pair of `levels`."""
    store, levels = LabelStore(folder, Origin(run="r", task="drawer_open", seed=0)), list(levels)
    cached = CachedJudge(judge, store)
    verdicts = cached.compare([grey_pair(left, right) for left, right in levels])
    if both_orders:
        cached.compare([grey_pair(right, left) for left, right in levels])
    store.add_truths(
        Truth(question=verdict.question, progress=(left / 255, right / 255))
        for verdict, (left, right) in zip(verdicts, levels, strict=True)
    )
    return store
