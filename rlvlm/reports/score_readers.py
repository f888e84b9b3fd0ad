"""Tasks on a cluster's nodes that each read a part of the episodes and ask a served judge, for `rlvlm score --readers`.

Ray repeats a task whose node is lost; what was answered before is in the label store, on a disk that all nodes share.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import ray

from rlvlm.core.errors import RunError, UsageError
from rlvlm.demonstrations.trajectory import CorruptEpisode, RobotTrajectory
from rlvlm.judge_bench.scoring import Asked, ScoredEpisode, score_episodes
from rlvlm.judges.cache import CachedJudge, without_memory
from rlvlm.judges.judge import Judge
from rlvlm.labels.store import LabelStore
from rlvlm.serving.apps import await_places
from rlvlm.serving.config import Role
from rlvlm.serving.places import Placing

_PARTS = 8
"""Parts for each reader: the smaller they are, the less is read again when a node is lost."""

Films = Iterable[RobotTrajectory | CorruptEpisode]


def score_on_nodes(
    judge: CachedJudge,
    films: Films,
    asked: Asked,
    path: Path,
    num_episodes: int,
    readers: int,
    log: Callable[[str], None],
) -> Iterator[ScoredEpisode]:
    """Yields all episodes with the judge's answers, part by part, as parts end. A caller that closes this generator
    waits for the questions that are under way.

    Args:
        judge: served judge with the label store of all readers; it counts what they ask and find.
        films: episodes in order, which every reader iterates over anew.
        asked: the questions; pairs would be asked within a part only.
        path: where `films` lie; each node must have it.
        num_episodes: number of `films`.
        readers: tasks at a time, each on a core.
        log: called with what places are waited for.

    Raises:
        UsageError: a node lacks `path` or the store, or a reader cannot read the data.
        JudgeUnavailable: the cluster has no place for the readers; or every question of a block failed, and earlier
            episodes were yielded.
    """
    role = Role(name="readers", count=readers, cpus=1.0, setting="--readers")
    await_places([role], Placing(log=log))
    store = judge.store.folder.absolute()
    store.mkdir(parents=True, exist_ok=True)  # here: a node that has another disk would make its own
    size = -(-num_episodes // (_PARTS * readers))
    parts = [range(num_episodes)[begin : begin + size] for begin in range(0, num_episodes, size)][::-1]
    # spread over the nodes; a task ends with its worker where memory is short, so its tries are counted
    read: Any = ray.remote(_score_part).options(num_cpus=1, max_retries=10, scheduling_strategy="SPREAD")
    shared = [ray.put(each) for each in (without_memory(judge), (store, path), films, asked)]
    under_way: list[Any] = []
    error: RunError | None = None
    try:
        while under_way or (parts and error is None):
            while parts and error is None and len(under_way) < readers:
                under_way.append(read.remote(*shared, parts.pop()))
            (done, *_), under_way = ray.wait(under_way)
            episodes, hits, misses, failure = ray.get(done)
            judge.hits, judge.misses = judge.hits + hits, judge.misses + misses
            yield from episodes
            error = error or failure
    finally:
        for each in under_way:
            ray.cancel(each)  # as by Ctrl-C: what was sent is still answered and kept
        if under_way:
            ray.wait(under_way, num_returns=len(under_way))
    if error is not None:
        raise error


def _score_part(
    judge: Judge, folders: tuple[Path, ...], films: Films, asked: Asked, part: range
) -> tuple[list[ScoredEpisode], int, int, RunError | None]:
    """Returns the episodes of a part, how many answers were in the store and how many not, and the error that ended it:
    as a value, since Ray would wrap it.
    """
    found: list[ScoredEpisode] = []
    if missing := [str(folder) for folder in folders if not folder.exists()]:
        what = f"{missing[0]} is not there on node {ray.util.get_node_ip_address()}"
        return [], 0, 0, UsageError(what, "put data and --out on a disk that all nodes share, or leave out --readers")
    kept = CachedJudge(judge, LabelStore(folders[0]))
    try:
        found.extend(score_episodes(kept, islice(films, part.start, part.stop), asked, first=part.start))
    except RunError as error:
        return found, kept.hits, kept.misses, error
    return found, kept.hits, kept.misses, None
