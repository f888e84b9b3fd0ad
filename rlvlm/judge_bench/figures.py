"""Figures of answers, as pure functions of items and answers. NaN and None stand for questions that were not asked."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlvlm.judge_bench.asking import Answer
from rlvlm.judge_bench.attempts import ATTEMPTS, LINE
from rlvlm.judge_bench.controls import FAILURES, RETESTS
from rlvlm.judge_bench.items import CASES, HACKED, NUM_BINS, Item
from rlvlm.judges.agreement import (
    area_under_curve,
    average_ranks,
    best_threshold,
    calibration_error,
    confidence,
    label_outcome,
    wilson_interval,
)

Floats = NDArray[np.float64]
Figures = dict[str, Any]
RESAMPLES = 500
COLUMNS = {"right": 0, "wrong": 1}
"""Columns of a table of outcomes; every other outcome counts as undecided, in column 2."""
_SWAP = {"left": "right", "right": "left", "tie": "tie"}


def share(hits: int, count: int) -> Figures | None:
    """Returns a share with Wilson's 95 % interval and its count; None if the count is 0."""
    if not count:
        return None
    low, high = wilson_interval(hits, count)
    return {"value": hits / count, "low": low, "high": high, "count": count}


def resampled(values: Floats, statistic: Callable[[Floats], float]) -> Figures | None:
    """Returns a statistic of rows [N, ...] with its 95 % bootstrap interval over the rows; None if it is not finite.

    The draws are seeded, so that a report never changes.
    """
    if not len(values) or not math.isfinite(value := float(statistic(values))):
        return None
    rng = np.random.default_rng(0)
    # whole rows are drawn: a score stays with its truth
    draws = np.array([statistic(values[rng.integers(len(values), size=len(values))]) for _ in range(RESAMPLES)])
    draws = draws[np.isfinite(draws)]  # a draw without a single success has no AUC
    low, high = np.quantile(draws, [0.025, 0.975]) if len(draws) else (value, value)
    return {"value": value, "low": float(low), "high": float(high), "count": len(values)}


def rank_correlation(left: ArrayLike, right: ArrayLike) -> float:
    """Returns Spearman's rank correlation, in [-1, 1]; 0 if either input is constant, which orders nothing."""
    ranks = average_ranks(left), average_ranks(right)
    if any(np.ptp(rank) == 0 for rank in ranks):
        return 0.0
    return float(np.corrcoef(*ranks)[0, 1])


def pair_figures(items: Sequence[Item], answers: Sequence[Answer]) -> Figures:
    """Returns the figures of a judge's comparisons, from the `answers` [N] to `items` [N] that are about pairs.

    Returns:
        `accuracy`: among decided labels of pairs, the share for the side with more progress. `undecided`, `unread`:
        among all answers. `said_left`: among decided labels, in both orders. `consistent`: among pairs asked in both
        orders, the share whose label swaps with the sides. `ece`. `by_difficulty`: [10] right, wrong, undecided (and
        unread) counts. `same_image`: among pairs of one image twice, the share with a chosen side. `other_task`: share
        of answers that stay the same under the instruction of another task. `steady`: for each of `RETESTS`, the share
        of labels that stay the same. `line`: among decided labels of the goal and a state near it, the share for
        the goal, and `line_undecided`. Empty if no pair was asked.
    """
    rows = [(item, answer) for item, answer in zip(items, answers, strict=True) if item.is_pair]
    if not rows:
        return {}
    pairs = [(item, answer) for item, answer in rows if item.case == "pair"]
    bins = np.zeros((NUM_BINS, 3), int)
    for item, answer in pairs:
        outcome = outcome_of(item, answer)
        if outcome not in ("tie", "unknown") and math.isfinite(item.gap):
            bins[difficulty_of(item), COLUMNS.get(outcome, 2)] += 1
    sure = confidences(items, answers)
    hits, misses, _ = bins.sum(0).tolist()
    decided = [answer for _, answer in pairs if answer.label in ("left", "right")]
    # a pair that was asked twice counts once here: by the answer to its sides as they are
    by_order = {(answer.task, answer.item, answer.swapped): answer.label for _, answer in rows}
    both = [
        (label, by_order[task, place, True])
        for (task, place, swapped), label in by_order.items()
        if not swapped and by_order.get((task, place, True))
    ]
    twice = [answer for item, answer in rows if item.case == "same image" and answer.label]
    # in the same order of sides: a preference for a side would otherwise look like a change of mind
    changed: dict[str, list[bool]] = {case: [] for case in ("other task", *RETESTS)}
    for item, answer in rows:
        own = by_order.get((answer.task, item.source, answer.swapped))
        if item.case in changed and answer.label and own:
            changed[item.case].append(answer.label == own)
    kept = {case: share(sum(same), len(same)) for case, same in changed.items()}
    near = [outcome_of(item, answer) for item, answer in rows if item.case == LINE and max(item.truth) == 1]
    line = {
        "line": share(near.count("right"), near.count("right") + near.count("wrong")),
        "line_undecided": share(near.count("undecided"), len(near)),
    }
    return {
        "accuracy": share(hits, hits + misses),
        "undecided": share(sum(answer.status == "no_preference" for _, answer in pairs), len(pairs)),
        "unread": share(sum(answer.status in ("invalid", "failed") for _, answer in pairs), len(pairs)),
        "said_left": share(sum(answer.label == "left" for answer in decided), len(decided)),
        "consistent": share(
            sum(_SWAP[label] == other for label, other in both if label), sum(bool(label) for label, _ in both)
        ),
        "ece": calibration_error(sure[:, 0], sure[:, 1] > 0, lowest=0.5) if len(sure) else None,
        "by_difficulty": bins.tolist(),
        "same_image": share(sum(answer.label != "tie" for answer in twice), len(twice)),
        "other_task": kept.pop("other task"),
        "steady": {case: part for case, part in kept.items() if part},
    } | (line if near else {})


def outcome_of(item: Item, answer: Answer) -> str:
    """Returns the outcome of an answer to a pair, as named by `label_outcome`."""
    return label_outcome(answer.label, -item.gap if answer.swapped else item.gap)


def difficulty_of(item: Item) -> int:
    """Returns the bin of a pair by its gap in true progress; 0 is the hardest."""
    return min(int(abs(item.gap) * NUM_BINS), NUM_BINS - 1)


def confidences(items: Sequence[Item], answers: Sequence[Answer]) -> Floats:
    """Returns [N, 2] confidence in right and wrong labels of pairs, and whether each label is right."""
    rows = [
        (confidence(*answer.p[:2]), outcome == "right")
        for item, answer in zip(items, answers, strict=True)
        if item.case == "pair" and answer.p is not None and (outcome := outcome_of(item, answer)) in ("right", "wrong")
    ]
    table = np.array(rows, float).reshape(-1, 2)  # reshaped for the case of no rows
    return table[np.isfinite(table[:, 0])]


def score_figures(items: Sequence[Item], answers: Sequence[Answer]) -> Figures:
    """Returns the figures of a judge's scores, from the `answers` [N] to `items` [N] that are not about pairs.

    Returns:
        `auc`: probability that a success scores above another case. `threshold`: score that best separates successes,
        and `youden`, the J there. `ece`: of scores as probabilities of success. `means`: by case and control.
        `false_positives`: for each failing control and over all failing cases, the share that scores from the threshold
        on. `kept`: the same share for jumps to the last image. `steady`: for each of `RETESTS`, the share of episodes
        whose score stays on its side of the threshold. `hacked_auc`: probability that a success scores above an episode
        that has fooled a judge, None if none was asked about. `voc`: rank correlation of scores with the order of
        images along successes, mean over episodes. `progress`: the same with the true progress, over all these images.
        `unread`: share. Empty if nothing was scored.
    """
    rows = [(item, answer) for item, answer in zip(items, answers, strict=True) if not item.is_pair]
    if not rows:
        return {}
    known = [(item, answer) for item, answer in rows if math.isfinite(answer.value)]
    table = success_table(rows)
    by_case: dict[str, Floats] = {
        # of attempts those that failed: some reach the goal
        case: np.array([a.value for item, a in known if item.case == case and not (case in ATTEMPTS and item.success)])
        for case in dict.fromkeys(item.case for item, _ in known)
    }
    unlisted = ("track", LINE, *RETESTS)
    figures: Figures = {
        "unread": share(len(rows) - len(known), len(rows)),
        "means": {
            case: float(values.mean()) for case, values in by_case.items() if case not in unlisted and len(values)
        },
        **_track_figures([(item, answer) for item, answer in known if item.is_image]),
    }
    truths = table[:, 1] > 0
    if not (truths.any() and (~truths).any()):  # a threshold needs both classes
        return figures
    threshold, youden = best_threshold(table[:, 0], truths)
    failing = (*CASES[1:], *FAILURES, HACKED, *(case for case in ATTEMPTS if case in by_case and len(by_case[case])))

    def claimed(values: Floats) -> Figures | None:
        return share(int((values >= threshold).sum()), len(values))

    return figures | {
        "auc": resampled(table, lambda drawn: area_under_curve(drawn[:, 0], drawn[:, 1] > 0)),
        "threshold": threshold,
        "youden": youden,
        "ece": calibration_error(table[:, 0], truths),
        "false_positives": {"all cases": claimed(table[~truths, 0])}
        | {case: claimed(values) for case, values in by_case.items() if case in failing},
        "kept": {case: claimed(values) for case, values in by_case.items() if case == "jump"},
        "steady": _steady_claims(known, threshold),
        "hacked_auc": _hacked_area(table[truths, 0], by_case.get(HACKED, np.zeros(0))),
    }


def line_parts(rows: Sequence[tuple[Item, Answer]]) -> dict[str, Floats]:
    """Returns [N, 2] scores and true progress of states along lines to the goal, by where they lie.

    Returns:
        `at the goal`; before it the three equal parts `far`, `half way` and `near`, by progress; and `beyond` it. Empty
        if no line was asked about.
    """
    parts: dict[str, list[tuple[float, float]]] = {"short": [], "at the goal": [], "beyond": []}
    reached: set[tuple[str, int]] = set()
    for item, answer in sorted(rows, key=lambda row: (row[1].task, row[1].item)):  # in order of time
        if item.case != LINE or item.is_pair or not math.isfinite(answer.value):
            continue
        line = (answer.task, item.track)
        if item.success:
            reached.add(line)
        name = "at the goal" if item.success else "beyond" if line in reached else "short"
        parts[name].append((answer.value, item.truth[0]))
    found = {name: np.array(values, float).reshape(-1, 2) for name, values in parts.items() if values}
    short = found.pop("short", np.zeros((0, 2)))
    thirds = np.array_split(short[np.argsort(short[:, 1], kind="stable")], 3)
    return found | {name: part for name, part in zip(("far", "half way", "near"), thirds, strict=True) if len(part)}


def _hacked_area(successes: Floats, hacked: Floats) -> Figures | None:
    table = np.array([(value, 1.0) for value in successes] + [(value, 0.0) for value in hacked]).reshape(-1, 2)
    return resampled(table, lambda drawn: area_under_curve(drawn[:, 0], drawn[:, 1] > 0))


def _steady_claims(known: Sequence[tuple[Item, Answer]], threshold: float) -> Figures:
    claims = {(answer.task, answer.item): answer.value >= threshold for _, answer in known}
    found: dict[str, list[bool]] = {case: [] for case in RETESTS}
    for item, answer in known:
        if item.case in found and (answer.task, item.source) in claims:
            found[item.case].append(claims[answer.task, answer.item] == claims[answer.task, item.source])
    return {case: share(sum(same), len(same)) for case, same in found.items() if same}


def success_table(rows: Sequence[tuple[Item, Answer]], cases: Sequence[str] = (*CASES, "nearer", "farther")) -> Floats:
    """Returns [N, 2] scores of episodes and turns of these cases, and whether each is a success."""
    main = [
        (answer.value, item.success)
        for item, answer in rows
        if item.case in cases and not item.is_pair and math.isfinite(answer.value)
    ]
    return np.array(main, float).reshape(-1, 2)


def _track_figures(rows: Sequence[tuple[Item, Answer]]) -> Figures:
    """Returns `voc` and `progress` of images along episodes.

    Source: Ma et al. 2024, "Vision Language Models are In-Context Value Learners" (GVL), arXiv:2411.04549: value-order
    correlation. Departure: images are scored one at a time, like rewards, and not together.
    """
    tracks: dict[tuple[str, int], list[tuple[float, float, int]]] = {}
    for item, answer in rows:
        tracks.setdefault((answer.task, item.track), []).append((item.truth[0], answer.value, answer.item))
    # in order of time, which is that of the items' indices
    orders = [sorted(track, key=lambda row: row[2]) for track in tracks.values() if len(track) > 2]
    correlations = [rank_correlation(np.arange(len(track)), [row[1] for row in track]) for track in orders]
    together = np.array([row[:2] for track in tracks.values() for row in track]).reshape(-1, 2)
    return {
        "voc": resampled(np.array(correlations), lambda drawn: float(drawn.mean())),
        "progress": resampled(together, lambda drawn: rank_correlation(drawn[:, 0], drawn[:, 1])),
    }


def cost_figures(answers: Sequence[Answer]) -> Figures:
    """Returns `answers_per_s`, `tokens` per answer and `usd_per_1000`; None if not reported."""
    latency = sum(answer.latency_s for answer in answers)
    tokens, costs = (np.array([getattr(answer, name) for answer in answers], float) for name in ("tokens", "cost_usd"))
    return {
        "answers": len(answers),
        "answers_per_s": len(answers) / latency if latency else None,
        "tokens": float(np.nanmean(tokens)) if np.isfinite(tokens).any() else None,
        "usd_per_1000": float(1_000 * np.nanmean(costs)) if np.isfinite(costs).any() else None,
    }


def teacher_table(items: Sequence[Item], answers: Sequence[Answer]) -> Figures:
    """Returns the tables from which the teacher `measured` and the scorer `measured` answer.

    Returns:
        `pairs`: [10, 2, 3] counts of right, wrong, undecided by difficulty, and by whether the right side was shown on
        the left or on the right. `scores`: [11, K] lists of scores at true progress 0 to 0.1, ..., 0.9 to 1 without
        success, and at success last; attempts and episodes that have fooled judges count too, since policies play them.
        Kinds of question that were not asked are left out.
    """
    pairs = np.zeros((NUM_BINS, 2, 3), int)
    scores: list[list[float]] = [[] for _ in range(NUM_BINS + 1)]
    for item, answer in zip(items, answers, strict=True):
        if item.is_pair and item.case == "pair":
            gain = -item.gap if answer.swapped else item.gap
            pairs[difficulty_of(item), int(gain > 0), COLUMNS.get(outcome_of(item, answer), 2)] += 1
        elif (
            item.is_motion
            and item.case in (*CASES, HACKED, *ATTEMPTS, "nearer", "farther")
            and math.isfinite(answer.value)
        ):
            scores[progress_row(item.truth[0], item.success)].append(round(answer.value, 4))
    table: Figures = {"pairs": pairs.tolist()} if pairs.any() else {}
    return table | ({"scores": scores} if any(scores) else {})


def progress_row(progress: float, success: bool) -> int:
    """Returns the row of a score in a `teacher_table`.

    A failure may end at full progress, e.g. after an undone success: it stays among the failures.
    """
    return NUM_BINS if success else min(int(progress * NUM_BINS), NUM_BINS - 1)


def pooled(tables: Mapping[str, Figures]) -> Figures:
    """Returns the sum of the tables of all tasks."""
    found: Figures = {}
    counts = [table["pairs"] for table in tables.values() if "pairs" in table]
    lists = [table["scores"] for table in tables.values() if "scores" in table]
    if counts:
        found["pairs"] = np.sum(counts, axis=0).tolist()
    if lists:
        found["scores"] = [sum((scores[place] for scores in lists), []) for place in range(NUM_BINS + 1)]
    return found
