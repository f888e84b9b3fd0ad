"""The bench end to end, on two quick tasks: references in the right order, planted faults each named."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Clip, Label, Query, Score, Stamp, Status, Verdict
from rlvlm.demonstrations.trajectory import RobotTrajectory, Torn
from rlvlm.envs.registry import task_env
from rlvlm.judge_bench.asking import Answer, Reference
from rlvlm.judge_bench.bench import Measured, measure, summarise
from rlvlm.judge_bench.figures import pair_figures, pooled, score_figures, teacher_table
from rlvlm.judge_bench.items import FAILURES, LEAST_GAP, Item, TaskItems, draw_gap_pairs, make_items, recorded_items
from rlvlm.judge_bench.suites import SUITES, Suite, find_suite
from rlvlm.judges.config import JudgeConfig
from rlvlm.preferences.teachers import read_shares
from rlvlm.reports.judge_bench import differences
from rlvlm.rewards.scorers import read_scores

SMALL = Suite(name="small", tasks=("push_block", "cartpole"), episodes=12, pairs=40, videos=6, controls=6, tracks=2)
PX = 48
CONFIG = JudgeConfig(picture_px=PX)


@pytest.fixture(scope="module")
def made() -> dict[str, TaskItems]:
    return {task: make_items(SMALL, task, task_env(task), PX, 0, False) for task in SMALL.tasks}


class Seeing:
    """Knows every image of the items by heart, and with it the progress: a perfect judge of images, which the planted
    ones spoil. It wants an episode to have led to its end, so it calls neither a still image nor a jump a success."""

    stamp = Stamp(judge="seeing", revision="", prompt="", decoding="")

    def __init__(self, made: dict[str, TaskItems]) -> None:
        self.progress: dict[bytes, float] = {}
        self.goals: dict[bytes, str] = {}
        self.wins: set[bytes] = set()
        for one in made.values():
            for item in one.items:
                if item.source < 0:
                    for side, truth in zip(item.sides, item.truth, strict=True):
                        images = [image.tobytes() for image in one.draw(side, "")]
                        self.progress[images[-1]] = truth
                        self.goals |= dict.fromkeys(images, item.goal)
                        self.wins |= {images[-1]} if item.success else set()

    def compare(self, queries: list[Query]) -> list[Verdict]:
        return [self.verdict(self.label(query)) for query in queries]

    def score(self, clips: list[Clip]) -> list[Score]:
        return [Score(status=Status.OK, value=self.value(clip), stamp=self.stamp) for clip in clips]

    def verdict(self, label: Label) -> Verdict:
        return Verdict(status=Status.of(label), label=label, stamp=self.stamp)

    def is_own(self, frames: np.ndarray, goal: str) -> bool:
        return self.goals.get(frames[-1].tobytes()) == goal

    def label(self, query: Query) -> Label:
        if not self.is_own(query.left, query.goal):
            return Label.TIE
        return Label.of(self.progress[query.left[-1].tobytes()], self.progress[query.right[-1].tobytes()])

    def value(self, clip: Clip) -> float:
        led_there = len(clip.frames) == 1 or (clip.frames[1:-1] != clip.frames[0]).any()
        return self.worth(clip.frames) if led_there and self.is_own(clip.frames, clip.goal) else 0.0

    def worth(self, frames: np.ndarray) -> float:
        last = frames[-1].tobytes()
        return 1.0 if last in self.wins else 0.9 * self.progress.get(last, 0.0)


class PrefersLeft(Seeing):
    def label(self, query: Query) -> Label:
        return Label.LEFT if query.left[-1].sum() % 4 else super().label(query)


class ByBrightness(Seeing):
    def label(self, query: Query) -> Label:
        return Label.of(float(query.left[-1].mean()), float(query.right[-1].mean()))

    def value(self, clip: Clip) -> float:
        return float(clip.frames[-1].mean()) / 255


class IgnoresInstruction(Seeing):
    def is_own(self, frames: np.ndarray, goal: str) -> bool:
        return frames[-1].tobytes() in self.progress


class LastFrameOnly(Seeing):
    def value(self, clip: Clip) -> float:
        return super().value(replace(clip, frames=clip.frames[-1:]))


class Copies(Seeing):
    """Answers as it did before, two times of three."""

    count = 0
    last = {Label: Label.TIE, float: 0.0}

    def label(self, query: Query) -> Label:
        return self.copied(Label, super().label(query))

    def value(self, clip: Clip) -> float:
        return self.copied(float, super().value(clip))

    def copied(self, kind, answer):
        self.count += 1
        if self.count % 3 == 1:
            self.last = {**self.last, kind: answer}
        return self.last[kind]


def run(judge) -> Measured:
    return measure(SMALL, judge, CONFIG, num_frames=8)


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    """Of the references."""
    return {name: summarise(run(Reference(name))) for name in ("oracle", "random", "left")}


@pytest.mark.slow
def test_a_judge_that_sees_everything_has_no_fault(made):
    row = summarise(run(Seeing(made)))
    assert row["faults"] == []
    assert row["figures"]["pairs"]["accuracy"]["value"] == 1.0
    assert row["figures"]["scores"]["auc"]["value"] >= 0.95  # cartpole counts steps, which no image shows
    assert all(row["figures"]["scores"]["false_positives"][case]["value"] == 0 for case in FAILURES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "names"),
    [
        (PrefersLeft, {"prefers the left image"}),
        (ByBrightness, {"chooses the brighter image"}),
        (IgnoresInstruction, {"ignores the instruction", "ignores the instruction when it scores"}),
        (LastFrameOnly, {"sees the last frame only"}),
        (Copies, {"copies the answer before"}),
    ],
)
def test_a_planted_fault_is_named(made, planted, names):
    assert names <= {fault["name"] for fault in summarise(run(planted(made)))["faults"]}


def test_references_come_in_the_right_order(rows):
    pairs = {name: row["figures"]["pairs"] for name, row in rows.items()}
    assert pairs["oracle"]["accuracy"]["value"] == 1.0 and rows["oracle"]["faults"] == []
    assert pairs["random"]["accuracy"]["low"] < 0.5 < pairs["random"]["accuracy"]["high"]
    assert pairs["left"]["said_left"]["value"] == 1.0 and pairs["left"]["consistent"]["value"] == 0.0
    names = {name: {fault["name"] for fault in row["faults"]} for name, row in rows.items()}
    assert "prefers the left image" in names["left"] and "scores everything alike" in names["left"]
    assert "does not tell nearer from farther" in names["random"]
    json.dumps(rows, allow_nan=False)


def test_items_are_the_same_each_time_and_cover_what_they_promise(made):
    again = make_items(SMALL, "push_block", task_env("push_block"), PX, 0, False)
    first = made["push_block"]
    assert again.digest == first.digest and again.looks == first.looks
    assert make_items(SMALL, "push_block", task_env("push_block"), PX, 1, False).digest != first.digest
    pairs = [item for item in first.items if item.case == "pair"]
    assert min(abs(item.gap) for item in pairs) >= LEAST_GAP and len(pairs) == SMALL.pairs
    assert np.ptp([abs(item.gap) for item in pairs]) > 0.4
    cases = {item.case for item in first.items}
    assert {"success", "near miss", "failure", "cut short", "track", "same image", "jump", *FAILURES} <= cases
    for item in first.items:
        if item.case in FAILURES and item.kind == "video":
            assert first.items[item.source].success and not item.success


def test_turns_are_asked_about_where_the_judge_rates_turns():
    """Nothing of a game of cards is physics: rows of two machines are about the same, or `VERSION` must be raised."""
    digest = make_items(SMALL, "number_line", task_env("number_line"), PX, 0, False).digest
    assert digest == "76d793fa97634476677280310a55253f9323c420909d749a4186dc98870d9145"
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


def test_gap_pairs_by_hand():
    progress = np.linspace(0, 1, 101, dtype=np.float32)
    gaps = np.array([0.5, -0.5, 0.9, 0.1], np.float32)
    drawn = draw_gap_pairs(progress, gaps, np.random.default_rng(0))
    np.testing.assert_allclose(progress[drawn[:, 1]] - progress[drawn[:, 0]], gaps, atol=0.06)


def test_a_suite_is_found_by_name_and_tasks_by_theirs():
    assert find_suite("paper7") is SUITES["paper7"] and len(SUITES["metaworld50"].tasks) == 50
    assert find_suite("drawer_open,libero_object/alphabet soup").tasks == ("drawer_open", "libero_object/0")
    with pytest.raises(UsageError, match="paper7"):
        find_suite("paper8")


def test_rows_of_other_items_are_told_apart(rows):
    row, other = rows["oracle"], json.loads(json.dumps(rows["oracle"]))
    assert differences(row, other) == []
    other["manifest"]["cartpole"]["looks"][0][0] += 1
    assert differences(row, other) == []  # another renderer
    other["manifest"]["cartpole"]["looks"][0][0] += 20
    other["manifest"]["push_block"]["digest"] = "x"
    assert [line.split()[1] for line in differences(row, other)] == ["items", "images"]


def test_a_run_can_be_taught_by_what_was_measured(tmp_path, rows):
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

    films = [film("a", True), film("b", False), film("c", True), Torn(file=tmp_path, reason="torn")]
    made = recorded_items(SMALL, "mine", films, 4, 0)
    by_case = {item.case: item for item in made.items}
    assert {"pair", "success", "failure", "cut short", "reversed", "track"} <= by_case.keys()
    for item in made.items:
        if item.case == "pair":  # of successes alone, and what comes later is nearer to the goal
            images = [int(made.draw(side, "")[0, 0, 0, 0]) for side in item.sides]
            assert (images[1] > images[0]) == (item.gap > 0) and 1.0 not in {side[0, 0] for side in item.sides}
    assert made.draw(by_case["success"].sides[0], "").shape[1:] == (4, 3, 3)
    assert {item.sides[0][0, 0] for item in made.items if item.case == "failure"} == {1.0}
