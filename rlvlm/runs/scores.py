"""The true score by which runs are compared, from what `eval.csv` says. The learned reward plays no part."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlvlm.envs.registry import return_range
from rlvlm.runs.folder.rows import true_success

Floats = NDArray[np.float64]


def scores(task: str, rows: Sequence[Mapping[str, str]]) -> Floats:
    """[N] the score of each evaluation: the success rate (`true_success`), or the true return on the task's own scale
    from 0 to 1.

    The scale is fixed by the task, not by the runs compared, so a score means the same in every report. A return better
    than the one that counts as solved scores above 1, one worse than random play below 0.

    Args:
        task: its name.
        rows: of `eval.csv`.

    Raises:
        UsageError: there is no such task.
    """
    scale = return_range(task)
    if scale is None:
        return np.array([true_success(row) for row in rows], np.float64)
    lowest, highest = scale
    returns = np.array([float(row["episode_return"]) for row in rows], np.float64)
    return (returns - lowest) / (highest - lowest)


def score_name(task: str) -> str:
    """What the score of a task is, for axes and tables."""
    scale = return_range(task)
    return "success rate" if scale is None else f"true return, 0 is {scale[0]:g} and 1 is {scale[1]:g}"
