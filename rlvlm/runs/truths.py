"""Where a run's labels are kept, and the truth about them: written after the answers, where no judge can see it."""

from collections.abc import Iterable, Iterator

from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder.run_folder import RunFolder
from rlvlm.labels.records import Origin, Truth
from rlvlm.labels.store import LabelStore
from rlvlm.preferences.records import QueryRecord


def label_store(folder: RunFolder, config: RunConfig) -> LabelStore:
    """The store of a run: the shared one that `judge.store` names, or its own.

    Raises:
        UsageError: the folder named holds something else, or a store of a newer schema.
    """
    origin = Origin(run=folder.path.name, task=config.task, seed=config.seed)
    return LabelStore(config.labels(folder.labels), origin)


def truths_of(records: Iterable[QueryRecord]) -> Iterator[Truth]:
    """What the simulator knows about the queries whose answers are kept in a store.

    A judge gets pictures and a goal alone. The loop puts the truth beside its answer in a `QueryRecord`, for metrics;
    from there it goes into the store as a line of its own, named by the question that the answer carries.
    """
    for record in records:
        if record.verdict.question:
            yield Truth(
                question=record.verdict.question,
                progress=(record.progress_left, record.progress_right),
                returns=(record.return_left, record.return_right),
            )
