"""A run's logged labels as items and answers of the judge bench, so that both compute the same metrics."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.judge_bench.asking import Answer
from rlvlm.judge_bench.items import Item

_TRUTHS, _SHARES = ("ground_truth_score_1", "ground_truth_score_2"), ("p_left", "p_right", "p_tie")
_RETURNS = ("return_1", "return_2")
RETURN = "true return"
"""Name of the ground truth if an env measures no progress."""
_LABELS = {("ok", "0"): "left", ("ok", "1"): "right"}
"""Label by status and code of the log."""
MAX_TEXT = 1_000
"""Maximum number of characters kept of an answer's text."""


def final_answers(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Returns the rows of a query log in the order of asking, one per query: without a judge's answers to queries that
    were later put to a person.
    """
    # an older rlvlm wrote neither these columns nor such rows
    final = [row for row in rows if row.get("used_step") or not row.get("answered_by")]
    return sorted(final, key=lambda row: int(row["env_step"]))  # a person's answers come late


def truth_name(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns the ground truth of a query log: `progress`, or `true return` if the env measures none."""
    return "progress" if any(row.get(_TRUTHS[0]) or row.get("ground_truth_score") for row in rows) else RETURN


def logged_truths(rows: Sequence[Mapping[str, str]]) -> NDArray[np.float64]:
    """Returns [N, 2], true progress of left and right; without it the true returns, scaled by their widest gap."""
    names = _TRUTHS if truth_name(rows) == "progress" else _RETURNS
    values = np.array([[float(row.get(name) or np.nan) for name in names] for row in rows]).reshape(-1, 2)
    gaps = np.abs(values[:, 1] - values[:, 0])
    if names is _TRUTHS or not np.isfinite(gaps).any():
        return values
    return values / max(float(np.nanmax(gaps)), 1e-6)


def logged_pairs(rows: Sequence[Mapping[str, str]], task: str, goal: str = "") -> tuple[list[Item], list[Answer]]:
    """Returns a run's questions and answers; unknown truths are NaN, and there are no images.

    Args:
        rows: [N] rows of `vlm_query_log.csv`.
        task: task of the run.
        goal: goal of its judge.
    """
    items, answers = [], []
    for place, (row, (left, right)) in enumerate(zip(rows, logged_truths(rows).tolist(), strict=True)):
        numbers: dict[str, Any] = {name: float(row[name]) if row[name] else np.nan for name in (*_SHARES, "latency_s")}
        shares = tuple(numbers[name] for name in _SHARES)
        label = _LABELS.get((row["status"], row["vlm_predicted_label"]), "")
        items.append(pair_of(goal, (left, right)))
        answers.append(
            Answer(
                task=task,
                item=place,
                swapped=False,
                status=row["status"],
                label="tie" if row["status"] == "no_preference" else label,
                p=None if np.isnan(shares).any() else (shares[0], shares[1], shares[2]),
                text=row["text"][:MAX_TEXT],
                latency_s=numbers["latency_s"],
            )
        )
    return items, answers


def pair_of(goal: str, truth: tuple[float, float]) -> Item:
    """Returns a pair without images."""
    return Item(kind="pair", case="pair", goal=goal, sides=(), truth=truth)
