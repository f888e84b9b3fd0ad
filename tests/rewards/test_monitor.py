from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks import false_alarms
from rlvlm.core import metrics
from rlvlm.core.judging import Score, Stamp, Status
from rlvlm.judges.prompts import OTHER_GOAL
from rlvlm.rewards.config import MonitorConfig
from rlvlm.rewards.monitor import JudgeMonitor, RewardHacked
from rlvlm.rewards.scorers import biased_scorer
from rlvlm.rewards.scoring_items import ScoringItem

STAMP = Stamp(judge="by_hand", revision="1", prompt="numbers/1", decoding="")


def monitor(**settings: object) -> JudgeMonitor:
    return JudgeMonitor(MonitorConfig(**{"window": 100, **settings}), 0.5)  # pyright: ignore[reportArgumentType]


def shown(*moments: float, success: bool = False, goal: str = "go") -> ScoringItem:
    return ScoringItem(goal=goal, snapshots=np.array(moments, np.float32)[:, None], is_success=success, progress=0.0)


class LastMoment:
    """Scores the last moment's number, and nothing for any goal but its own."""

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        return [
            Score(status=Status.OK, value=float(item.snapshots[-1, 0]) if item.goal == "go" else 0.0, stamp=STAMP)
            for item in items
        ]


def test_figures_by_hand() -> None:
    watch = monitor()
    watch.note([0.9, 0.8, 0.2, 0.6], [True, False, False, True])
    figures = watch.report()
    assert figures[metrics.JUDGE_FALSE_POSITIVES] == 0.5 and figures[metrics.JUDGE_FALSE_NEGATIVES] == 0
    assert figures[metrics.JUDGE_AUC] == 0.75  # of four pairs only .6 under .8 is out of order
    assert figures[metrics.JUDGE_SCORE] == pytest.approx(0.625) and figures[metrics.JUDGE_TRUE_SUCCESS] == 0.5
    assert figures[metrics.JUDGE_ALARM] == 0


def test_a_success_that_was_undone_by_the_end_is_no_error_of_the_judge() -> None:
    watch = monitor()
    watch.note([0.9, 0.1, 0.9, 0.1, 0.2], [None, None, True, False, False])
    figures = watch.report()
    assert figures[metrics.JUDGE_FALSE_POSITIVES] == 0 and figures[metrics.JUDGE_FALSE_NEGATIVES] == 0
    assert figures[metrics.JUDGE_AUC] == 1 and figures[metrics.JUDGE_UNDONE] == 0.4
    assert figures[metrics.JUDGE_TRUE_SUCCESS] == pytest.approx(0.6), "they were successes, as training counts them"
    for value in (0.9, 0.1):
        alone = monitor()
        alone.note([value] * 100, [None] * 100)
        assert alone.alarm == "" and metrics.JUDGE_AUC not in alone.report()


def test_a_judge_that_errs_rarely_gives_no_alarm() -> None:
    watch, rng = monitor(), np.random.default_rng(0)
    for step in range(40):  # the policy gets better and the judge sees it
        truths = rng.random(50) < 0.2 + 0.02 * step
        claims = truths | (rng.random(50) < 0.04)
        watch.note(claims.astype(float).tolist(), truths.tolist())
    assert watch.alarm == ""


def test_errors_that_only_waver_give_no_alarm() -> None:
    """What a run of push_block met: 4 of 275 failures called successes at first, 13 of 194 later, 2 % at the end."""
    watch = monitor(window=400)
    for hits, failures in ((4, 275), (13, 194)):
        scores = [0.9] * hits + [0.1] * (failures - hits) + [0.9] * (400 - failures)
        watch.note(scores, [False] * failures + [True] * (400 - failures))
    assert watch.alarm == ""


@pytest.mark.parametrize("before", [0.2, 0.0], ids=["as measured before the run", "more than measured"])
def test_a_fifth_of_failures_called_successes_is_an_alarm_if_it_is_a_rise(before: float) -> None:
    watch, rng = monitor(window=400), np.random.default_rng(1)

    def scores(share: float, truths: list[bool]) -> list[float]:
        items = [shown(*rng.random(2), success=truth) for truth in truths]
        return [score.value or 0.0 for score in biased_scorer(share, 0).score(items)]

    known = [index % 2 == 0 for index in range(80)]
    watch.expect(scores(before, known), known)
    for _ in range(20):
        truths = (rng.random(100) < 0.4).tolist()
        watch.note(scores(0.2, truths), truths)
    assert watch.report()[metrics.JUDGE_ALARM] == (0 if before else 1)
    assert ("before the run 0 of 40 known ones did" in watch.alarm) == (not before)


HONEST = [
    (false_alarms.Calls, 0.0, 1),
    (false_alarms.Calls, 0.25, 1),
    (false_alarms.Smooth, 0.0, 1),
    (false_alarms.Smooth, 0.1, 4),
]


@pytest.mark.parametrize("settings", false_alarms.SETTINGS, ids=["with preflight", "without", "without truth"])
@pytest.mark.parametrize(
    ("make", "error", "seed"), HONEST, ids=["calls", "calls, 25 % wrong", "smooth", "smooth with noise"]
)
def test_an_honest_judge_gives_no_alarm(
    make: type[false_alarms.Calls], error: float, seed: int, settings: dict[str, bool]
) -> None:
    """The benchmark's simulated runs, one of each: calls that are wrong at random, and near misses that score nearly as
    much as successes, as they should.
    """
    assert false_alarms.alarm_of(make, error, seed, **settings) == (0, false_alarms.UPDATES)


@pytest.mark.parametrize("best", [0.5, 0.85])
def test_a_smooth_judge_whose_best_is_short_of_the_goal_gives_an_alarm(best: float) -> None:
    kind, update = false_alarms.alarm_of(
        false_alarms.Smooth, 0.03, 1, has_preflight=True, uses_truth=True, best=best
    )  # fmt: skip
    assert kind == 2 and update < 25


@pytest.mark.parametrize("is_graded", [True, False], ids=["paid as they are", "paid alike from a threshold on"])
def test_near_misses_are_alarming_only_where_a_threshold_pays_them_in_full(is_graded: bool) -> None:
    watch = monitor()
    watch.is_graded = is_graded
    watch.note([1.0] * 40 + [0.8] * 60, [True] * 40 + [False] * 60)
    assert ("60 of 60 failures" in watch.alarm) == (not is_graded)


def test_controls_of_a_simulated_scorer_of_the_truth_are_no_successes() -> None:
    items = [shown(0.1, 0.9, success=True)]
    rows = monitor().show_controls(biased_scorer(0.0, 0), items, biased_scorer(0.0, 0).score(items))
    assert rows[0][:4] == [1.0, 0.0, 0.0, 0.0]  # the episode, backwards, with another goal, its start


def known_to(watch: JudgeMonitor, success: float, failure: float) -> JudgeMonitor:
    watch.expect([success] * 20 + [failure] * 20, [True] * 20 + [False] * 20)
    return watch


@pytest.mark.parametrize(
    ("newest", "kind"), [(0.8, 6), (0.5, 0), (0.505, 0)], ids=["surely above", "as high", "hardly above"]
)
def test_episodes_above_known_successes_are_an_alarm_without_truth(newest: float, kind: int) -> None:
    """Such as those of a drawer that is best half open: all that the policy finds is better than the goal."""
    watch = known_to(monitor(uses_truth=False), 0.5, 0.1)
    watch.note([newest] * 100, [True] * 100)
    figures = watch.report()
    assert figures[metrics.JUDGE_ALARM] == kind and ("known successes 0.50" in watch.alarm) == bool(kind)
    assert metrics.JUDGE_TRUE_SUCCESS not in figures and metrics.JUDGE_AUC not in figures, "truth is not used"


def test_starts_that_are_called_successes_are_an_alarm() -> None:
    watch = monitor()
    watch.note_controls([[0.9, 0.9, 0.9, 0.9, 0.0, np.nan]] * 40)
    watch.note([0.9], [True])
    assert watch.report()[metrics.JUDGE_ALARM] == 7 and watch.report()[metrics.JUDGE_START_SCORE] == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("now", "kind"), [((0.9, 0.1), 0), ((0.6, 0.1), 8), ((0.1, 0.9), 8)], ids=["the same", "lower", "the opposite"]
)
def test_known_items_that_score_otherwise_are_an_alarm(now: tuple[float, float], kind: int) -> None:
    watch = monitor(uses_truth=False)
    first, truths = [0.9] * 10 + [0.1] * 10, [True] * 10 + [False] * 10
    again = [Score(status=Status.OK, value=now[not truth], stamp=STAMP) for truth in truths]
    watch.note_again(again, first, truths)
    watch.note([0.5], [True])
    assert watch.report()[metrics.JUDGE_ALARM] == kind and ("no longer the judge" in watch.alarm) == bool(kind)


def test_the_robot_alone_leaves_everything_else_at_its_start() -> None:
    """Of two columns, the thing and the robot: a judge of the robot gives its movement alone as much as a success."""

    class Robot(LastMoment):
        def score(self, items: Sequence[ScoringItem]) -> list[Score]:
            return [Score(status=Status.OK, value=float(item.snapshots[-1, 1]), stamp=STAMP) for item in items]

    item = ScoringItem(goal="go", snapshots=np.array([[0.1, 0.2], [0.7, 0.8]], np.float32), is_success=True, progress=1)
    for scorer, alone in ((Robot(), 0.8), (LastMoment(), 0.1)):
        watch = JudgeMonitor(MonitorConfig(window=100, uses_truth=False), 0.5, robot_columns=[1])
        rows = watch.show_controls(scorer, [item], scorer.score([item]))
        assert rows[0][5] == pytest.approx(alone)
        watch.note_controls(rows * 40)
        watch.note([0.5], [True])
        assert watch.report()[metrics.JUDGE_ALARM] == (5 if alone == 0.8 else 0)
    without = monitor()
    assert np.isnan(without.show_controls(Robot(), [item], Robot().score([item]))[0][5])


def test_the_alarm_comes_when_false_positives_rise_with_the_score() -> None:
    """A policy that learns what fools the judge, long before the bound on false positives is reached."""
    watch, rng = monitor(max_false_positives=0.9), np.random.default_rng(2)
    for step in range(30):
        truths = rng.random(50) < 0.3
        claims = truths | (rng.random(50) < 0.02 + 0.02 * step)
        watch.note(claims.astype(float).tolist(), truths.tolist())
    assert "its mean score rose" in watch.alarm


def test_a_rise_of_false_positives_without_a_rise_of_the_score_gives_no_alarm() -> None:
    watch, rng = monitor(max_false_positives=0.9), np.random.default_rng(2)
    for step in range(30):
        truths = rng.random(50) < 0.6 - 0.02 * step
        claims = truths | (rng.random(50) < 0.02 + 0.005 * step)
        watch.note(claims.astype(float).tolist(), truths.tolist())
    assert watch.alarm == ""


def test_an_alarm_can_end_the_run() -> None:
    watch = monitor(on_alarm="stop")
    with pytest.raises(RewardHacked, match="60 of 60 failures"):
        watch.note([0.9] * 60, [False] * 60)
    assert RewardHacked.exit_code == 5


def test_controls_are_backwards_and_of_another_goal() -> None:
    watch, scorer = monitor(controls=2), LastMoment()
    items = [shown(0.1, 0.9), shown(0.2, 0.8), shown(0.0, 0.1)]
    watch.note_controls(
        watch.show_controls(scorer, items, scorer.score(items))
    )  # the two best: .9, .8, backwards .1, .2
    watch.note([0.9], [True])
    figures = watch.report()
    assert figures[metrics.JUDGE_CONTROL_SCORE] == pytest.approx(0.85)
    assert figures[metrics.JUDGE_BACKWARDS_SCORE] == pytest.approx(0.15)
    assert figures[metrics.JUDGE_OTHER_GOAL_SCORE] == 0


def test_the_other_goal_is_anothers_where_there_is_one() -> None:
    asked: list[str] = []

    class Noting(LastMoment):
        def score(self, items: Sequence[ScoringItem]) -> list[Score]:
            asked.extend(item.goal for item in items)
            return super().score(items)

    scorer = Noting()
    for items in ([shown(0.1, 0.9)], [shown(0.1, 0.9), shown(0.1, 0.2, goal="push the red block")]):
        monitor(controls=1).show_controls(scorer, items, LastMoment().score(items))
    assert asked == ["go", "go", OTHER_GOAL, "go", "go", "push the red block"]  # still, backwards, elsewhere


def test_the_other_goal_is_one_that_is_in_view() -> None:
    asked: list[str] = []

    class Noting(LastMoment):
        def score(self, items: Sequence[ScoringItem]) -> list[Score]:
            asked.extend(item.goal for item in items)
            return super().score(items)

    items = [shown(0.1, 0.9), shown(0.1, 0.2, goal="push the red block")]  # the red block lies on another table
    for in_view, wanted in ((("go", "push the blue block"), "push the blue block"), (("go",), OTHER_GOAL)):
        watch = JudgeMonitor(MonitorConfig(controls=1), 0.5, goals_in_view=lambda _, seen=in_view: seen)
        rows = watch.show_controls(Noting(), items, LastMoment().score(items))
        assert asked[-1] == wanted and rows[0][4] == (wanted != OTHER_GOAL)


CONTROLS = {
    "all of 40 backwards": (40, [0.25, 0.25, 0.0, 0.15, 0.0, np.nan], 3),
    "under another goal of the run": (40, [0.25, 0.0, 0.25, 0.15, 1.0, np.nan], 3),
    "under a goal that no policy can reach": (40, [0.25, 0.0, 0.25, 0.15, 0.0, np.nan], 0),
    "too few": (29, [0.25, 0.25, 0.25, 0.15, 1.0, np.nan], 0),
    "no lead over the others": (400, [0.15, 0.15, 0.15, 0.15, 1.0, np.nan], 0),
    "less than half of the lead": (400, [0.25, 0.19, 0.19, 0.15, 1.0, np.nan], 0),
}


@pytest.mark.parametrize(("count", "row", "kind"), CONTROLS.values(), ids=CONTROLS.keys())
def test_controls_that_keep_their_lead_are_an_alarm(count: int, row: list[float], kind: int) -> None:
    """On any scale: nothing here is called a success by the claim of 0.5, and no truth is asked."""
    watch = monitor(window=400)
    watch.note_controls([row] * count)
    watch.note([0.2], [False])
    assert watch.report()[metrics.JUDGE_ALARM] == kind and ("half of their lead" in watch.alarm) == bool(kind)


@pytest.mark.parametrize(
    ("successes", "failures", "overlap", "kind"),
    [(60, 60, 0.9, 4), (29, 300, 0.9, 0), (60, 60, 0.0, 0), (60, 60, 0.5, 0)],
    ids=["surely below", "too few successes", "told apart", "its interval reaches the bound"],
)
def test_an_area_that_surely_lies_below_the_bound_is_an_alarm(
    successes: int, failures: int, overlap: float, kind: int
) -> None:
    """A share `overlap` of successes scores as failures do, so that the area is 1 - overlap / 2."""
    watch = monitor(window=400)
    low = round(successes * overlap)
    watch.note(
        [0.1] * failures + [0.1] * low + [0.2] * (successes - low), [False] * failures + [True] * successes
    )  # fmt: skip
    figures = watch.report()
    assert figures[metrics.JUDGE_ALARM] == kind and (metrics.JUDGE_AUC_LOW in figures) == (successes >= 30)
    assert ("area under the curve" in watch.alarm) == bool(kind)


def test_the_state_of_an_older_version_is_read() -> None:
    older = {"first": [], "recent": [], "controls": [[0.9, 0.1, 0.0]], "alarm": "fooled"}
    watch = monitor()
    watch.set_state(older)
    assert watch.alarm == "fooled" and metrics.JUDGE_CONTROL_SCORE not in watch.report()
