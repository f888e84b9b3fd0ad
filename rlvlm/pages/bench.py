"""The page of judge-bench, and what it prints: whether to train with the judge, its faults, charts, worst answers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlvlm.core.steps import spread
from rlvlm.judge_bench.asking import Answer
from rlvlm.judge_bench.bench import Measured
from rlvlm.judge_bench.changes import changed
from rlvlm.judge_bench.figures import outcome_of
from rlvlm.judge_bench.items import CASES, Item, TaskItems
from rlvlm.judge_bench.prediction import ExpectedSuccess
from rlvlm.judge_bench.rows import number_cell, share_cell
from rlvlm.pages.answers import Answers
from rlvlm.pages.bench_charts import ASKED_FOR, draw_teaching
from rlvlm.pages.judge import answer_sections, pair_card, score_card
from rlvlm.pages.page import Card, Section, Table

TASK_HEADS = ("pairs right", "undecided", "order kept", "AUC of success", "VOC")
"""Columns of the tables with a line per task."""
GRADE_HEADS = ("task", "asked for", "for training", "worth", "expected success")
"""Columns of the table that says whether to train; the grade comes early, where a phone shows it."""
REHEARSAL_HEADS = ("task", "kind", "verdict", "judge", "truth", "difference", "paid failures", "cost")
"""Columns of the table of rehearsals."""
MAX_WORST = 8
"""Wrong answers shown of each kind."""
_SHOWN = 4
"""Images of an episode on the page."""
_TAKEN = {"assumed": "all are taken for successes", "none": "none is taken for a success"}


def bench_sections(
    row: Mapping[str, Any], found: Measured, runs: Sequence[Mapping[str, str]], worst: "WorstAnswers"
) -> list[Section]:
    """Returns the sections of a bench.

    Args:
        row: row returned by `judge_bench.bench.summarise`, with its `prediction`.
        found: the answers behind it.
        runs: rows of `prediction.read_curve`.
        worst: the worst answers.
    """
    name, bench, scores = judge_name(row), row["bench"], row["figures"]["scores"]
    predictions = [ExpectedSuccess(**prediction) for prediction in row["prediction"]]
    parts = {task: Answers(name=task, num_frames=found.num_frames) for task in found.answers}
    whole = Answers(name=name, num_frames=found.num_frames)
    for task, own in parts.items():
        own.items, own.answers = found.rows([task])
    whole.items, whole.answers = found.rows()
    how = "Questions out of the simulators, whose answers are known. Intervals are 95 %."
    stopped = [] if bench["is_whole"] else ["Stopped before the end: the figures cover the answers given until then."]
    grades = [Table(heads=GRADE_HEADS, rows=lines, words=range(5))] if (lines := grade_lines(predictions)) else []
    tables = [Table(heads=("task", *TASK_HEADS), rows=task_lines(row))]
    if ratings := row["figures"].get("published", {}).get("confusion"):
        lines = [(f"{rating}", *map(str, counts)) for rating, counts in enumerate(ratings, start=1)]
        tables.append(Table(heads=("rating: true, by the judge's 1 + 4 score", "1", "2", "3", "4", "5"), rows=lines))
    if means := scores.get("means"):
        means = [(case, f"{value:.2f}") for case, value in means.items()]
        tables.append(Table(heads=("mean score of a case or control", ""), rows=means))
    return [
        Section(notes=[how], alerts=stopped),
        Section(heading="Good enough to train with?", tables=grades, notes=grade_notes(row)),
        Section(heading="What it would teach", charts=draw_teaching(predictions, runs)),
        _rehearsal_section(found),
        *answer_sections({name: row}, [whole], list(parts.values()) if len(parts) > 1 else ()),
        Section(
            heading="What a label costs",
            points=[(f"asking {way['name']}", way_of_asking(way)) for way in row["remedies"]],
        ),
        Section(heading="The worst answers to pairs", cards=worst.pairs),
        Section(heading="The worst scores", cards=worst.scores),
        Section(
            heading="Tasks",
            tables=tables,
            points=[
                *bench.get("truth", {}).items(),
                *((f"{task} is left out", why) for task, why in bench["left_out"].items()),
            ],
        ),
    ]


def _rehearsal_section(found: Measured) -> Section:
    """Returns what a search that follows the judge reached, and the judge's best-liked failures."""
    lines, cards = [], []
    for task, rehearsals in found.rehearsals.items():
        for each in rehearsals:
            row = each.row()
            interval = "-" if row["low"] is None else f"{each.difference:.2f} ({each.low:.2f} to {each.high:.2f})"
            cost = f"{each.questions} questions, {each.seconds:.0f} s"
            shares = (number_cell(row["judged"]), number_cell(row["control"]), interval)
            lines.append((task, each.kind, each.verdict, *shares, share_cell(each.fooled), cost))
            for episode, frames in each.failures[:MAX_WORST]:
                said = f"no success: {episode.trick}, {episode.progress:.2f} of the way; scored {episode.score:.2f}"
                cards.append(score_card(f"{task}: {episode.goal}", frames, "", facts=[said]))
    stopped = [f"{task}: {each.stopped}" for task, own in found.rehearsals.items() for each in own if each.stopped]
    note = (
        "A search follows the judge, through a model of its answers, and the same search follows the truth made as "
        "coarse as the judge and wrong at random as often. The shares are those of ends in true success; the "
        "difference, with its 99 % interval, is what a policy can lose to this judge. Paid failures: ends that fail "
        "and get a success's marks. Below are the failures that it likes best."
    )
    tables = [Table(heads=REHEARSAL_HEADS, rows=lines, words=range(3))] if lines else []
    notes = [note] if lines else []
    return Section(heading="Rehearsal: where a search leads", tables=tables, notes=notes, alerts=stopped, cards=cards)


class WorstAnswers:
    """Collects the worst answers with their images, task by task, since an env exists only while it is asked about.

    Args:
        num_frames: maximum number of images per episode that the judge was shown.
    """

    def __init__(self, num_frames: int) -> None:
        self._num_frames = num_frames
        self._pairs: list[tuple[float, Card]] = []
        self._scores: list[tuple[float, Card]] = []

    def add(self, made: TaskItems, answers: Sequence[Answer]) -> None:
        """Takes in the answers to a task."""
        judged = [(made.items[answer.item], answer) for answer in answers]
        # wrong labels with the widest gaps, one order of each pair
        wrong = {
            answer.item: (item, answer)
            for item, answer in judged
            if item.case == "pair" and outcome_of(item, answer) == "wrong"
        }
        widest = sorted(wrong.values(), key=lambda pair: -abs(pair[0].gap))[:MAX_WORST]
        # drawn now, a few more than are shown: the task's env is closed when the next one begins
        self._pairs += [(abs(item.gap), _pair_card(made, item, answer)) for item, answer in widest]
        # scores of episodes, turns and controls that are farthest from the truth, 0 or 1
        scored = [
            (abs(answer.value - item.success), item, answer)
            for item, answer in judged
            if item.is_motion and math.isfinite(answer.value) and item.case != "jump"
        ]
        farthest = sorted(scored, key=lambda row: -row[0])[:MAX_WORST]
        self._scores += [(miss, self._score_card(made, item, answer)) for miss, item, answer in farthest]

    @property
    def pairs(self) -> list[Card]:
        """Cards of pairs, the worst first."""
        return [card for _, card in sorted(self._pairs, key=lambda row: -row[0])[:MAX_WORST]]

    @property
    def scores(self) -> list[Card]:
        """Cards of scores, the worst first."""
        return [card for _, card in sorted(self._scores, key=lambda row: -row[0])[:MAX_WORST]]

    def _score_card(self, made: TaskItems, item: Item, answer: Answer) -> Card:
        (side,) = item.sides
        shown = side[-1:] if self._num_frames == 1 else spread(side, min(_SHOWN, self._num_frames))
        (frames,) = changed(item, [made.draw_side(item, 0, shown)])
        truth = "a success" if item.success else "no success"
        kind = item.case if item.case in CASES else f"control: {item.case}"
        said = f"scored {answer.value:.2f}; {truth} ({kind}, progress {item.truth[0]:.2f})"
        return score_card(f"{answer.task}: {item.goal}", frames, answer.text, facts=[said])


def _pair_card(made: TaskItems, item: Item, answer: Answer) -> Card:
    order = (1, 0) if answer.swapped else (0, 1)
    sides = [
        (name, made.draw_side(item, place, item.sides[place][-1:])[0], f"progress {item.truth[place]:.2f}")
        for name, place in zip(("left", "right"), order, strict=True)
    ]
    return pair_card(f"{answer.task}: {item.goal}", sides, answer.label, answer.p, answer.text)


def grade_lines(predictions: Sequence[ExpectedSuccess]) -> list[tuple[str, ...]]:
    """Returns the predictions as cells under `GRADE_HEADS`, one line per task and kind of question."""
    found = []
    for expected in predictions:
        success = "-"
        if expected.success is not None:
            interval = f"({expected.low:.2f} to {expected.high:.2f})"
            success = f"{expected.success:.2f} {interval}, from {expected.before:.2f}, {expected.count} runs"
        worth = f"{100 * expected.worth:.0f} % ({100 * expected.worth_low:.0f} to {100 * expected.worth_high:.0f})"
        found.append((expected.task, ASKED_FOR[expected.kind], expected.grade, worth, success))
    return found


def grade_notes(row: Mapping[str, Any]) -> list[str]:
    """Returns notes on the columns of `grade_lines`, and on the grades of tasks without runs."""
    rule = row["bench"].get("success")  # rows of older benches have none
    notes = [f"The data do not say which episodes succeeded: with --success {rule}, {_TAKEN[rule]}."] if rule else []
    if not row["prediction"]:
        return [*notes, "Nothing can be said: neither pairs nor successes beside failures were asked about."]
    notes += [
        "Worth, with its 90 % interval: how often a judge is right that always decides and says as much; 50 % is "
        "chance, below it misleads."
    ]
    if any(prediction["grade"] == "can be fooled" for prediction in row["prediction"]):
        notes.append("Can be fooled: it pays for what a policy can do without reaching the goal, see its faults.")
    for fault in (fault for fault in row["faults"] if fault.get("is_limiting")):  # rows of older benches have none
        where = f" on {', '.join(fault['tasks'])}" if fault["tasks"] else ""
        notes.append(
            f"Uncertain at best{where}: it {fault['name']}, and no run is known with a judge that errs like this."
        )
    for kind, name in ASKED_FOR.items():
        grades = ("probably good enough", "uncertain", "probably too weak")  # the others do not rest on other tasks
        unproven = [
            prediction
            for prediction in row["prediction"]
            if prediction["kind"] == kind and prediction["success"] is None
        ]
        unproven = [prediction for prediction in unproven if prediction["grade"] in grades]
        if not unproven:
            continue
        never, always = unproven[0]["never"], unproven[0]["always"]
        limits = [] if never is None else [f"none learned up to a worth of {100 * never:.0f} %"]
        limits += [] if always is None else [f"all learned from {100 * always:.0f} % on"]
        of_all = f"of all runs known {', '.join(limits)}" if limits else "nor of another task"
        what = f"{name.capitalize()} without an expected success"
        notes.append(f"{what}: no training runs of the task are known with such a judge; {of_all}.")
    return notes


def way_of_asking(way: Mapping[str, Any]) -> str:
    """Returns the cost and worth of a label for one way of asking (`judge_bench.remedies`), and its settings."""
    says = (
        f"labels worth those of a judge that is right in {100 * way['worth']:.0f} %, {way['undecided']:.0%} undecided"
    )
    settings = f" ({way['settings']})" if way["settings"] else ""
    if way["calls"] is None:
        return f"{says}: no number of questions teaches{settings}"
    return f"{says}: {way['calls']:.1f} questions say as much as a label that is certain{settings}"


def judge_name(row: Mapping[str, Any]) -> str:
    """Returns the name of the measured judge, with its prompt."""
    judge = row["judge"]
    path = "with the hand's path" if row["bench"].get("draw_path") else ""
    return " ".join(filter(None, (judge["judge"], judge["prompt"], path)))


def task_lines(row: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns one line of cells per task."""
    return [
        (
            task,
            share_cell(figures["pairs"].get("accuracy")),
            share_cell(figures["pairs"].get("undecided")),
            share_cell(figures["pairs"].get("consistent")),
            number_cell(figures["scores"].get("auc")),
            number_cell(figures["scores"].get("voc")),
        )
        for task, figures in row["tasks"].items()
    ]
