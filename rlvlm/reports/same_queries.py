"""Compares two sources of answers to the same queries, such as a person and a VLM, with each other and the truth."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from rlvlm.core.judging import Label
from rlvlm.judge_bench.figures import outcome_of
from rlvlm.judges.agreement import MIN_GAP, cohens_kappa
from rlvlm.reports.judge_answers import Recorded


def compare_answers(sources: Sequence[Recorded]) -> list[dict[str, Any]]:
    """Compares every two sources of different judges on the queries that both answered.

    Returns:
        One row per two sources that share a query that both could read: `first` and `second`, their names; `queries`
        that both answered; `agree`, the share of equal labels (a tie is a label), and `kappa`, Cohen's; and lists of
        two, one value for each source: `accuracy`, the share of right labels among the decided; `kappa_truth`, Cohen's
        kappa with the truth, over the `checked` queries whose truth is known and no tie; `median_s`, seconds per
        answer. Unknown values are None.
    """
    rows = []
    for first, second in combinations(sources, 2):
        indices = [{key: index for index, key in enumerate(source.keys) if key} for source in (first, second)]
        # both named a side or a tie; unreadable answers are left out
        shared = [
            (indices[0][key], indices[1][key])
            for key in indices[0]
            if key in indices[1] and first.answers[indices[0][key]].label and second.answers[indices[1][key]].label
        ]
        if not shared or first.judge == second.judge:
            continue
        labels = [[source.answers[pair[side]].label for pair in shared] for side, source in enumerate((first, second))]
        rows.append(
            {
                "first": first.name,
                "second": second.name,
                "queries": len(shared),
                "agree": float(np.mean([left == right for left, right in zip(*labels, strict=True)])),
                "kappa": cohens_kappa(*labels),
                **_against_truth(first, second, shared),
            }
        )
    return rows


def _against_truth(first: Recorded, second: Recorded, shared: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Returns `checked`, and the lists of two."""
    figures: dict[str, Any] = {"checked": 0, "accuracy": [], "kappa_truth": [], "median_s": []}
    for side, source in enumerate((first, second)):
        answered = [(source.items[pair[side]], source.answers[pair[side]]) for pair in shared]
        checked = [(item, answer) for item, answer in answered if abs(item.gap) > MIN_GAP]  # also excludes NaN
        right = [outcome_of(item, answer) == "right" for item, answer in checked if answer.label != Label.TIE]
        truths = [str(Label.of(*item.truth)) for item, _ in checked]
        seconds = [answer.latency_s for _, answer in answered if answer.latency_s > 0]
        figures["checked"] = len(checked)
        figures["accuracy"].append(float(np.mean(right)) if right else None)
        figures["kappa_truth"].append(cohens_kappa([answer.label for _, answer in checked], truths))
        figures["median_s"].append(float(np.median(seconds)) if seconds else None)
    return figures
