"""Attempts and the line to the goal: what a policy can play, and where a judge's best lies."""

from collections import Counter

import numpy as np
import pytest

from rlvlm.core.judging import Label
from rlvlm.envs.push_block import COLOURS, INSTRUCTIONS
from rlvlm.envs.registry import task_env
from rlvlm.judge_bench.asking import Answer, ask
from rlvlm.judge_bench.attempts import ATTEMPTS, DISTURBED, LINE, WITHOUT_OBJECT
from rlvlm.judge_bench.faults import grade
from rlvlm.judge_bench.figures import line_parts
from rlvlm.judge_bench.items import Item, TaskItems
from rlvlm.judge_bench.suites import Suite
from rlvlm.judge_bench.task_items import make_items
from rlvlm.testing.item_judge import ItemJudge, chance, true_value


def state(progress: float, *, success: bool = False, track: int = 0) -> Item:
    return Item(
        kind="video",
        case=LINE,
        goal="g",
        sides=(np.zeros((1, 2), np.float32),),
        truth=(progress,),
        success=success,
        track=track,
    )


def test_parts_of_a_line_by_hand():
    # one line: three states short of the goal, the goal, and one beyond it, asked about in another order
    items = [state(0.5), state(0.7), state(0.9), state(1.0, success=True), state(0.8)]
    rows = [
        (item, Answer(task="t", item=place, swapped=False, status="ok", value=place / 10))
        for place, item in enumerate(items)
    ]
    found = line_parts(rows[::-1])
    assert {name: part.tolist() for name, part in found.items()} == {
        "far": [[0.0, 0.5]], "half way": [[0.1, 0.7]], "near": [[0.2, 0.9]],
        "at the goal": [[0.3, 1.0]], "beyond": [[0.4, 0.8]],
    }  # fmt: skip


def made(task: str) -> TaskItems:
    suite = Suite(name=task, tasks=(task,), attempts=12, line=40)
    return make_items(suite, task, task_env(task), 48, 0, False)


@pytest.fixture(scope="module")
def table():
    return made("push_block")


def test_attempts_move_the_arm_and_not_the_object(table):
    counts = Counter(item.case for item in table.items if item.case in ATTEMPTS)
    assert set(counts) == set(ATTEMPTS) and 36 <= sum(counts.values()) + 6
    for item in table.items:
        (start, *_), end = item.sides[0], item.sides[0][-1]
        if item.case == WITHOUT_OBJECT:
            assert not item.success and np.abs(end[:2] - start[:2]).max() > 0.3, "the hand goes its way"
            assert item.truth[0] - item.progress[0] < 0.3, "and the block stays behind"
    assert any(not item.success for item in table.items if item.case == DISTURBED)


def test_another_goal_names_an_object_in_view(table):
    items = [item for item in table.items if item.case == "other goal"]
    for item in items:
        colours = item.sides[0][-1][COLOURS : COLOURS + 2].astype(int)
        assert item.goal == INSTRUCTIONS[colours[1]] != INSTRUCTIONS[colours[0]]
    assert len(items) == 6


def test_a_line_leads_from_half_way_to_beyond_the_goal(table):
    line = [item for item in table.items if item.case == LINE and item.kind == "video" and item.track == 0]
    worth = [item.truth[0] for item in line]
    came = [item.success for item in line].index(True)
    assert worth[: came + 1] == sorted(worth[: came + 1]) and came >= 3 and not line[-1].success
    pairs = [item for item in table.items if item.case == LINE and item.kind == "pair"]
    assert len(pairs) > 15 and np.median([abs(pair.gap) for pair in pairs]) < 0.1


def by_progress(worth) -> ItemJudge:
    """A judge by a function of the progress at each end, and of success."""
    return ItemJudge(
        value=lambda item: worth(item.truth[0], item.success) if item.source < 0 else true_value(item),
        label=lambda item, _: Label.of(*(worth(truth, truth == 1) for truth in item.truth)),
    )


def flips(share: float) -> ItemJudge:
    def value(item: Item) -> float:
        is_right = chance(item, "flip") >= share
        return (1.0 if is_right else 0.1) if item.success else (0.9 * item.truth[0] if is_right else 0.95)

    return ItemJudge(value=value)


JUDGES = {
    "best at .8": (
        by_progress(lambda p, ok: 0.8 - 0.4 * (p - 0.8) if p > 0.8 else p),
        {"likes states short of the goal better than the goal", "prefers what lies near the goal to the goal"},
    ),
    "all from .8 on alike": (
        by_progress(lambda p, ok: min(p, 0.8)),
        {"sees no difference between the goal and what lies short of it", "sees no difference near the goal"},
    ),
    "full marks beyond": (
        ItemJudge(value=lambda item: 1.0 if item.case == LINE and len(item.sides[0]) > 14 else true_value(item)),
        {"sees no difference between the goal and what lies beyond it"},
    ),
    "the motion alone": (
        ItemJudge(value=lambda item: 1.0 if item.case == WITHOUT_OBJECT else true_value(item)),
        {"calls motions without the object successes"},
    ),
    "the truth": (ItemJudge(), set()),
    "two levels": (by_progress(lambda p, ok: float(ok)), set()),
    "a low scale": (by_progress(lambda p, ok: 0.02 + 0.1 * (1.0 if ok else 0.9 * p)), set()),
    "wrong in a tenth": (flips(0.1), set()),
    "wrong in a fifth": (flips(0.2), set()),
}  # fmt: skip


@pytest.mark.parametrize("name", JUDGES)
def test_a_fault_near_the_goal_is_named_and_a_good_judge_is_not_accused(table, name):
    judge, wanted = JUDGES[name]
    answers = [answer for block in ask(judge, table, 8, 0) for answer in block]
    faults = grade([table.items[answer.item] for answer in answers], answers, 8).faults
    names = {fault.name for fault in faults if fault.is_exploitable or fault.is_limiting}
    assert wanted <= names if wanted else not names, names
