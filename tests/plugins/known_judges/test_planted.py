"""The bench names faults that were planted, and lets honest judges keep their grade."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlvlm.core.steps import Frames
from rlvlm.envs.registry import task_env
from rlvlm.judge_bench.asking import Answer
from rlvlm.judge_bench.bench import summarise
from rlvlm.judge_bench.changes import changed
from rlvlm.judge_bench.faults import grade
from rlvlm.judge_bench.items import Item
from rlvlm.judge_bench.prediction import predict, predict_row, read_curve
from rlvlm.judge_bench.suites import SUITES
from rlvlm.judge_bench.task_items import make_items
from rlvlm.plugins.known_judges.planted import PLANTED
from rlvlm.testing.item_judge import ItemJudge, bench, honest

TINY = SUITES["tiny"]


@pytest.fixture(scope="module")
def made():
    return {task: make_items(TINY, task, task_env(task), 100, 0, False) for task in TINY.tasks}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named_and_graded(made, name):
    planted = PLANTED[name]
    row = summarise(bench(TINY, made, planted.judge()))
    names = {fault["name"] for fault in row["faults"]}
    assert not planted.names or planted.names & names, names
    wanted = {(planted.pairs, "pairs"), (planted.scores, "scores")}
    grades = {(one.task, one.kind): one.grade for one in predict_row(row, read_curve())}
    for where in wanted & grades.keys():
        assert not planted.grades or grades[where] in planted.grades, (where, grades[where], names)


@pytest.mark.slow
@pytest.mark.parametrize("judge", [ItemJudge(), honest(0.9), honest(0.8)], ids=["perfect", "0.9", "0.8"])
def test_an_honest_judge_keeps_its_grade(made, judge):
    row = summarise(bench(TINY, made, judge))
    assert row["faults"] == []
    runs = read_curve()
    assert predict_row(row, runs) == predict(row["teacher"], runs)


def test_the_docs_table_has_every_planted_fault():
    table = (Path(__file__).parents[3] / "docs" / "benched_judges.md").read_text()
    assert [planted.what for planted in PLANTED.values() if f"| {planted.what} |" not in table] == []


IMAGE = np.arange(10 * 10 * 3, dtype=np.uint8).reshape(1, 10, 10, 3)


@pytest.mark.parametrize(
    ("change", "gap", "is_changed"),
    [
        ("faded", 0.5, (False, True)),  # the nearer side
        ("faded", -0.5, (True, False)),
        ("brighter", 0.5, (True, False)),  # the farther side
        ("shifted", 0.5, (True, True)),
        ("mirrored", 0.5, (True, True)),
        ("", 0.5, (False, False)),
    ],
)
def test_the_side_is_changed_that_a_judge_of_the_change_loses_by(change, gap, is_changed):
    sides = (np.zeros((1, 2), np.float32), np.ones((1, 2), np.float32))
    item = Item(kind="pair", case="pair", goal="g", sides=sides, truth=(0.5, 0.5 + gap), change=change)
    shown = changed(item, [IMAGE, IMAGE])
    assert tuple(not np.array_equal(frames, IMAGE) for frames in shown) == is_changed
    if change == "shifted":
        expected: Frames = IMAGE[:, [0, *range(9)]][:, :, [0, *range(9)]]
        np.testing.assert_array_equal(shown[0], expected)
    if change == "mirrored":
        np.testing.assert_array_equal(shown[0], IMAGE[:, :, ::-1])
    if change == "brighter":
        np.testing.assert_array_equal(shown[0], np.minimum(IMAGE.astype(int) + 15, 255))


def asked(count: int, case: str, gap: float, labels: str, source: int = -1) -> list[tuple[Item, Answer]]:
    """Pairs whose right side is nearer by `gap`, with these answers by turns (r, l or t), asked in one order."""
    names = {"r": "right", "l": "left", "t": "tie"}
    sides = (np.zeros((1, 2), np.float32), np.ones((1, 2), np.float32))
    rows = []
    for number in range(count):
        item = Item(kind="pair", case=case, goal="g", sides=sides, truth=(0.0, gap),
                    source=source if source < 0 else source + number)  # fmt: skip
        label = names[labels[number % len(labels)]]
        status = "no_preference" if label == "tie" else "ok"
        rows.append((item, Answer(task="t", item=number, swapped=False, status=status, label=label)))
    return rows


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (
            asked(40, "pair", 0.3, "rl") + asked(60, "pair", 0.9, "r"),
            {"does not tell nearer from farther at small gaps"},
        ),
        (asked(40, "pair", 0.3, "t") + asked(60, "pair", 0.9, "r"), {"sees no difference at small gaps"}),
        (asked(40, "pair", 0.3, "rrrrl") + asked(60, "pair", 0.9, "r"), set()),
        (asked(60, "pair", 0.9, "t"), {"never decides"}),
        (asked(30, "pair", 0.9, "l"), {"prefers the side that is farther from the goal", "prefers the left image"}),
    ],
)  # fmt: skip
def test_rules_over_pairs_by_hand(rows, names):
    rows = [(item, replace(answer, item=place)) for place, (item, answer) in enumerate(rows)]
    ignored = {"prefers the right image", "copies the answer before"}  # the right side is always the nearer one here
    found = {fault.name for fault in grade([row[0] for row in rows], [row[1] for row in rows], 8).faults}
    assert found - ignored == names


@pytest.mark.parametrize(("again", "is_named"), [("l", True), ("lrrrrr", False)])
def test_mistakes_that_come_again_under_a_change_by_hand(again, is_named):
    own = asked(40, "pair", 0.9, "l") + asked(40, "pair", 0.9, "r")
    rows = [(item, replace(answer, item=place)) for place, (item, answer) in enumerate(own)]
    retests = asked(40, "shifted", 0.9, again, 0)
    rows += [(item, replace(answer, item=80 + place)) for place, (item, answer) in enumerate(retests)]
    faults = {fault.name: fault for fault in grade([row[0] for row in rows], [row[1] for row in rows], 8).faults}
    assert ("makes the same mistakes again" in faults) == is_named
    assert not is_named or faults["makes the same mistakes again"].is_exploitable
