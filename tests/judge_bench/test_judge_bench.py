"""The bench end to end, on two quick tasks: references in the right order, items and figures by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rlvlm.core.errors import UsageError
from rlvlm.demonstrations.trajectory import CorruptEpisode, RobotTrajectory
from rlvlm.envs.registry import make_env, task_env
from rlvlm.judge_bench.asking import Answer, Reference
from rlvlm.judge_bench.bench import Measured, measure, summarise
from rlvlm.judge_bench.controls import FAILURES, RETESTS
from rlvlm.judge_bench.faults import grade
from rlvlm.judge_bench.figures import pair_figures, pooled, score_figures, teacher_table
from rlvlm.judge_bench.items import MIN_GAP, Item, draw_gap_pairs
from rlvlm.judge_bench.prediction import predict_row, read_curve
from rlvlm.judge_bench.suites import SUITES, Suite, find_suite
from rlvlm.judge_bench.task_items import make_items, recorded_items
from rlvlm.judges.config import JudgeConfig
from rlvlm.preferences.teachers import read_shares
from rlvlm.reports.compare_benches import compare_benches, differences
from rlvlm.rewards.scorers import read_scores
from rlvlm.testing import fooled

SMALL = Suite(name="small", tasks=("push_block", "cartpole"), episodes=12, pairs=40, videos=6, controls=6, tracks=2)
PX = 48
CONFIG = JudgeConfig(image_px=PX)


@pytest.fixture(scope="module")
def made():
    return {task: make_items(SMALL, task, task_env(task), PX, 0, False) for task in SMALL.tasks}


def run(judge) -> Measured:
    return measure(SMALL, judge, CONFIG, num_frames=8)


@pytest.fixture(scope="module")
def rows():
    """Of the references."""
    return {name: summarise(run(Reference(name))) for name in ("oracle", "random", "left")}


FOOLED = {"motion": "can be fooled", "hand_distance": "can be fooled", "arm_in_view": "too weak",
          "long_episodes": "too weak", "brightness": "too weak"}  # fmt: skip
"""Grades of `rlvlm.testing.fooled` as scorers of push_block."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "grade"), FOOLED.items())
def test_a_judge_that_a_policy_can_fool_is_not_good_enough(name, grade):
    """The first two tell the scripts' successes from failures, area under the curve 0.9 and more."""
    suite = Suite(name="push_block", tasks=("push_block",), pairs=0, tracks=0)
    row = summarise(measure(suite, getattr(fooled, name)(CONFIG), CONFIG, num_frames=8))
    (found,) = (one for one in predict_row(row, read_curve()) if one.is_asked)
    names = {fault["name"] for fault in row["faults"]}
    assert (found.task, found.kind, found.grade) == ("push_block", "scores", grade), names
    assert grade != "can be fooled" or found.low == 0, "a policy may seek out its mistakes"
    if name in ("motion", "hand_distance"):
        assert row["figures"]["scores"]["auc"]["value"] > 0.85
        assert "scores a success as high when it is shown backwards" in names


def test_references_come_in_the_right_order(rows):
    pairs = {name: row["figures"]["pairs"] for name, row in rows.items()}
    assert pairs["oracle"]["accuracy"]["value"] == 1.0 and rows["oracle"]["faults"] == []
    assert pairs["random"]["accuracy"]["low"] < 0.5 < pairs["random"]["accuracy"]["high"]
    assert pairs["left"]["said_left"]["value"] == 1.0 and pairs["left"]["consistent"]["value"] == 0.0
    names = {name: {fault["name"] for fault in row["faults"]} for name, row in rows.items()}
    assert "prefers the left image" in names["left"] and "scores everything alike" in names["left"]
    assert "does not tell nearer from farther" in names["random"]
    json.dumps(rows, allow_nan=False)


def test_items_are_the_same_each_time_and_cover_every_case(made):
    again = make_items(SMALL, "push_block", task_env("push_block"), PX, 0, False)
    first = made["push_block"]
    assert again.digest == first.digest and again.looks == first.looks
    assert make_items(SMALL, "push_block", task_env("push_block"), PX, 1, False).digest != first.digest
    pairs = [item for item in first.items if item.case == "pair"]
    assert min(abs(item.gap) for item in pairs) >= MIN_GAP and len(pairs) == SMALL.pairs
    assert np.ptp([abs(item.gap) for item in pairs]) > 0.4
    cases = {item.case for item in first.items}
    assert {"success", "near miss", "failure", "cut short", "track", "same image", "jump", "faded"} <= cases
    assert {*FAILURES, *RETESTS} - {"other camera"} <= cases  # the table has one camera
    for item in first.items:
        if item.case in FAILURES and item.kind == "video":
            assert first.items[item.source].success and not item.success
        if item.case in RETESTS:
            own = first.items[item.source]
            assert item.truth == own.truth and item.success == own.success and own.goal in item.goal
        assert not item.progress or len(item.progress) == len(item.sides[0])


@pytest.mark.parametrize(
    ("task", "goal", "is_mirrored"),
    [
        ("push_block", "", True),
        ("push_block", "push the block to the LEFT of the pad", False),
        ("cartpole", "", True),
        ("number_line", "", False),  # digits
    ],
)
def test_items_are_mirrored_where_nothing_knows_left_from_right(task, goal, is_mirrored):
    suite = replace(SMALL, name=task, tasks=(task,), goal=goal)
    items = make_items(suite, task, task_env(task), PX, 0, False).items
    kinds = {item.kind for item in items if item.case == "mirrored"}
    assert kinds == ({"pair", "video"} if is_mirrored else set())


@pytest.mark.parametrize(("task", "across"), [("push_block", [0, 2, 4, 6]), ("cartpole", [0])])
def test_a_mirrored_image_of_a_symmetric_env_is_that_of_a_mirrored_state(made, task, across):
    (states,) = next(item for item in made[task].items if item.case == "success").sides
    turned = states.copy()
    turned[:, across] *= -1
    env = make_env(task, task_env(task), 0)
    frames, mirrored = (env.draw_sized(shown, PX).astype(int) for shown in (states, turned))
    assert env.is_symmetric and np.abs(frames[:, :, ::-1] - mirrored).max() <= 1


def test_turns_are_asked_about_where_the_judge_rates_turns():
    """Nothing of a game of cards is physics: rows of two machines are about the same, or `VERSION` must be raised."""
    digest = make_items(SMALL, "number_line", task_env("number_line"), PX, 0, False).digest
    assert digest == "255defb465e36f8e95326fb5d3b667ee3427534be84a5fe12c85488bab76b15f"
    items = make_items(replace(SMALL, pairs=4), "number_line", task_env("number_line"), PX, 0, True).items
    turns = [item for item in items if item.kind == "turn" and item.case in ("nearer", "farther")]
    assert {item.case for item in turns} == {"nearer", "farther"}
    assert all(item.action in ("+", "-") and len(item.sides[0]) == 2 for item in turns)


def pair(truth: tuple[float, float], case: str = "pair", source: int = -1) -> Item:
    sides = (np.zeros((1, 2), np.float32), np.ones((1, 2), np.float32))
    return Item(kind="pair", case=case, goal="g", sides=sides, truth=truth, source=source)


def said(label: str, place: int, swapped: bool = False) -> Answer:
    return Answer(
        task="t", item=place, swapped=swapped, status="ok" if label != "tie" else "no_preference", label=label
    )


def test_pair_figures_by_hand():
    # two pairs in both orders: the first right twice, the second left whatever is shown: right once and wrong once
    items = [pair((0.1, 0.95)), pair((0.1, 0.95)), pair((0.5, 0.4)), pair((0.5, 0.4)), pair((0.2, 0.2), "same image")]
    answers = [said("right", 0), said("left", 0, True), said("left", 1), said("left", 1, True), said("tie", 2)]
    found = pair_figures(items, answers)
    assert found["accuracy"]["value"] == 0.75 and found["said_left"]["value"] == 0.75
    assert found["consistent"]["value"] == 0.5
    assert found["same_image"]["value"] == 0.0 and found["undecided"]["value"] == 0.0
    assert found["by_difficulty"][8] == [2, 0, 0] and found["by_difficulty"][0] == [1, 1, 0]
    table = teacher_table(items, answers)["pairs"]
    # by difficulty, then by whether the nearer side was shown on the left (0) or on the right (1)
    assert table[8] == [[1, 0, 0], [1, 0, 0]] and table[0] == [[1, 0, 0], [0, 1, 0]]
    assert pooled({"a": {"pairs": table}, "b": {"pairs": table}})["pairs"][8] == [[2, 0, 0], [2, 0, 0]]


def test_score_figures_by_hand():
    def clip(case: str, success: bool, source: int = -1) -> Item:
        side = np.zeros((3, 2), np.float32)
        return Item(kind="video", case=case, goal="g", sides=(side,), truth=(float(success),), success=success)

    items = [clip("success", True), clip("success", True), clip("failure", False), clip("reversed", False)]
    values = (0.9, 0.7, 0.2, 0.95)
    answers = [Answer(task="t", item=i, swapped=False, status="ok", value=v) for i, v in enumerate(values)]
    found = score_figures(items, answers)
    assert found["auc"]["value"] == 1.0 and found["threshold"] == pytest.approx(0.45)
    assert found["false_positives"]["all cases"]["value"] == 0.0  # the failure
    assert found["false_positives"]["reversed"]["value"] == 1.0  # the control, which the calibration does not see
    assert found["means"] == pytest.approx({"success": 0.8, "failure": 0.2, "reversed": 0.95})


PAID = {
    "reversed": ("scores a success as high when it is shown backwards", True),
    "other goal": ("scores a success as high under another goal of the scene", True),
    "still": ("scores an episode as high in which nothing happens", True),
    "noise": ("scores noise as high as a success", False),
    "near miss": ("calls near misses successes", True),
}


@pytest.mark.parametrize("value", [0.2, 0.11], ids=["as high", "lower"])
def test_mistaken_pay_by_hand(value):
    """Successes score 0.2 and failures 0.1 or, near misses, `value`; six of each control are enough and five not."""
    cases = ["success"] * 12 + ["failure"] * 12 + [case for case in PAID for _ in range(6)]
    side = np.zeros((3, 2), np.float32)
    items = [
        Item(kind="video", case=case, goal="g", sides=(side,), truth=(float(case == "success"),),
             success=case == "success", source=place % 12 if case in FAILURES else -1)
        for place, case in enumerate(cases)
    ]  # fmt: skip
    scores: dict[str, float] = {"success": 0.2, "failure": 0.1}
    answers = [
        Answer(task="t", item=place, swapped=False, status="ok", value=scores.get(case, value))
        for place, case in enumerate(cases)
    ]
    expected = set(PAID.values()) if value == 0.2 else set()
    found = grade(items, answers, 8).faults
    assert {(fault.name, fault.is_exploitable) for fault in found if fault.kind == "scores"} == expected
    fewer = [place for place, case in enumerate(cases) if cases[:place].count(case) < 5 or case == "success"]
    few = grade([items[place] for place in fewer], [answers[place] for place in fewer], 8).faults
    assert not [fault.name for fault in few if fault.is_exploitable]


def test_gap_pairs_have_about_the_gap_asked_for_and_draw_all_images_of_one_progress():
    progress, gaps = np.linspace(0, 1, 200, dtype=np.float32), np.linspace(-0.95, 0.95, 40, dtype=np.float32)
    pairs = draw_gap_pairs(progress, gaps, np.random.default_rng(0))
    assert np.abs(progress[pairs[:, 1]] - progress[pairs[:, 0]] - gaps).max() < 0.05
    pairs = draw_gap_pairs(np.array([0, 0, 0, 1], np.float32), np.ones(200, np.float32), np.random.default_rng(0))
    assert {0, 1, 2} <= set(pairs[:, 0]) and set(pairs[:, 1]) == {3}


def test_a_suite_is_found_by_name_and_tasks_by_theirs():
    assert find_suite("paper7") is SUITES["paper7"] and len(SUITES["metaworld50"].tasks) == 50
    assert find_suite("drawer_open,libero_object/alphabet soup").tasks == ("drawer_open", "libero_object/0")
    with pytest.raises(UsageError, match="paper7"):
        find_suite("paper8")


def test_rows_of_other_items_are_recognised(rows):
    row, other = rows["oracle"], json.loads(json.dumps(rows["oracle"]))
    assert differences(row, other) == []
    other["manifest"]["cartpole"]["looks"][0][0] += 1
    assert differences(row, other) == []  # another renderer
    other["manifest"]["cartpole"]["looks"][0][0] += 20
    other["manifest"]["push_block"]["digest"] = "x"
    assert [line.split()[1] for line in differences(row, other)] == ["items", "images"]


def test_a_measured_judge_can_teach_a_run(tmp_path, rows):
    (tmp_path / "bench.json").write_text(json.dumps(rows["left"]))
    shares = read_shares(tmp_path / "bench.json", "cartpole")
    assert shares[:, 0, 1].sum() == 0 and shares[:, 1, 0].sum() == 0  # right on the left, wrong on the right, always
    scores = read_scores(tmp_path / "bench.json", "push_block")
    assert {score for scored in scores for score in scored} == {0.5}


def test_recorded_episodes_are_asked_about_as_played_ones_are(tmp_path):
    def film(name: str, success: bool) -> RobotTrajectory:
        # two cameras, which show the step as their grey level
        def look(steps):
            return np.broadcast_to(steps.astype(np.uint8)[:, None, None, None, None], (len(steps), 2, 8, 6, 3)).copy()

        about = {"name": name, "file": tmp_path, "instruction": "open it", "success": success}
        return RobotTrajectory(
            actions=np.zeros((30, 2), np.float32), proprio=np.zeros((30, 1), np.float32), look=look, **about
        )

    films = [film("a", True), film("b", False), film("c", True), CorruptEpisode(file=tmp_path, reason="torn")]
    made = recorded_items(SMALL, "mine", films, 4, 0)
    by_case = {item.case: item for item in made.items}
    assert {"pair", "success", "failure", "cut short", "reversed", "track"} <= by_case.keys()
    for item in made.items:
        if item.case == "pair":  # of successes alone, and what comes later is nearer to the goal
            images = [int(made.draw(side, "")[0, 0, 0, 0]) for side in item.sides]
            assert (images[1] > images[0]) == (item.gap > 0) and 1.0 not in {side[0, 0] for side in item.sides}
    assert made.draw(by_case["success"].sides[0], "").shape[1:] == (4, 3, 3)
    assert {item.sides[0][0, 0] for item in made.items if item.case == "failure"} == {1.0}


@pytest.mark.parametrize(
    "damage",
    [
        lambda row: "[" * 100_000,
        lambda row: "[]",
        lambda row: json.dumps(row)[:-9],
        lambda row: json.dumps(row | {"figures": {"pairs": {"accuracy": "most"}, "scores": {}}}),
        lambda row: json.dumps(row | {"tasks": dict.fromkeys(row["tasks"], 3)}),
        lambda row: json.dumps(row | {"tasks": dict.fromkeys(row["tasks"], {"pairs": {"ece": "x"}, "scores": {}})}),
        lambda row: json.dumps(row | {"judge": "me"}),
        lambda row: json.dumps(row | {"manifest": {"cartpole": 1}}),
        lambda row: json.dumps(row | {"faults": [3]}),
        lambda row: json.dumps(row | {"bench": []}),
    ],
)
def test_a_damaged_row_is_refused_with_its_file(tmp_path, rows, damage):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(rows["left"]))
    bad.write_text(damage(rows["left"]))
    assert compare_benches([good, good]) == 0
    with pytest.raises(UsageError, match="bad.json is not a row of judge-bench"):
        compare_benches([good, bad])
