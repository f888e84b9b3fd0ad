"""The small draw of the bench before a run: who may start one, and in what words the others are refused."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlvlm.core.judging import Score, Stamp, Status, Verdict
from rlvlm.demonstrations.trajectory import RobotTrajectory
from rlvlm.envs.registry import task_env
from rlvlm.judge_bench.asking import Reference
from rlvlm.judge_bench.items import Item, TaskItems
from rlvlm.judge_bench.preflight import (
    JudgeRefused,
    compared_suite,
    known_items,
    known_recordings,
    preflight,
    scored_suite,
)

STAMP = Stamp(judge="by_hand", revision="1", prompt="numbers/1", decoding="")


@pytest.fixture(scope="module")
def made():
    return known_items(scored_suite("push_block", 32), task_env("push_block"), 48, 0, False).closed()


class Says:
    """Says a number of each item; None is an answer that cannot be read."""

    def __init__(self, value: float | None) -> None:
        self.given = value

    def value(self, item: Item) -> float | None:
        return self.given

    def answers(self, asked: Sequence[tuple[Item, bool]]) -> list[Verdict | Score]:
        values = [self.value(item) for item, _ in asked]
        return [
            Score(status=Status.INVALID if one is None else Status.OK, value=one, stamp=STAMP, text="a dog")
            for one in values
        ]


class Progress(Says):
    """Right, but for one answer of three that cannot be read."""

    def value(self, item: Item) -> float | None:
        return None if item.sides[0].sum() % 3 < self.given else item.truth[0]


def tried(judge: Reference | Says, made: TaskItems, lines: list[str] | None = None) -> dict[str, Any]:
    return preflight(judge, made, 2, 0, min_auc=0.75, log=([] if lines is None else lines).append)


def test_the_oracle_starts_and_its_figures_are_the_benchs(made):
    lines: list[str] = []
    found = tried(Reference("oracle"), made, lines)
    assert found["auc"]["value"] == 1.0 and found["threshold"] == 0.5 and not lines
    controls = [item.case for item in made.items if item.source >= 0]
    assert {case: controls.count(case) for case in controls} == {"reversed": 8, "still": 8, "other goal": 8}
    hacked = sum(item.case == "hacked" for item in made.items)
    assert found["auc"]["count"] == len(made.items) - len(controls) - hacked > 48 and hacked == 8


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (Reference("random"), r"does not tell success from failure \(AUC 0.\d\d on \d\d .* at least 0.75 is wanted"),
        (Reference("left"), r"scores everything alike \(0.50 for all of \d\d\); it does not tell success"),
        (Says(None), r"mostly gives no answer that can be read \(\d\d of \d\d, e.g. 'a dog'\)"),
        (Progress(2.0), r"mostly gives no answer that can be read"),
    ],
)
def test_a_judge_that_ignores_the_goal_is_refused_in_the_benchs_words(made, judge, message):
    with pytest.raises(JudgeRefused, match=message) as caught:
        tried(judge, made)
    assert caught.value.exit_code == 5 and "--judge.faulty ok" in caught.value.fix


class CopiesSome(Says):
    """Right, but that every fourth answer is the one before."""

    def answers(self, asked: Sequence[tuple[Item, bool]]) -> list[Verdict | Score]:
        values = [0.9 * item.truth[0] + 1e-4 * place for place, (item, _) in enumerate(asked)]
        values[3::4] = values[2::4][: len(values[3::4])]
        return [Score(status=Status.OK, value=value, stamp=STAMP) for value in values]


def test_a_fault_that_a_run_can_live_with_is_logged(made):
    lines: list[str] = []
    tried(CopiesSome(0.0), made, lines)
    assert len(lines) == 1 and lines[0].startswith("the judge copies the answer before (")


def test_single_bad_answers_do_not_stop_a_run(made):
    assert tried(Progress(1.0), made)["auc"]["value"] > 0.9


def test_pairs_are_asked_in_both_orders_and_refused_in_the_benchs_words():
    made = known_items(compared_suite("cartpole", 30), task_env("cartpole"), 48, 0, False).closed()
    assert {item.kind for item in made.items} == {"pair"} and len(made.items) == 30
    figures = preflight(Reference("oracle"), made, 1, 0)
    assert figures["accuracy"]["value"] == 1.0 and figures["accuracy"]["count"] == 60
    with pytest.raises(JudgeRefused, match="prefers the left image .*; it does not tell nearer from farther") as caught:
        preflight(Reference("left"), made, 1, 0)
    assert "--judge.faulty ok" in caught.value.fix


class PathLength(Says):
    """How far things moved, whatever the order and the goal."""

    def value(self, item: Item) -> float | None:
        return float(np.ptp(item.sides[0], axis=0).sum()) / 100


def test_an_exploitable_judge_stops_a_run_unless_the_user_insists(made):
    lines: list[str] = []
    with pytest.raises(JudgeRefused, match="when it is shown backwards"):
        tried(PathLength(0.0), made)
    preflight(PathLength(0.0), made, 2, 0, refuses_faulty=False, log=lines.append)
    for how in ("when it is shown backwards", "under another goal of the scene"):
        assert any(line.startswith(f"the judge scores a success as high {how} (") for line in lines), lines


def test_the_words_of_the_user_have_no_other_goal():
    made = known_items(scored_suite("push_block", 4), task_env("push_block"), 48, 0, False, goal="tidy up").closed()
    assert {item.goal for item in made.items} == {"tidy up"} and "other goal" not in {item.case for item in made.items}


@pytest.mark.parametrize(
    ("sentences", "other"), [(("open it", "close it"), "other goal"), (("open it", "open it"), "other task")]
)
def test_recorded_episodes_are_shown_backwards_still_and_under_another_sentence(sentences, other):
    films = [
        RobotTrajectory(
            name=f"{number}",
            file=Path("film"),
            instruction=sentences[number % 2],
            actions=np.zeros((9, 0), np.float32),
            proprio=np.zeros((9, 0), np.float32),
            look=lambda steps: np.tile((10 * steps).astype(np.uint8)[:, None, None, None, None], (1, 1, 8, 8, 3)),
            success=number < 4,
        )
        for number in range(6)
    ]
    made = known_recordings(scored_suite("film", 8), films, 48, 0)
    controls = [item for item in made.items if item.source >= 0]
    assert {item.case for item in controls} == {"reversed", "still", other} and len(controls) == 12
    for item in controls:
        (own,), (side,) = made.items[item.source].sides, item.sides
        assert np.array_equal(side, {"reversed": own[::-1], "still": own[[0] * len(own)]}.get(item.case, own))
        assert (item.goal != made.items[item.source].goal) == (item.case == other) and not item.success
    assert preflight(Reference("oracle"), made, 8, 0)["auc"]["value"] == 1
