"""The rehearsal: a model of answers, plans for all kinds of envs, the truth as coarse as a judge, and its verdicts."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from rlvlm.cli import run_command
from rlvlm.core.errors import JudgeUnavailable, UnsupportedQuestion
from rlvlm.core.judging import Clip, Label, Query, Score, Stamp, Status, Verdict
from rlvlm.demonstrations.playing import Episode, reward_ranks
from rlvlm.envs.registry import task_env
from rlvlm.judge_bench.items import Item
from rlvlm.judge_bench.prediction import shares_of_scores, worth_of
from rlvlm.judge_bench.preflight import JudgeRefused, known_items, preflight, rehearse_before, scored_suite
from rlvlm.judge_bench.rehearsal.control import CoarseLabels, CoarseScores
from rlvlm.judge_bench.rehearsal.fitted import Features, fit_pairs, fit_scores
from rlvlm.judge_bench.rehearsal.outcome import Kind, Rehearsal
from rlvlm.judge_bench.rehearsal.plans import Ends, make_plans, starts_of
from rlvlm.judge_bench.rehearsal.rehearse import rehearse, staged
from rlvlm.judge_bench.rehearsal.search import Choice, first_ends
from rlvlm.testing.item_judge import ItemJudge, chance, true_value


def ends(progress: Sequence[float], success: Sequence[bool] = (), steps: Sequence[int] = ()) -> Ends:
    count = len(progress)
    return Ends(
        first=np.zeros((count, 2), np.float32),
        last=np.array([[p, 0] for p in progress], np.float32),
        progress=np.array(progress, np.float32),
        success=np.array(success or [False] * count, bool),
        goals=("g",) * count,
        shown=tuple(np.zeros((length, 2), np.float32) for length in steps or [1] * count),
    )


def test_a_truth_as_coarse_as_a_judge_by_hand():
    # two failures share a level, since the judge's mean falls between them; the success has its own
    coarse = CoarseScores.of(
        ends([0.2, 0.4, 0.6, 1.0], [False] * 3 + [True]), np.array([0.1, 0.5, 0.3, 0.9], np.float32)
    )
    assert coarse.levels == pytest.approx([0.1, 0.4, 0.4, 0.9]) and coarse.noise == 0
    said = coarse(ends([0.5, 0.3, 1.0], [False, False, True]), np.random.default_rng(0))
    assert said == pytest.approx([0.4, 0.25, 0.9])


def test_random_errors_are_measured_on_neighbours():
    # each pair of neighbours differs by 0.2 at one true progress: a standard deviation of 0.2 / sqrt(2)
    steps = [4, 5, 9, 10, 4, 5]
    scores = np.array([0.5, 0.7, 0.7, 0.5, 0.5, 0.7], np.float32)
    pairs = replace(ends([0.5] * 6, steps=steps), first=np.repeat(np.arange(3, dtype=np.float32), 2)[:, None])
    assert CoarseScores.of(pairs, scores).noise == pytest.approx(0.2 / np.sqrt(2), abs=1e-3)


def test_rewards_as_progress_by_hand():
    """Two of four rewards are 0 and share the middle of their ranks; what exceeds all met rewards has gone all the
    way.
    """
    episode = Episode(
        seed=0, snapshots=np.zeros((5, 1)), progress=np.zeros(5), rewards=np.array([0, 1, 2, 9]), is_success=False
    )
    assert reward_ranks(episode, np.array([0, 0, 1, 3])) == pytest.approx([1 / 6, 1 / 6, 2 / 3, 5 / 6, 1])


def test_labels_of_a_truth_as_coarse_keep_the_share_of_errors_at_a_gap():
    left, right = ends([0.1] * 40), ends([0.9] * 20 + [0.13] * 20)
    labels = np.array([1.0] * 20 + [1.0] * 10 + [0.0] * 10, np.float32)  # sure of wide gaps, chance at small ones
    coarse = CoarseLabels.of(left, right, labels)
    said = coarse(ends([0.9] * 500 + [0.1] * 500), ends([0.1] * 500 + [0.13] * 500), np.random.default_rng(0))
    assert not said[:500].any() and said[500:].mean() == pytest.approx(0.5, abs=0.1)
    assert (coarse(left, left, np.random.default_rng(0)) == 0.5).all(), "no gap, no preference"


def test_a_model_of_scores_and_one_of_comparisons_find_what_they_follow():
    rng = np.random.default_rng(0)
    points = rng.uniform(-1, 1, (600, 4)).astype(np.float32)
    truth = -np.abs(points[:, 0] - points[:, 1])
    features = Features.of(points)
    shown = features(points, points)
    scored = fit_scores(shown[:300], truth[:300], 0)
    assert np.corrcoef(scored(shown[300:]), truth[300:])[0, 1] > 0.95
    left, right = rng.permutation(300), rng.permutation(300)
    compared = fit_pairs(shown[left], shown[right], (truth[right] > truth[left]).astype(np.float32), 0)
    assert np.corrcoef(compared(shown[300:]), truth[300:])[0, 1] > 0.85


@pytest.mark.parametrize("task", ["push_block", "number_line", "cartpole"])
def test_plans_of_every_kind_of_env_are_drawn_played_and_drawn_anew(task):
    plans = make_plans(task, task_env(task), 10, 0)
    rng, starts = np.random.default_rng(0), starts_of(plans.env, 0, 3, 0)
    belief = plans.prior(3)
    drawn = plans.draw(belief, 6, rng)
    found = plans.play(drawn[:, 0], starts, keep=True)
    again = plans.play(drawn[:, 0], starts)
    assert len(found) == 3 and np.array_equal(found.last, again.last), "a plan and a start say where it ends"
    assert all(np.array_equal(moments[-1], last) for moments, last in zip(found.shown, found.last, strict=True))
    best = drawn[:, :2]
    for _ in range(12):
        belief = plans.toward(belief, best)
    assert np.abs(plans.middle(belief) - best.mean(1)).max() < 0.6, "draws move to the best"
    kept = plans.near(best[:, 0], np.zeros(3, np.float32), rng)
    assert np.array_equal(kept, best[:, 0])


def test_a_slow_simulator_is_searched_by_choosing():
    plans = make_plans("push_block", task_env("push_block"), 32, 0)
    searcher, starts = Choice(plans, 0), starts_of(plans.env, 0, 6, 0)
    best = searcher.find(starts, 6, lambda met: met.worth, np.random.default_rng(0))
    worst = searcher.find(starts, 6, lambda met: -met.worth, np.random.default_rng(0))
    assert best.success.all() and not worst.success.any()


def test_first_ends_have_successes_failures_and_neighbours():
    plans = make_plans("push_block", task_env("push_block"), 32, 0)
    first = first_ends(plans, 80, 0, np.random.default_rng(0))
    assert len(first) == 80 and 0 < first.success.sum() < 40
    lengths = list(map(len, first.shown))
    assert sum(b == a + 1 for a, b in zip(lengths, lengths[1:], strict=False)) >= 15


def judge_of(value) -> ItemJudge:
    """A judge by the value of an item with one side, for scores and for comparisons."""

    def label(item: Item, _: bool) -> Label:
        return Label.of(*(value(replace(item, sides=(side,))) for side in item.sides))

    return ItemJudge(value=value, label=label)


def hand_at_pad(item: Item) -> float:
    """Pays for a hand where one stands after pushing, block or no block."""
    last = item.sides[0][-1]
    return max(0.0, 1 - float(np.hypot(*(last[:2] - last[6:8] + [0.28, 0]))) / 0.9)


def flips(item: Item) -> float:
    is_right = chance(item, "flip", item.sides[0][-1:]) >= 0.2
    return true_value(item) if is_right else (0.1 if item.success else 0.95)


def rehearsed(judge, questions: int = 500, kind: Kind = "scores") -> Rehearsal:
    with staged("push_block", task_env("push_block"), 0) as stage:
        return rehearse(judge, stage, questions, kind=kind, name="j", size_px=48, num_frames=2)


@pytest.mark.slow
def test_a_judge_of_the_hand_is_fooled_and_refused_before_a_run(monkeypatch):
    found = rehearsed(judge_of(hand_at_pad))
    assert found.verdict == "can be fooled" and found.judged < found.control - 0.2, found.row()
    assert len(found.failures) == 8 and all(episode.score > 0.4 for episode, _ in found.failures)
    json.dumps(found.row(), allow_nan=False)
    *failures, reached = found.ends["scores"]
    assert sum(map(len, failures)) > 60 > len(reached), "where it led counts in what training with it comes to"
    assert worth_of(*shares_of_scores(found.ends["scores"])) < 0.8
    monkeypatch.setattr("rlvlm.judge_bench.preflight.rehearse", lambda *_, **__: found)
    lines: list[str] = []
    before = partial(
        rehearse_before, ItemJudge(), "push_block", task_env("push_block"), 500,
        kind="scores", size_px=48, num_frames=2, seed=0, log=lines.append,
    )  # fmt: skip
    with pytest.raises(JudgeRefused, match=r"(?s)leads a search away from the goal .*--judge.faulty ok"):
        before()
    assert before(refuses_faulty=False) is found and "can be fooled" in lines[-1]


@pytest.mark.slow
def test_a_judge_that_is_wrong_at_random_in_a_fifth_is_not_accused():
    found = rehearsed(ItemJudge(value=flips))
    assert found.fault is None and found.questions == 500, found.row()


class Failing:
    """A judge of brightness whose answers end after some questions, or cannot be read."""

    stamp = Stamp(judge="failing", revision="1", prompt="none", decoding="")

    def __init__(self, limit: int = 10**9, unread: float = 0.0) -> None:
        self.limit, self.unread, self.asked = limit, unread, 0

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        raise UnsupportedQuestion("it scores alone", "ask for scores")

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        self.asked += len(clips)
        if self.asked > self.limit:
            raise JudgeUnavailable("the budget is spent", "raise it")
        rng = np.random.default_rng(self.asked)
        values = [None if rng.random() < self.unread else float(clip.frames[-1].mean()) / 255 for clip in clips]
        return [
            Score(status=Status.INVALID if value is None else Status.OK, value=value, stamp=self.stamp)
            for value in values
        ]


@pytest.mark.slow
def test_a_dry_run_says_the_price_and_measures_nothing(tmp_path, capsys):
    words = ["judge-bench", "push_block", "--judge.backend", "rlvlm.testing.fooled:brightness", "--pairs", "10"]
    run_command([*words, "--episodes", "6", "--rehearse", "300", "--dry-run", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert re.search(r"push_block: rehearsal of scores +300 +2,400 ", said) and "together" in said
    assert not (tmp_path / "bench.json").exists()


@pytest.mark.slow
def test_a_budget_that_ends_within_a_round_keeps_what_was_found_and_grades_nothing():
    found = rehearsed(Failing(limit=130), questions=300)
    assert found.verdict == "too few answers" and "the budget is spent" in found.stopped
    assert 64 <= found.questions <= 130 and found.failures and found.fault is None


class Abstaining(Failing):
    """A judge that prefers nothing, cannot be read or does not answer, in seven comparisons of ten."""

    def __init__(self, status: Status) -> None:
        super().__init__()
        self.status = status

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        none = Label.TIE if self.status is Status.NO_PREFERENCE else None
        rng = np.random.default_rng(self.asked)
        labels = [none if rng.random() < 0.7 else Label.LEFT for _ in queries]
        return [
            Verdict(status=Status.OK if label is Label.LEFT else self.status, label=label, stamp=self.stamp)
            for label in labels
        ]


@pytest.mark.parametrize(
    "status", [pytest.param(Status.NO_PREFERENCE, marks=pytest.mark.slow), Status.INVALID, Status.FAILED]
)
def test_a_judge_that_abstains_through_the_search_is_not_graded(status):
    found = rehearsed(Abstaining(status), 100, "pairs")
    wanted = "too weak here" if status is Status.NO_PREFERENCE else "too few answers"  # a tie is an answer
    assert found.verdict == wanted and found.fault is None


def test_scores_that_are_no_numbers_cannot_be_read():
    assert Score(status=Status.OK, value=math.nan, stamp=Failing.stamp).status is Status.INVALID
    judge = ItemJudge(value=lambda item: math.nan if chance(item, "nan") < 0.7 else true_value(item))
    found = rehearsed(judge, questions=100)
    assert found.verdict == "too few answers" and found.answered < 0.5
    made = known_items(scored_suite("push_block", 4), task_env("push_block"), 48, 0, per_turn=False)
    with pytest.raises(JudgeRefused, match="no answer that can be read"):
        preflight(judge, made, 2, 0)


def test_answers_of_which_most_cannot_be_read_grade_nothing():
    found = rehearsed(Failing(unread=0.7), questions=300)
    assert found.verdict == "too few answers" and not found.stopped and found.fault is None
    with pytest.raises(JudgeUnavailable):
        rehearsed(Failing(limit=0), questions=300)


@pytest.mark.slow
def test_the_command_rehearses_and_writes_row_page_and_suite(tmp_path):
    words = ["judge-bench", "push_block", "--judge.backend", "rlvlm.testing.fooled:hand_distance", "--frames", "2"]
    run_command([*words, "--judge.image-px", "48", "--pairs", "10", "--rehearse", "200", "--out", str(tmp_path)])
    row = json.loads((tmp_path / "bench.json").read_text())
    kinds = {each["kind"]: each for each in row["rehearsals"]["push_block"]}
    assert set(kinds) == {"scores", "pairs"} and kinds["scores"]["questions"] == 200
    page = (tmp_path / "bench.html").read_text()
    assert "Rehearsal: where a search leads" in page and "the failures that it likes best" in page
    assert (tmp_path / "push_block.hacked.json").is_file()


@pytest.mark.slow
def test_a_bench_that_was_stopped_goes_on_without_asking_twice(tmp_path, monkeypatch):
    judges = [Failing(limit=200), Failing(), Failing()]
    for judge in judges:
        monkeypatch.setattr("rlvlm.reports.judge_bench.build_judge", lambda _, own=judge: own)
        words = ["judge-bench", "push_block", "--judge.score", "success", "--judge.image-px", "48", "--pairs", "4"]
        run_command([*words, "--frames", "2", "--episodes", "6", "--rehearse", "100", "--out", str(tmp_path)])
        (found,) = json.loads((tmp_path / "bench.json").read_text())["rehearsals"]["push_block"]
        assert bool(found["stopped"]) == (judge is judges[0]), "a budget ends the first within its rehearsal"
    assert judges[0].asked > 200 and 0 < judges[1].asked < 120 and judges[2].asked == 0
