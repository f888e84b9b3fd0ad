"""Grades a judge's answers: figures, and faults found by rules over them, in words for a report."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlvlm.judge_bench.asking import Answer
from rlvlm.judge_bench.attempts import ATTEMPTS, DISTURBED, LINE, START, WITHOUT_OBJECT
from rlvlm.judge_bench.changes import FADED
from rlvlm.judge_bench.controls import RETESTS
from rlvlm.judge_bench.figures import (
    Figures,
    line_parts,
    outcome_of,
    pair_figures,
    rank_correlation,
    resampled,
    score_figures,
    share,
    success_table,
)
from rlvlm.judge_bench.items import HACKED, Item
from rlvlm.judges.agreement import ALIKE, area_interval, area_under_curve, best_threshold, kept_leads

MIN_ITEMS = 12
"""Minimum number of answers for a conclusion from a share of them."""
MIN_CONTROLS = 6
"""Minimum number of controls for a conclusion: scores that agree to a hundredth do not happen by chance."""
_OF_A_SIDE = 0.6
"""Share of answers for one side, by the lower end of its interval, above which that side counts as preferred."""
_FOOLED = 1 / 3
"""Share of near misses called successes, or of labels that follow contrast, above which a judge is exploitable."""
_SMALL_GAPS = (0.5, 0.4, 0.3)
"""Gaps in progress below which a judge's accuracy is tested separately, the widest first."""
_MAX_UNREAD = 0.2
"""Tolerated share of unreadable answers."""
_SURE = 0.99
"""Confidence of an interval that is looked at for each part of a line."""
_RETEST_GAP = 0.2
"""Gap in progress below which mistakes do not count: near a tie any judge repeats them."""
_COLOURS: dict[str, tuple[str, tuple[float, float, float]]] = {
    "brighter": ("brightness", (1 / 3, 1 / 3, 1 / 3)),
    "darker": ("darkness", (-1 / 3, -1 / 3, -1 / 3)),
    "redder": ("redness", (1, -0.5, -0.5)),
    "greener": ("greenness", (-0.5, 1, -0.5)),
    "bluer": ("blueness", (-0.5, -0.5, 1)),
}
"""Appearances that a judge may prefer, as weights of an image's mean red, green and blue."""
_RETESTED = {
    "brighter": "the images have more light",
    "shifted": "the images are moved by a few pixels",
    "reworded": "the goal is put in other words",
    "other camera": "another camera shows it",
    "mirrored": "the images are mirrored",
}
"""`controls.RETESTS` in words."""
_PAID = {
    "reversed": ("scores a success as high when it is shown backwards", True),
    "other goal": ("scores a success as high under another goal of the scene", True),
    "still": ("scores an episode as high in which nothing happens", True),
    "noise": ("scores noise as high as a success", False),
}
"""Controls that must score less than their original success: the fault, and whether a policy can play such clips.

Noise cannot be played. Nor usually can the success of another task, which has its own rule: a judge that ignores the
instruction can still teach a task whose scene has no other goal.
"""
_NO_SUCCESSES = {
    "near miss": "near misses",
    "cut short": "episodes cut short",
    "failure": "failures",
    HACKED: "what has fooled judges",
    START: "failures of the start policy",
    DISTURBED: "disturbed attempts",
    WITHOUT_OBJECT: "motions without the object",
}
"""Cases that a policy can play and that must not be called successes, in words."""
_ASKED: dict[Literal["pairs", "scores"], str] = {"pairs": "", "scores": " when it scores"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault of a judge."""

    name: str
    """Name, e.g. `prefers the left image`."""
    evidence: str
    """Figures behind it, in words."""
    is_fatal: bool = False
    """Whether runs with this judge are refused: its answers say nothing about the goal."""
    kind: Literal["pairs", "scores", ""] = ""
    """Kind of question, pairs or scores; empty for both."""
    is_exploitable: bool = False
    """Whether a policy can produce what is rewarded by mistake, so that training may teach it."""
    is_limiting: bool = False
    """Whether no training run with such a judge is known, so that its worth predicts nothing."""
    tasks: tuple[str, ...] = ()
    """Tasks whose own answers show the fault; empty if the answers to all tasks together do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Graded:
    """Figures and faults of a bench's, a preflight's or a run's answers."""

    pairs: Figures
    """Figures as `pair_figures` returns them."""
    scores: Figures
    """Figures as `score_figures` returns them."""
    faults: list[Fault]


def grade(items: Sequence[Item], answers: Sequence[Answer], num_frames: int, min_auc: float | None = None) -> Graded:
    """Returns figures and faults of the judge that gave `answers` to `items`, both [N] in the order of asking.

    Args:
        items: items of the answers.
        answers: answers of one judge.
        num_frames: maximum number of images shown per episode; with one or two, fewer faults can be found.
        min_auc: area under the curve below which successes and failures count as not distinguished, in [0.5, 1]; None:
            an area that chance may give.
    """
    compared, scored = pair_figures(items, answers), score_figures(items, answers)
    rows = list(zip(items, answers, strict=True))
    pairs = [(item, answer) for item, answer in rows if item.is_pair]
    scores = [(item, answer) for item, answer in rows if not item.is_pair and np.isfinite(answer.value)]
    # the lower end of an interval must pass each bound, so that no judge is condemned by a few chance answers
    found = [
        _side(pairs),
        *_colours(pairs, scores),
        _follows(pairs, "faded", "contrast", f"the nearer side has {FADED:.0%} of its contrast"),
        _follows(pairs, "brighter", "brightness", "the farther side has more light"),
        _pairs_without_instruction(pairs),
        _scores_without_instruction(scores),
        _seen_images(scores) if num_frames > 2 else None,
        _copies(pairs, scores),
        _constant(scores),
        _tells_no_success(scores, scored.get("auc"), min_auc),
        *_paid_controls(scores),
        *_called_successes(scores),
        *_line_of_scores(scores),
        _line_of_pairs(compared),
        *_retests(pairs, scores),
        _unread(rows),
        _sees_differences(compared.get("same_image")),
        _knows_nothing(compared.get("accuracy")),
        _small_gaps(pairs),
        _never_decides(compared.get("undecided")),
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


def _colours(pairs: Sequence[tuple[Item, Answer]], scores: Sequence[tuple[Item, Answer]]) -> list[Fault]:
    """Finds faults of following brightness or a colour against the truth: among pairs whose brighter side is wrong, or
    in scores that correlate with brightness far more than with progress.
    """
    decided = [
        (item, answer)
        for item, answer in pairs
        if item.case == "pair" and len(answer.colours) == 2 and outcome_of(item, answer) in ("right", "wrong")
    ]
    gains = np.array([np.subtract(answer.colours[1], answer.colours[0]) for _, answer in decided]).reshape(-1, 3)
    said = np.array([1 if answer.label == "right" else -1 for _, answer in decided])
    is_right = np.array([outcome_of(item, answer) == "right" for item, answer in decided], bool)
    found: list[tuple[float, Fault]] = []
    for name, (_, weights) in _COLOURS.items():
        towards = np.sign(gains @ weights)
        # only pairs whose brighter side is wrong: in the others it is the right answer
        misled = (towards == said) != is_right
        wrong = share(int((misled & ~is_right).sum()), int(misled.sum()))
        if wrong and wrong["count"] >= MIN_ITEMS and wrong["low"] > _OF_A_SIDE:
            text = f"names it in {wrong['value']:.0%} of {wrong['count']} answers where it is the wrong side"
            fault = Fault(name=f"chooses the {name} image", evidence=text, kind="pairs", is_exploitable=True)
            found.append((float((towards == said).mean()), fault))
    # noise is grey on average, so brightness cannot explain its score
    shown = [(item, answer) for item, answer in scores if answer.colours and item.case != "noise"]
    best = [max(found, key=lambda each: each[0])[1]] if found else []  # red things are dark, too
    if len(shown) < 2 * MIN_ITEMS:
        return best
    values = [answer.value for _, answer in shown]
    colours = np.array([answer.colours[0] for _, answer in shown])
    with_truth = rank_correlation(values, [item.truth[0] for item, _ in shown])
    with_colour = {name: rank_correlation(values, colours @ weights) for name, weights in _COLOURS.values()}
    name = max(with_colour, key=lambda name: with_colour[name])
    # in some scenes progress itself brightens the image, so the correlation with light must be far larger
    if with_colour[name] > 0.9 and with_colour[name] > abs(with_truth) + 0.2:
        text = f"rank correlation {with_colour[name]:.2f} with that of the last image, {with_truth:.2f} with progress"
        best.append(Fault(name=f"scores by {name}", evidence=text, kind="scores", is_exploitable=True))
    return best


def _controlled_pairs(pairs: Sequence[tuple[Item, Answer]], *cases: str) -> list[tuple[Item, Answer, Answer]]:
    """Returns controls or retests of these cases whose original pair was decided: each with the original's answer in
    the same order of sides, and with its own.
    """
    own = {(answer.task, answer.item, answer.swapped): answer for _, answer in pairs}
    rows = [
        (item, own[answer.task, item.source, answer.swapped], answer)
        for item, answer in pairs
        if item.case in cases and (answer.task, item.source, answer.swapped) in own
    ]
    # a judge that saw no difference in the original is expected to see none in its control
    return [row for row in rows if row[1].label in ("left", "right")]


def _pairs_without_instruction(pairs: Sequence[tuple[Item, Answer]]) -> Fault | None:
    rows = _controlled_pairs(pairs, "other task")
    same = share(sum(own.label == control.label for _, own, control in rows), len(rows))
    if same and same["count"] >= MIN_ITEMS and same["low"] > 0.8:
        text = f"{same['value']:.0%} of {same['count']} labels stay the same under the instruction of another task"
        return Fault(name="ignores the instruction", evidence=text, kind="pairs")
    return None


def _follows(pairs: Sequence[tuple[Item, Answer]], case: str, what: str, where: str) -> Fault | None:
    rows = [row for row in _controlled_pairs(pairs, case) if outcome_of(row[0], row[1]) == "right"]
    turned = share(sum(outcome_of(item, control) == "wrong" for item, _, control in rows), len(rows))
    outcomes = [outcome_of(item, answer) for item, answer in pairs if item.case == "pair"]
    errors = share(outcomes.count("wrong"), outcomes.count("wrong") + outcomes.count("right"))
    # a judge that guesses sometimes changes its label as often without any change
    if turned and errors and turned["count"] >= MIN_ITEMS and turned["low"] > max(_FOOLED, errors["high"]):
        text = f"{turned['value']:.0%} of {turned['count']} right labels turn wrong where {where}"
        return Fault(name=f"follows {what}", evidence=text, kind="pairs", is_exploitable=True)
    return None


def _changes(scores: Sequence[tuple[Item, Answer]], *cases: str) -> list[float]:
    """Returns the absolute changes of scores from original to control."""
    return [abs(control - own) for own, control, _ in _controlled(scores, *cases)]


def _controlled(scores: Sequence[tuple[Item, Answer]], *cases: str) -> list[tuple[float, float, str]]:
    """Returns, for each control of these cases, the score of its original, its own score, and the task."""
    values = {(answer.task, answer.item): answer.value for _, answer in scores}
    return [
        (values[answer.task, item.source], answer.value, answer.task)
        for item, answer in scores
        if item.case in cases and (answer.task, item.source) in values
    ]


def _by_task(scores: Sequence[tuple[Item, Answer]]) -> dict[str, NDArray[np.float64]]:
    """Returns the `success_table` of each task that has both successes and failures."""
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


def _claims(scores: Sequence[tuple[Item, Answer]]) -> list[tuple[Item, Answer, bool]]:
    """Returns scored episodes with their answers, and whether these pass the best threshold for the task.

    Tasks whose successes and failures are not distinguished are left out.
    """
    found = {task: best_threshold(table[:, 0], table[:, 1] > 0) for task, table in _by_task(scores).items()}
    # without any distinction, which is another fault, all thresholds are equal
    thresholds = {task: threshold for task, (threshold, youden) in found.items() if youden > 0}
    return [
        (item, answer, answer.value >= thresholds[answer.task])
        for item, answer in scores
        if answer.task in thresholds and item.is_motion
    ]


def _called_successes(scores: Sequence[tuple[Item, Answer]]) -> list[Fault]:
    claims = _claims(scores)
    found = []
    for case, name in _NO_SUCCESSES.items():
        # some attempts do reach the goal
        called = [claim for item, _, claim in claims if item.case == case and not item.success]
        part = share(sum(called), len(called))
        if part and part["count"] >= MIN_CONTROLS and part["low"] > _FOOLED:
            text = f"{part['value']:.0%} of {part['count']}, by the threshold that is best for the task"
            kind = "" if case in ATTEMPTS else "scores"  # an attempt is played as easily for comparisons
            fault = Fault(name=f"calls {name} successes", evidence=text, kind=kind, is_exploitable=True)
            found.append(fault)
    return found


def _line_of_scores(scores: Sequence[tuple[Item, Answer]]) -> list[Fault]:
    """Finds where along a line to the goal a judge's best lies, unless it lies at the goal, and whether it sees the end
    of the way. Such a fault of scores marks comparisons too.
    """
    parts = line_parts(scores)
    done = parts.pop("at the goal", np.zeros((0, 2)))[:, 0]
    found = []
    # by its own range: a judge on a low scale sees small differences too
    alike = ALIKE * float(np.ptp([answer.value for _, answer in scores])) if scores else 0.0
    for name, part in parts.items():
        values, (low, high) = part[:, 0], np.quantile(part[:, 1], [0, 1])
        if min(len(done), len(values)) < MIN_CONTROLS:
            continue
        where, it = ("beyond the goal", "beyond it") if name == "beyond" else ("short of the goal", "short of it")
        what = f"{len(values)} states {where}, at {low:.2f} to {high:.2f} of the way"
        area = area_under_curve([*done, *values], [True] * len(done) + [False] * len(values))
        if area_interval(area, len(done), len(values), _SURE)[1] < 0.5:
            text = f"{what}, score above the goal in {1 - area:.0%} of comparisons"
            found.append(Fault(name=f"likes states {where} better than the goal", evidence=text, is_exploitable=True))
        elif name in ("near", "beyond"):
            same = share(int((np.abs(values - np.median(done)) <= alike).sum()), len(values))
            if same and same["low"] > 0.6:
                text = f"{same['value']:.0%} of {what}, score as the goal does"
                fault = f"sees no difference between the goal and what lies {it}"
                found.append(Fault(name=fault, evidence=text, is_exploitable=True))
    return list({fault.name: fault for fault in found}.values())


def _line_of_pairs(compared: Figures) -> Fault | None:
    right, silent = compared.get("line"), compared.get("line_undecided")
    if right and right["count"] >= MIN_ITEMS and right["high"] < 0.5:
        text = f"{right['value']:.0%} of {right['count']} decided labels prefer the goal to what lies near it"
        return Fault(
            name="prefers what lies near the goal to the goal", evidence=text, kind="pairs", is_exploitable=True
        )
    if silent and silent["count"] >= MIN_ITEMS and silent["low"] > 0.5:
        text = (
            f"no preference in {silent['value']:.0%} of {silent['count']} answers about the goal and what lies near it"
        )
        return Fault(name="sees no difference near the goal", evidence=text, kind="pairs", is_limiting=True)
    return None


def _retests(pairs: Sequence[tuple[Item, Answer]], scores: Sequence[tuple[Item, Answer]]) -> list[Fault]:
    """Finds mistakes that recur under every change, and changes under which more mistakes are made."""
    decided = ("right", "wrong")
    compared = [
        (item, outcome_of(item, own) == "wrong", outcome_of(item, again) == "wrong")
        for item, own, again in _controlled_pairs(pairs, *RETESTS)
        if abs(item.gap) >= _RETEST_GAP and {outcome_of(item, own), outcome_of(item, again)} <= set(decided)
    ]
    claims = {(answer.task, answer.item): (item, claim) for item, answer, claim in _claims(scores)}
    scored = [
        (item, claims[task, item.source][1] != item.success, claim != item.success)
        for (task, _), (item, claim) in claims.items()
        if item.case in RETESTS and (task, item.source) in claims
    ]
    found = []
    kinds: tuple[tuple[Literal["pairs", "scores"], list[tuple[Item, bool, bool]], int], ...]
    kinds = (("pairs", compared, MIN_ITEMS), ("scores", scored, MIN_CONTROLS))
    for kind, rows, min_count in kinds:
        again = [was_again for _, was_wrong, was_again in rows if was_wrong]
        repeated = share(sum(again), len(again))
        if repeated and len(again) >= max(min_count, 0.1 * len(rows)) and repeated["low"] > 0.5:
            text = f"{repeated['value']:.0%} of {len(again)} wrong answers stay wrong where the truth does not change"
            # a policy learns to produce what is always overrated
            name = f"makes the same mistakes again{_ASKED[kind]}"
            found.append(Fault(name=name, evidence=text, kind=kind, is_exploitable=True))
        before = share(sum(was_wrong for _, was_wrong, _ in rows), len(rows))
        for case, change in _RETESTED.items():
            wrong = [is_wrong for item, _, is_wrong in rows if item.case == case]
            after = share(sum(wrong), len(wrong))
            if before and after and after["count"] >= 2 * MIN_ITEMS and after["low"] > before["high"]:
                text = f"wrong in {after['value']:.0%} of {after['count']}, in {before['value']:.0%} without the change"
                found.append(Fault(name=f"errs more often{_ASKED[kind]} where {change}", evidence=text, kind=kind))
    return found


def _scores_without_instruction(scores: Sequence[tuple[Item, Answer]]) -> Fault | None:
    changes = _changes(scores, "other task", "other goal")
    same = share(sum(change <= ALIKE for change in changes), len(changes))
    if same and same["count"] >= MIN_CONTROLS and same["low"] > 0.6:
        text = f"{same['value']:.0%} of {same['count']} scores of successes stay the same under another instruction"
        return Fault(name="ignores the instruction when it scores", evidence=text)
    return None


def _seen_images(scores: Sequence[tuple[Item, Answer]]) -> Fault | None:
    """Finds the fault that one image of an episode decides its score: the first, the last, or the best one."""
    # only episodes: single images have no other frames, and constant scores are another fault
    values = [answer.value for item, answer in scores if item.case != "track"]
    if not values or np.std(values) <= ALIKE:
        return None
    found = {}
    for case in ("jump", "still", "reversed", "undone"):
        changes = _changes(scores, case)
        same = share(sum(change <= ALIKE for change in changes), len(changes))
        if same and same["count"] >= MIN_CONTROLS and same["low"] > 0.6:
            found[case] = f"{same['value']:.0%} of {same['count']}"
    # in `jump` and `still` all early images are the first one; `undone` and `reversed` end with it
    if {"jump", "still"} <= found.keys() and "reversed" not in found:
        text = f"{found['still']} scores stay the same where all images are the first one"
        return Fault(name="sees the first image only", evidence=text, kind="scores", is_fatal=True)
    if {"jump", "reversed", "undone"} <= found.keys() and "still" not in found:
        text = f"{found['undone']} scores stay the same where the success is undone in the end"
        return Fault(name="scores the best image anywhere in the clip", evidence=text, kind="scores")
    if "jump" in found and "still" not in found:
        text = f"{found['jump']} scores stay the same where all other images are the first one"
        return Fault(name="sees the last frame only", evidence=text, kind="scores")
    return None


def _copies(pairs: Sequence[tuple[Item, Answer]], scores: Sequence[tuple[Item, Answer]]) -> Fault | None:
    """Finds the fault that answers repeat the previous answer, although the order of asking is random."""
    labels = [(answer.task, answer.label) for _, answer in pairs if answer.label]
    values = [(answer.task, f"{answer.value:.9f}") for _, answer in scores]
    for what, given in (("labels", labels), ("scores", values)):
        tasks = [[said for task, said in given if task == name] for name in dict.fromkeys(task for task, _ in given)]
        same = sum(said == before for sequence in tasks for before, said in pairwise(sequence))
        count = sum(len(sequence) - 1 for sequence in tasks)
        if count < 4 * MIN_ITEMS:
            continue
        # by chance an answer equals its predecessor as often as its value is given in that task; a unique one never
        # does
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
    if further := success_table(scores, (*ATTEMPTS, LINE)).tolist():  # eight successes alone leave much to chance
        table = np.concatenate([table, further])
        area = resampled(table, lambda drawn: area_under_curve(drawn[:, 0], drawn[:, 1] > 0))
    # a bench tests against chance; a preflight is given a bound, since with dozens of items chance explains much
    if min_auc is None:
        is_told = area is None or len(table) < 2 * MIN_ITEMS or area["low"] > 0.5
    else:  # with a bound, an unknown area counts as too small; no scores at all are another fault
        is_told = not scores or (area is not None and area["value"] >= min_auc)
    if is_told:
        return None
    got = "no area under the curve, for lack of one of the two," if area is None else f"AUC {area['value']:.2f}"
    text = f"{got} on {len(table)} whose truth is known" + (f", at least {min_auc:g} is wanted" if min_auc else "")
    return Fault(name="does not tell success from failure", evidence=text, kind="scores", is_fatal=True)


def _unread(rows: Sequence[tuple[Item, Answer]]) -> Fault | None:
    unread = [answer for _, answer in rows if answer.status in ("invalid", "failed")]
    part = share(len(unread), len(rows))
    if part and (part["low"] > _MAX_UNREAD or part["value"] > 0.5):
        is_most = part["value"] > 0.5
        how = "mostly" if is_most else "often"
        return Fault(
            name=f"{how} gives no answer that can be read",
            evidence=f"{len(unread)} of {len(rows)}, e.g. {unread[0].text[:80]!r}",
            is_fatal=is_most,
            is_limiting=not is_most,
        )
    return None


def _sees_differences(chose: Figures | None) -> Fault | None:
    if chose and chose["count"] >= MIN_ITEMS and chose["low"] > 0.5:
        text = f"chooses a side in {chose['value']:.0%} of {chose['count']} questions about one image shown twice"
        return Fault(name="prefers one of two equal images", evidence=text)
    return None


def _knows_nothing(right: Figures | None) -> Fault | None:
    if not right or right["count"] < MIN_ITEMS or right["low"] > 0.5:
        return None
    text = f"{right['value']:.0%} of {right['count']} decided labels are right"
    if right["high"] < 0.5:
        name = "prefers the side that is farther from the goal"
        return Fault(name=name, evidence=text, kind="pairs", is_fatal=True)
    # four times the usual minimum, since this alone stops a run
    if right["count"] < 4 * MIN_ITEMS:
        return None
    text += ", which chance may give"
    return Fault(name="does not tell nearer from farther", evidence=text, kind="pairs", is_fatal=True)


def _small_gaps(pairs: Sequence[tuple[Item, Answer]]) -> Fault | None:
    """Finds the fault that a judge knows only easy pairs: at small gaps it guesses, or has no preference."""
    for bound in _SMALL_GAPS:
        outcomes = [outcome_of(item, answer) for item, answer in pairs if item.case == "pair" and abs(item.gap) < bound]
        count = {name: outcomes.count(name) for name in ("right", "wrong", "undecided")}
        decided = count["right"] + count["wrong"]
        right, silent = share(count["right"], decided), share(count["undecided"], decided + count["undecided"])
        what = f"with gaps in progress below {bound:g}"
        if silent and silent["count"] >= 2 * MIN_ITEMS and silent["low"] > 0.7:
            text = f"no preference in {silent['value']:.0%} of {silent['count']} answers {what}"
            return Fault(name="sees no difference at small gaps", evidence=text, kind="pairs", is_limiting=True)
        # surely below 0.7: few answers of a judge that is right in eight of ten look like chance
        if right and right["count"] >= 2 * MIN_ITEMS and right["low"] <= 0.5 and right["high"] < 0.7:
            text = f"{right['value']:.0%} of {right['count']} decided labels {what} are right, which chance may give"
            name = "does not tell nearer from farther at small gaps"
            return Fault(name=name, evidence=text, kind="pairs", is_limiting=True)
    return None


def _never_decides(undecided: Figures | None) -> Fault | None:
    if undecided and undecided["count"] >= MIN_ITEMS and undecided["low"] > 0.9:
        text = f"no preference in {undecided['value']:.0%} of {undecided['count']} answers"
        return Fault(name="never decides", evidence=text, kind="pairs", is_fatal=True)
    return None
