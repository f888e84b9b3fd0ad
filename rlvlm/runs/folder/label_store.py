"""Where a run's labels are kept."""

from rlvlm.labels.records import Origin
from rlvlm.labels.store import LabelStore
from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder.run_folder import RunFolder


def label_store(folder: RunFolder, config: RunConfig) -> LabelStore:
    """The store of a run: the shared one that `judge.store` names, or its own.

    Raises:
        UsageError: the folder named holds something else, or a store of a newer schema.
    """
    origin = Origin(run=folder.path.name, task=config.task, seed=config.seed)
    return LabelStore(config.labels(folder.labels), origin)
