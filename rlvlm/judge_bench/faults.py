"""Names what is wrong with a judge, by rules over its answers: the words that a report says."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rlvlm.judge_bench.asking import Answer
from rlvlm.judge_bench.figures import outcome_of, rank_correlation, resampled_auc, share, success_table
from rlvlm.judge_bench.items import Item

FEWEST = 12
"""Answers below which nothing is concluded from a share of them."""
FEWEST_CONTROLS = 6
"""Likewise of controls whose score is the same to a hundredth, which chance does not give."""
_OF_A_SIDE = 0.6
"""A side that is named surely more often than this, whatever is shown on it, is preferred."""
_ALIKE = 0.01
"""Scores that differ by no more are the same answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing that is wrong."""

    name: str
    """E.g. `prefers the left image`."""
    evidence: str
    """The figures behind it, in words."""
    is_fatal: bool = False
    """Whether a run with this judge does not start: its answers say nothing about the goal."""


def find_faults(
    items: Sequence[Item], answers: Sequence[Answer], num_frames: int, least_auc: float | None = None
) -> list[Fault]:
    """What is wrong with the judge that gave `answers` to `items`, both [N] in the order of asking.

    Args:
        items: of the answers.
        answers: of one judge.
        num_frames: most images of an episode that it was shown; of one or two no more can be said.
        least_auc: below this area under the curve successes and failures count as not distinguished, in [0.5, 1]; None:
            where chance may have given the area.
    """
    rows = list(zip(items, answers, strict=True))
    pairs = [(item, one) for item, one in rows if item.kind == "pair"]
    scores = [(item, one) for item, one in rows if item.kind != "pair" and np.isfinite(one.value)]
    # the lower end of an interval must pass each bound: a few answers by chance condemn no judge
    found = [
        _side(pairs),
        *_brightness(pairs, scores),
        _pairs_without_instruction(pairs),
        _scores_without_instruction(scores),
        _last_frame(scores) if num_frames > 2 else None,
        _copies(pairs, scores),
        _constant(scores),
        _tells_no_success(scores, least_auc),
        _unread(rows),
        _sees_differences(pairs),
        _knows_nothing(pairs),
    ]
    return [fault for fault in found if fault is not None]


def _side(pairs: Sequence[tuple[Item, Answer]]) -> Fault | None:
    labels = [one.label for _, one in pairs if one.label in ("left", "right")]
    for side in ("left", "right"):
        said = share(labels.count(side), len(labels))
        if said and said["count"] >= FEWEST and said["low"] > _OF_A_SIDE:
            text = f"{side} in {said['value']:.0%} of {said['count']} decided answers, each pair asked in both orders"
            return Fault(name=f"prefers the {side} image", evidence=text)
    return None


def _brightness(pairs: Sequence[tuple[Item, Answer]], scores: Sequence[tuple[Item, Answer]]) -> list[Fault]:
    """Follows brightness where the truth says otherwise: among pairs whose brighter side is the wrong one, or scores
    that go with brightness far more than with progress.
    """
    for name, sign in (("brighter", 1), ("darker", -1)):
        misled = [
            outcome_of(item, one)
            for item, one in pairs
            if item.case == "pair"
            and len(one.brightness) == 2
            and sign * (one.brightness[1] - one.brightness[0]) * (-item.gap if one.swapped else item.gap) < 0
        ]
        decided = [outcome for outcome in misled if outcome in ("right", "wrong")]
        # of such pairs alone: in the others the brighter side is the right answer
        wrong = share(decided.count("wrong"), len(decided))
        if wrong and wrong["count"] >= FEWEST and wrong["low"] > _OF_A_SIDE:
            text = f"names it in {wrong['value']:.0%} of {wrong['count']} answers where it is the wrong side"
            return [Fault(name=f"chooses the {name} image", evidence=text)]
    # noise is grey on average, and no judge of brightness could go by it
    shown = [(item, one) for item, one in scores if one.brightness and item.case != "noise"]
    if len(shown) < 2 * FEWEST:
        return []
    values = [one.value for _, one in shown]
    with_light = rank_correlation(values, [one.brightness[0] for _, one in shown])
    with_truth = rank_correlation(values, [item.truth[0] for item, _ in shown])
    # in some scenes progress itself brightens the image, so it must go with light far more than with the truth
    if abs(with_light) > 0.9 and abs(with_light) > abs(with_truth) + 0.2:
        how = "brightness" if with_light > 0 else "darkness"
        text = f"rank correlation {with_light:.2f} with the last image's grey level, {with_truth:.2f} with progress"
        return [Fault(name=f"scores by {how}", evidence=text)]
    return []


def _pairs_without_instruction(pairs: Sequence[tuple[Item, Answer]]) -> Fault | None:
    own = {(one.task, one.item, one.swapped): one.label for _, one in pairs}
    both = [
        (one.label, own.get((one.task, item.source, one.swapped), ""))
        for item, one in pairs
        if item.case == "other task"
    ]
    # who saw no difference under the task's own instruction is expected to see none under another
    decided = [(label, before) for label, before in both if before in ("left", "right")]
    same = share(sum(label == before for label, before in decided), len(decided))
    if same and same["count"] >= FEWEST and same["low"] > 0.8:
        text = f"{same['value']:.0%} of {same['count']} labels stay the same under the instruction of another task"
        return Fault(name="ignores the instruction", evidence=text)
    return None


def _changes(scores: Sequence[tuple[Item, Answer]], *cases: str) -> list[float]:
    """By how much scores changed from the item that a control was made of."""
    values = {(one.task, one.item): one.value for _, one in scores}
    return [
        abs(one.value - values[one.task, item.source])
        for item, one in scores
        if item.case in cases and (one.task, item.source) in values
    ]


def _scores_without_instruction(scores: Sequence[tuple[Item, Answer]]) -> Fault | None:
    changes = _changes(scores, "other task", "other goal")
    same = share(sum(change <= _ALIKE for change in changes), len(changes))
    if same and same["count"] >= FEWEST_CONTROLS and same["low"] > 0.6:
        text = f"{same['value']:.0%} of {same['count']} scores of successes stay the same under another instruction"
        return Fault(name="ignores the instruction when it scores", evidence=text)
    return None


def _last_frame(scores: Sequence[tuple[Item, Answer]]) -> Fault | None:
    changes = _changes(scores, "jump")
    # of episodes alone: single images have no other frames, and a judge of one answer is another fault
    values = [one.value for item, one in scores if item.case != "track"]
    same = share(sum(change <= _ALIKE for change in changes), len(changes))
    if same and same["count"] >= FEWEST_CONTROLS and same["low"] > 0.6 and np.std(values) > _ALIKE:
        text = f"{same['value']:.0%} of {same['count']} scores stay the same where all other images are the first one"
        return Fault(name="sees the last frame only", evidence=text)
    return None


def _copies(pairs: Sequence[tuple[Item, Answer]], scores: Sequence[tuple[Item, Answer]]) -> Fault | None:
    """Answers go with the answer before, though the order of asking is drawn at random."""
    labels = [(one.task, one.label) for _, one in pairs if one.label]
    values = [(one.task, f"{one.value:.9f}") for _, one in scores]
    for what, given in (("labels", labels), ("scores", values)):
        tasks = [[said for task, said in given if task == name] for name in dict.fromkeys(task for task, _ in given)]
        same = sum(said == before for one in tasks for before, said in pairwise(one))
        count = sum(len(one) - 1 for one in tasks)
        if count < 4 * FEWEST:
            continue
        # by chance an answer meets its like as often as the like is given in that task; one of a kind meets none
        chance = sum((n * (n - 1)) / max(len(one), 1) for one in tasks for n in Counter(one).values()) / count
        repeats = share(same, count)
        if repeats and repeats["low"] > chance + 0.1:
            text = f"{repeats['value']:.0%} of {what} are the one before, {chance:.0%} would be by chance"
            return Fault(name="copies the answer before", evidence=text)
    return None


def _constant(scores: Sequence[tuple[Item, Answer]]) -> Fault | None:
    values = [one.value for _, one in scores]
    if len(values) >= FEWEST and np.ptp(values) <= _ALIKE:
        text = f"{values[0]:.2f} for all of {len(values)}"
        return Fault(name="scores everything alike", evidence=text)  # small differences may still order episodes
    return None


def _tells_no_success(scores: Sequence[tuple[Item, Answer]], least_auc: float | None) -> Fault | None:
    table = success_table(scores)
    area = resampled_auc(table)
    # a bench says what may be chance; a preflight is given a bound: among dozens of items much may be chance
    if least_auc is None:
        is_told = area is None or len(table) < 2 * FEWEST or area["low"] > 0.5
    else:  # where a bound is set, an unknown area counts as too small; no scores at all are another fault
        is_told = not scores or (area is not None and area["value"] >= least_auc)
    if is_told:
        return None
    got = "no area under the curve, for lack of one of the two," if area is None else f"AUC {area['value']:.2f}"
    text = f"{got} on {len(table)} whose truth is known" + (f", at least {least_auc:g} is wanted" if least_auc else "")
    return Fault(name="does not tell success from failure", evidence=text, is_fatal=True)


def _unread(rows: Sequence[tuple[Item, Answer]]) -> Fault | None:
    unread = [one for _, one in rows if one.status in ("invalid", "failed")]
    if 2 * len(unread) > len(rows):
        text = f"{len(unread)} of {len(rows)}, e.g. {unread[0].text[:80]!r}"
        return Fault(name="mostly gives no answer that can be read", evidence=text, is_fatal=True)
    return None


def _sees_differences(pairs: Sequence[tuple[Item, Answer]]) -> Fault | None:
    twice = [one.label for item, one in pairs if item.case == "same image" and one.label]
    chose = share(sum(label != "tie" for label in twice), len(twice))
    if chose and chose["count"] >= FEWEST and chose["low"] > 0.5:
        text = f"chooses a side in {chose['value']:.0%} of {chose['count']} questions about one image shown twice"
        return Fault(name="prefers one of two equal images", evidence=text)
    return None


def _knows_nothing(pairs: Sequence[tuple[Item, Answer]]) -> Fault | None:
    outcomes = [outcome_of(item, one) for item, one in pairs if item.case == "pair"]
    right = share(outcomes.count("right"), outcomes.count("right") + outcomes.count("wrong"))
    # four times as many as elsewhere, since this alone stops a run
    if right and right["count"] >= 4 * FEWEST and right["low"] <= 0.5:
        if right["high"] < 0.5:
            text = f"{right['value']:.0%} of {right['count']} decided labels are right"
            return Fault(name="prefers the side that is farther from the goal", evidence=text, is_fatal=True)
        text = f"{right['value']:.0%} of {right['count']} decided labels are right, which chance may give"
        return Fault(name="does not tell nearer from farther", evidence=text, is_fatal=True)
    return None
