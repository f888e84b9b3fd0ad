"""What a report says about runs whose curves were made by hand."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from made_sweep import BAD, GOOD, Curves

from rlvlm.reports.compare import common_grid, compare, draw_curves, group_rows, overall, run_rows
from rlvlm.reports.results import sweep_results
from rlvlm.reports.statistics import find
from rlvlm.sweeps.folder import State, SweepFolder
from rlvlm.sweeps.plan import app_name

Make = Callable[..., SweepFolder]


def test_the_numbers_are_those_worked_out_by_hand(make_sweep: Make) -> None:
    results = sweep_results(make_sweep())
    good, bad = group_rows(results, "drawer_open")
    assert (good["source"], bad["source"]) == ("good", "bad")  # best first
    # finals: means of the last three, 2.5/3, 1 and 1.7/3; of three runs the outer two count a quarter each
    finals = [2.5 / 3, 1.0, 1.7 / 3]
    assert good["score"] == pytest.approx((0.25 * finals[2] + finals[0] + 0.25 * finals[1]) / 1.5, abs=1e-6)
    assert min(finals) - 1e-9 <= good["score_low"] < good["score"] < good["score_high"] <= max(finals) + 1e-9
    # means over the run: 2.5/4, 3/4 and 1.7/4
    assert good["mean_over_run"] == pytest.approx((0.25 * 1.7 / 4 + 2.5 / 4 + 0.25 * 3 / 4) / 1.5, abs=1e-6)
    assert good["steps_to_solve"] == 3_000  # at 3,000, 2,000 and 4,000
    assert good["successes"] == 2 and bad["successes"] == 0
    assert good["label_accuracy"] == pytest.approx(0.9)
    assert good["minutes_per_success"] == pytest.approx(3 * 4 / 2)
    assert good["queries_per_success"] == pytest.approx(3 * 40 / 2)
    assert bad["minutes_per_success"] is None and good["usd_per_success"] is None


def test_the_sentence_says_who_wins_and_whether_that_is_supported(make_sweep: Make) -> None:
    results = sweep_results(make_sweep())
    text = overall(results)
    assert text.startswith("Over all 2 tasks. Winner: good & dear: 0.8") and "the runs support it" in text
    assert find(results, results.common_tasks) == find(results, results.common_tasks), "it is the same each time"
    run = results.runs[0]  # one that ended early goes on at its last score
    np.testing.assert_allclose(run.curve(np.array([500.0, 1_500.0, 9_000.0])), [0.0, 0.25, 1.0])


@pytest.mark.parametrize(
    ("curves", "said"),
    [
        ({"good": GOOD, "bad": GOOD[::-1]}, "do not tell the sources apart"),
        ({"good": (*GOOD[:2], ()), "bad": BAD}, "supports no conclusion"),
        ({"good": ((), (), ()), "bad": ((), (), (0,))}, "nothing to compare"),
    ],
)
def test_what_does_not_support_a_winner_says_so(curves: Curves, said: str, make_sweep: Make) -> None:
    text = overall(sweep_results(make_sweep(curves)))
    assert said in text and "Winner" not in text


@pytest.mark.slow
def test_runs_that_are_halted_or_not_finished_are_left_out_and_the_page_says_so(make_sweep: Make) -> None:
    folder = make_sweep({"good": (GOOD[0], GOOD[1], (1, 1)), "bad": (BAD[0], BAD[1], (0, 0))})
    results = sweep_results(folder)
    assert group_rows(results, "drawer_open")[0]["finished"] == "2 of 3"
    row = next(row for row in run_rows(results) if (row["source"], row["seed"]) == ("good", 2))
    assert row["final_score"] is None and row["state"] == "saved"
    records = folder.records(list(folder.plans().values())).values()
    is_halted = [(record.source, record.state) == ("bad", State.SAVED) for record in records]
    folder.write_records(
        [replace(one, state=State.HALTED) if is_it else one for one, is_it in zip(records, is_halted, strict=True)]
    )
    compare([folder.path])
    page = (folder.path / "report.html").read_text()
    assert "2 runs were halted half-way" in page and "8 of 12 runs finished" in page


def test_what_a_paid_judge_was_paid_is_shared_by_the_queries(make_sweep: Make) -> None:
    folder = make_sweep()
    plan = next(plan for plan in folder.plans().values() if plan.source == "good")
    folder.ledger(app_name(plan.config, folder.path)).write_text(json.dumps({"requests": 9, "cost_usd": 6.0}))
    good, bad = group_rows(sweep_results(folder), "drawer_open")
    assert good["usd_per_success"] == pytest.approx(6.0 / 2 / 2)  # half of the runs are of this task, two succeed
    assert bad["usd_per_success"] is None


def test_a_last_evaluation_after_the_end_of_the_budget_is_drawn_too(make_sweep: Make) -> None:
    runs = sweep_results(make_sweep()).of("drawer_open", "good")
    over = [replace(run, steps=run.steps * 1.02) for run in runs]  # the last rollout went on past 4,000
    assert common_grid(over)[-1] == pytest.approx(4_080)
    assert common_grid([replace(over[0], steps=over[0].steps[:2]), *over[1:]])[-1] <= 4_000  # one ended early


def test_a_single_evaluation_is_drawn_as_a_point(make_sweep: Make) -> None:
    results = sweep_results(make_sweep())
    once = replace(results, runs=[replace(run, steps=run.steps[-1:], scores=run.scores[-1:]) for run in results.runs])
    for shown, marker in ((results, "None"), (once, "o")):
        assert {line.get_marker() for axes in draw_curves(shown).axes for line in axes.get_lines()} == {marker}


@pytest.mark.slow
def test_page_images_and_tables_are_written(make_sweep: Make, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_sweep()
    assert compare([folder.path]) == 0
    said = capsys.readouterr().out
    assert "Winner" in said and "report.html" in said
    page = (folder.path / "report.html").read_text()
    assert page.index("Winner") < page.index("<table") and page.count("data:image/png;base64,") == 2
    assert "a &lt;made&gt; sweep" in page and "<made>" not in page and "good &amp; dear" in page
    for name in ("report.png", "report_curves.png"):
        assert (folder.path / name).stat().st_size > 5_000
    with open(folder.path / "report.csv") as file:
        assert [row["source"] for row in csv.DictReader(file)] == ["good", "bad", "good", "bad"]
    with open(folder.path / "report_runs.csv") as file:
        assert len(list(csv.DictReader(file))) == 12
