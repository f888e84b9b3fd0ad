"""Results of an evaluation: its row of `eval.csv`, and the true score by which runs are compared.

The learned reward is not used.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.algorithms.evaluation import Evaluation, num_distinct
from rlvlm.core import metrics
from rlvlm.envs.registry import find_task

Floats = NDArray[np.float64]
DECODINGS = {
    "success": ("success_rate", "sampled_success_rate"),
    "return above 0": ("strict_success_rate", "sampled_strict_success_rate"),
}
"""Columns of `eval.csv` with the share of greedy and of sampled episodes, by what they count."""


def scores(task: str, rows: Sequence[Mapping[str, str]]) -> Floats:
    """Returns [N], the score of each evaluation: success (`final_success`), or the true return on the task's own scale
    from 0 to 1.

    The scale is fixed by the task, not by the runs compared, so a score means the same in every report. A return above
    that of a solved task scores above 1, one below random play's scores below 0.

    Args:
        task: name of the task.
        rows: rows of `eval.csv`.

    Raises:
        UsageError: there is no such task.
    """
    scale = find_task(task).return_range
    if scale is None:
        return np.array([final_success(row) for row in rows], np.float64)
    # 0 at the return of random play and 1 at that of a solved task, both defined by the task
    lowest, highest = scale
    returns = np.array([float(row["episode_return"]) for row in rows], np.float64)
    return (returns - lowest) / (highest - lowest)


def score_name(task: str) -> str:
    """Returns the name of a task's score, for axes and tables."""
    scale = find_task(task).return_range
    return "success at the end" if scale is None else f"true return, 0 is {scale[0]:g} and 1 is {scale[1]:g}"


def evaluation_row(evaluation: Evaluation, env_steps: int, wall_s: float) -> dict[str, Any]:
    """Returns a row of `eval.csv`: means over an evaluation's episodes; None for success if it is not tested."""
    episodes = evaluation.episodes

    def rate(succeeded: list[bool]) -> float | None:
        return float(np.mean(succeeded)) if evaluation.has_success else None

    learned = float(np.mean([episode.learned_return for episode in episodes]))
    return {
        "step": env_steps,
        "success_rate": rate([episode.is_success for episode in episodes]),
        "episode_return": float(np.mean([episode.env_return for episode in episodes])),
        "learned_return": learned if np.isfinite(learned) else None,
        "final_progress": float(np.mean([episode.progress[-1] for episode in episodes])),
        "episodes": len(episodes),
        "wall_s": wall_s,
        "sampled_success_rate": evaluation.metrics.get(metrics.EVAL_SAMPLED_SUCCESS),
        "strict_success_rate": evaluation.metrics.get(metrics.EVAL_STRICT_SUCCESS),
        "sampled_strict_success_rate": evaluation.metrics.get(metrics.EVAL_SAMPLED_STRICT_SUCCESS),
        "success_at_end": rate([episode.ends_in_success for episode in episodes]),
        "distinct_episodes": num_distinct(episodes),
    }


def evaluation_rank(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Returns the sort key of the best row of `eval.csv`: success at the end of episodes, success, return."""
    return final_success(row), true_success(row), float(row["episode_return"])


def final_success(row: Mapping[str, Any]) -> float:
    """Returns the share of episodes that end in success in a row of `eval.csv`, by which evaluations and runs are
    ranked; `true_success` if success ends the episodes, or if the row is of a version without that figure.
    """
    # Envs in steps continue after success, and a policy that passes the goal and leaves it is not wanted. If sampled
    # play was evaluated too, episodes end with success.
    at_end = row.get("success_at_end")
    continue_after_success = row.get("sampled_success_rate") in (None, "") and at_end not in (None, "")
    return float(at_end or 0.0) if continue_after_success else true_success(row)


def true_success(row: Mapping[str, Any]) -> float:
    """Returns the share of successful episodes in a row of `eval.csv`; 0 if the env does not define success.

    If sampled play was evaluated too, it counts as much as greedy play: a greedy policy may go round in circles where
    sampled play succeeds, and vice versa. In envs in turns no more episodes count than have a return above 0, because
    chance reaches many a goal in the end.
    """
    # for each decoding the lower of success and return above 0; the mean over the decodings that were played
    measured = [
        [float(row[name]) for name in names if row.get(name) not in (None, "")]
        for names in zip(*DECODINGS.values(), strict=True)
    ]
    return float(np.mean([min(shares) for shares in measured if shares] or [0.0]))
