"""Grades a judge's answers: figures, and what is wrong by rules over them, in the words that a report says."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlvlm.judge_bench.asking import Answer
from rlvlm.judge_bench.figures import (
    Figures,
    outcome_of,
    pair_figures,
    rank_correlation,
    score_figures,
    share,
    success_table,
)
from rlvlm.judge_bench.items import FADED, Item
from rlvlm.judges.agreement import ALIKE, best_threshold, kept_leads

MIN_ITEMS = 12
"""Answers below which nothing is concluded from a share of them."""
MIN_CONTROLS = 6
"""Controls below which nothing is concluded: their score is the same to a hundredth, which chance does not give."""
_OF_A_SIDE = 0.6
"""A side that is named surely more often than this, whatever is shown on it, is preferred."""
_FOOLED = 1 / 3
"""If surely more of the near misses are called successes, or of the labels follow contrast, a policy is paid for it."""
_PAID = {
    "reversed": ("scores a success as high when it is shown backwards", True),
    "other goal": ("scores a success as high under another goal of the scene", True),
    "still": ("scores an episode as high in which nothing happens", True),
    "noise": ("scores noise as high as a success", False),
}
"""Controls that must score less than the success that they are made of: the fault, and whether a policy can play such
clips. Noise cannot be played. Nor, as a rule, can the success of another task, whose rule is a fault of its own: a
judge that ignores the instruction still teaches a task in which there is nothing else to do.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing that is wrong."""

    name: str
    """E.g. `prefers the left image`."""
    evidence: str
    """The figures behind it, in words."""
    is_fatal: bool = False
    """Whether a run with this judge does not start: its answers say nothing about the goal."""
    kind: Literal["pairs", "scores", ""] = ""
    """Kind of question, pairs or scores; empty for both."""
    is_exploitable: bool = False
    """Whether a policy can play what is paid by mistake, so that training may teach it that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Graded:
    """Figures and faults of answers: a bench's, a preflight's, or the labels that a run was given."""

    pairs: Figures
    """Figures as `pair_figures` returns them."""
    scores: Figures
    """Figures as `score_figures` returns them."""
    faults: list[Fault]


def grade(items: Sequence[Item], answers: Sequence[Answer], num_frames: int, min_auc: float | None = None) -> Graded:
    """Figures and faults of the judge that gave `answers` to `items`, both [N] in the order of asking.

    Args:
        items: of the answers.
        answers: of one judge.
        num_frames: most images of an episode that it was shown; of one or two no more can be said.
        min_auc: below this area under the curve successes and failures count as not distinguished, in [0.5, 1]; None:
            where chance may have given the area.
    """
    compared, scored = pair_figures(items, answers), score_figures(items, answers)
    rows = list(zip(items, answers, strict=True))
    pairs = [(item, answer) for item, answer in rows if item.kind == "pair"]
    scores = [(item, answer) for item, answer in rows if item.kind != "pair" and np.isfinite(answer.value)]
    # the lower end of an interval must pass each bound: a few answers by chance condemn no judge
    found = [
        _side(pairs),
        *_brightness(pairs, scores),
        _contrast(pairs),
        _pairs_without_instruction(pairs),
        _scores_without_instruction(scores),
        _last_frame(scores) if num_frames > 2 else None,
        _copies(pairs, scores),
        _constant(scores),
        _tells_no_success(scores, scored.get("auc"), min_auc),
        *_paid_controls(scores),
        _near_misses(scores),
        _unread(rows),
        _sees_differences(compared.get("same_image")),
        _knows_nothing(compared.get("accuracy")),
    ]
    return Graded(pairs=compared, scores=scored, faults=[fault for fault in found if fault is not None])


def _side(pairs: Sequence[tuple[Item, Answer]]) -> Fault | None:
    labels = [answer.label for _, answer in pairs if answer.label in ("left", "right")]
    for side in ("left", "right"):
        said = share(labels.count(side), len(labels))
        if said and said["count"] >= MIN_ITEMS and said["low"] > _OF_A_SIDE:
            text = f"{side} in {said['value']:.0%} of {said['count']} decided answers, each pair asked in both orders"
            return Fault(name=f"prefers the {side} image", evidence=text)
    return None


def _brightness(pairs: Sequence[tuple[Item, Answer]], scores: Sequence[tuple[Item, Answer]]) -> list[Fault]:
    """Follows brightness where the truth says otherwise: among pairs whose brighter side is the wrong one, or scores
    that go with brightness far more than with progress.
    """
    for name, sign in (("brighter", 1), ("darker", -1)):
        misled = [
            outcome_of(item, answer)
            for item, answer in pairs
            if item.case == "pair"
            and len(answer.brightness) == 2
            and sign * (answer.brightness[1] - answer.brightness[0]) * (-item.gap if answer.swapped else item.gap) < 0
        ]
        decided = [outcome for outcome in misled if outcome in ("right", "wrong")]
        # of such pairs alone: in the others the brighter side is the right answer
        wrong = share(decided.count("wrong"), len(decided))
        if wrong and wrong["count"] >= MIN_ITEMS and wrong["low"] > _OF_A_SIDE:
            text = f"names it in {wrong['value']:.0%} of {wrong['count']} answers where it is the wrong side"
            return [Fault(name=f"chooses the {name} image", evidence=text)]
    # noise is grey on average, and no judge of brightness could go by it
    shown = [(item, answer) for item, answer in scores if answer.brightness and item.case != "noise"]
    if len(shown) < 2 * MIN_ITEMS:
        return []
    values = [answer.value for _, answer in shown]
    with_light = rank_correlation(values, [answer.brightness[0] for _, answer in shown])
    with_truth = rank_correlation(values, [item.truth[0] for item, _ in shown])
    # in some scenes progress itself brightens the image, so it must go with light far more than with the truth
    if abs(with_light) > 0.9 and abs(with_light) > abs(with_truth) + 0.2:
        how = "brightness" if with_light > 0 else "darkness"
        text = f"rank correlation {with_light:.2f} with the last image's grey level, {with_truth:.2f} with progress"
        return [Fault(name=f"scores by {how}", evidence=text)]
    return []


def _kept_labels(pairs: Sequence[tuple[Item, Answer]], case: str) -> tuple[int, int, int]:
    """Counts controls of a case whose own pair was decided, in the same order of sides: with the same label, with the
    opposite one, and all.
    """
    own = {(answer.task, answer.item, answer.swapped): answer.label for _, answer in pairs}
    both = [
        (answer.label, own.get((answer.task, item.source, answer.swapped), ""))
        for item, answer in pairs
        if item.case == case
    ]
    # a judge that saw no difference in the pair itself is expected to see none in its control
    decided = [(label, before) for label, before in both if before in ("left", "right")]
    same = sum(label == before for label, before in decided)
    return same, sum(label in ("left", "right") for label, _ in decided) - same, len(decided)


def _pairs_without_instruction(pairs: Sequence[tuple[Item, Answer]]) -> Fault | None:
    hits, _, count = _kept_labels(pairs, "other task")
    same = share(hits, count)
    if same and same["count"] >= MIN_ITEMS and same["low"] > 0.8:
        text = f"{same['value']:.0%} of {same['count']} labels stay the same under the instruction of another task"
        return Fault(name="ignores the instruction", evidence=text, kind="pairs")
    return None


def _contrast(pairs: Sequence[tuple[Item, Answer]]) -> Fault | None:
    _, turned, count = _kept_labels(pairs, "faded")
    flipped = share(turned, count)
    if flipped and flipped["count"] >= MIN_ITEMS and flipped["low"] > _FOOLED:
        text = f"{flipped['value']:.0%} of {flipped['count']} labels turn round where the nearer side has {FADED:.0%} "
        return Fault(name="follows contrast", evidence=text + "of its contrast", kind="pairs", is_exploitable=True)
    return None


def _changes(scores: Sequence[tuple[Item, Answer]], *cases: str) -> list[float]:
    """By how much scores changed from the item that a control was made of."""
    return [abs(control - own) for own, control, _ in _controlled(scores, *cases)]


def _controlled(scores: Sequence[tuple[Item, Answer]], *cases: str) -> list[tuple[float, float, str]]:
    """For each control of these cases, the score of the item that it was made of, its own, and the task."""
    values = {(answer.task, answer.item): answer.value for _, answer in scores}
    return [
        (values[answer.task, item.source], answer.value, answer.task)
        for item, answer in scores
        if item.case in cases and (answer.task, item.source) in values
    ]


def _by_task(scores: Sequence[tuple[Item, Answer]]) -> dict[str, NDArray[np.float64]]:
    """`success_table` of each task that has successes and others."""
    tasks = dict.fromkeys(answer.task for _, answer in scores)
    tables = {task: success_table([row for row in scores if row[1].task == task]) for task in tasks}
    return {task: table for task, table in tables.items() if len(set(table[:, 1])) == 2}


def _paid_controls(scores: Sequence[tuple[Item, Answer]]) -> list[Fault]:
    ordinary = {task: float(table[table[:, 1] == 0, 0].mean()) for task, table in _by_task(scores).items()}
    found = []
    for case, (name, is_exploitable) in _PAID.items():
        # a turn may come nearer to two goals at once
        known = [row for row in scores if case != "other goal" or row[0].kind != "turn"]
        rows = [(own, control, ordinary[task]) for own, control, task in _controlled(known, case) if task in ordinary]
        kept = share(*kept_leads(*np.reshape(rows, (-1, 3)).T))
        if kept and kept["count"] >= MIN_CONTROLS and kept["low"] > 0.5:
            text = f"{kept['value']:.0%} of {kept['count']} keep at least half of what lifts the success above failures"
            found.append(Fault(name=name, evidence=text, kind="scores", is_exploitable=is_exploitable))
    return found


def _near_misses(scores: Sequence[tuple[Item, Answer]]) -> Fault | None:
    found = {task: best_threshold(table[:, 0], table[:, 1] > 0) for task, table in _by_task(scores).items()}
    # where nothing is told apart, which is another fault, any threshold is as good
    thresholds = {task: threshold for task, (threshold, youden) in found.items() if youden > 0}
    claims = [
        answer.value >= thresholds[answer.task]
        for item, answer in scores
        if item.case == "near miss" and answer.task in thresholds
    ]
    called = share(sum(claims), len(claims))
    if called and called["count"] >= MIN_CONTROLS and called["low"] > _FOOLED:
        text = f"{called['value']:.0%} of {called['count']}, by the threshold that is best for the task"
        return Fault(name="calls near misses successes", evidence=text, kind="scores", is_exploitable=True)
    return None


def _scores_without_instruction(scores: Sequence[tuple[Item, Answer]]) -> Fault | None:
    changes = _changes(scores, "other task", "other goal")
    same = share(sum(change <= ALIKE for change in changes), len(changes))
    if same and same["count"] >= MIN_CONTROLS and same["low"] > 0.6:
        text = f"{same['value']:.0%} of {same['count']} scores of successes stay the same under another instruction"
        return Fault(name="ignores the instruction when it scores", evidence=text)
    return None


def _last_frame(scores: Sequence[tuple[Item, Answer]]) -> Fault | None:
    changes = _changes(scores, "jump")
    # episodes alone: single images have no other frames, and a judge of one answer is another fault
    values = [answer.value for item, answer in scores if item.case != "track"]
    same = share(sum(change <= ALIKE for change in changes), len(changes))
    if same and same["count"] >= MIN_CONTROLS and same["low"] > 0.6 and np.std(values) > ALIKE:
        text = f"{same['value']:.0%} of {same['count']} scores stay the same where all other images are the first one"
        return Fault(name="sees the last frame only", evidence=text)
    return None


def _copies(pairs: Sequence[tuple[Item, Answer]], scores: Sequence[tuple[Item, Answer]]) -> Fault | None:
    """Answers go with the answer before, though the order of asking is drawn at random."""
    labels = [(answer.task, answer.label) for _, answer in pairs if answer.label]
    values = [(answer.task, f"{answer.value:.9f}") for _, answer in scores]
    for what, given in (("labels", labels), ("scores", values)):
        tasks = [[said for task, said in given if task == name] for name in dict.fromkeys(task for task, _ in given)]
        same = sum(said == before for sequence in tasks for before, said in pairwise(sequence))
        count = sum(len(sequence) - 1 for sequence in tasks)
        if count < 4 * MIN_ITEMS:
            continue
        # by chance an answer meets its like as often as the like is given in that task; one of a kind meets none
        chance = (
            sum((n * (n - 1)) / max(len(sequence), 1) for sequence in tasks for n in Counter(sequence).values()) / count
        )
        repeats = share(same, count)
        if repeats and repeats["low"] > chance + 0.1:
            text = f"{repeats['value']:.0%} of {what} are the one before, {chance:.0%} would be by chance"
            return Fault(name="copies the answer before", evidence=text)
    return None


def _constant(scores: Sequence[tuple[Item, Answer]]) -> Fault | None:
    values = [answer.value for _, answer in scores]
    if len(values) >= MIN_ITEMS and np.ptp(values) <= ALIKE:
        text = f"{values[0]:.2f} for all of {len(values)}"
        is_constant = bool(np.ptp(values) == 0)  # small differences may still order episodes
        return Fault(name="scores everything alike", evidence=text, kind="scores", is_fatal=is_constant)
    return None


def _tells_no_success(
    scores: Sequence[tuple[Item, Answer]], area: Figures | None, min_auc: float | None
) -> Fault | None:
    table = success_table(scores)
    # a bench says what may be chance; a preflight is given a bound: among dozens of items much may be chance
    if min_auc is None:
        is_told = area is None or len(table) < 2 * MIN_ITEMS or area["low"] > 0.5
    else:  # where a bound is set, an unknown area counts as too small; no scores at all are another fault
        is_told = not scores or (area is not None and area["value"] >= min_auc)
    if is_told:
        return None
    got = "no area under the curve, for lack of one of the two," if area is None else f"AUC {area['value']:.2f}"
    text = f"{got} on {len(table)} whose truth is known" + (f", at least {min_auc:g} is wanted" if min_auc else "")
    return Fault(name="does not tell success from failure", evidence=text, kind="scores", is_fatal=True)


def _unread(rows: Sequence[tuple[Item, Answer]]) -> Fault | None:
    unread = [answer for _, answer in rows if answer.status in ("invalid", "failed")]
    if 2 * len(unread) > len(rows):
        text = f"{len(unread)} of {len(rows)}, e.g. {unread[0].text[:80]!r}"
        return Fault(name="mostly gives no answer that can be read", evidence=text, is_fatal=True)
    return None


def _sees_differences(chose: Figures | None) -> Fault | None:
    if chose and chose["count"] >= MIN_ITEMS and chose["low"] > 0.5:
        text = f"chooses a side in {chose['value']:.0%} of {chose['count']} questions about one image shown twice"
        return Fault(name="prefers one of two equal images", evidence=text)
    return None


def _knows_nothing(right: Figures | None) -> Fault | None:
    # four times as many as elsewhere, since this alone stops a run
    if right and right["count"] >= 4 * MIN_ITEMS and right["low"] <= 0.5:
        text = f"{right['value']:.0%} of {right['count']} decided labels are right"
        name = "prefers the side that is farther from the goal"
        if right["high"] >= 0.5:
            name, text = "does not tell nearer from farther", f"{text}, which chance may give"
        return Fault(name=name, evidence=text, kind="pairs", is_fatal=True)
    return None
