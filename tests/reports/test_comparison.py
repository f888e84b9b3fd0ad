"""What a report says about runs whose curves were made by hand, and its statistics."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from made_sweep import BAD, GOOD, Curves

from rlvlm.core.errors import UsageError
from rlvlm.judge_bench.prediction import predict, read_curve
from rlvlm.reports.compare import common_grid, compare, draw_curves, group_rows, overall, run_rows
from rlvlm.reports.results import run_results, sweep_results, with_benches
from rlvlm.reports.statistics import (
    Estimate,
    estimate,
    estimated_lead,
    find,
    interquartile_mean,
    resampled_means,
)
from rlvlm.rewards.config import StepRewardConfig
from rlvlm.runs.files.folder import RunFolder, create_folder
from rlvlm.runs.settings.config import RunConfig
from rlvlm.runs.settings.kinds import StepsRun
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
        ({"good": GOOD, "bad": GOOD[::-1]}, "do not distinguish the sources"),
        ({"good": (*GOOD[:2], ()), "bad": BAD}, "supports no conclusion"),
        ({"good": ((), (), ()), "bad": ((), (), (0,))}, "nothing to compare"),
    ],
)
def test_an_unsupported_winner_is_marked(curves: Curves, said: str, make_sweep: Make) -> None:
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


def test_the_cost_of_a_judge_is_shared_by_its_queries(make_sweep: Make) -> None:
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


def test_bench_prediction_and_outcome_of_a_judge_stand_side_by_side(make_sweep: Make, tmp_path: Path) -> None:
    sweep = make_sweep()
    pairs = [[[9, 1, 0]] * 2] * 10  # nine of ten right, whichever side was shown where
    figures = {
        "pairs": {name: {"value": value, "low": 0.0, "high": 1.0, "count": 200} for name, value in
                  (("accuracy", 0.9), ("undecided", 0.0))},
        "scores": {},
    }  # fmt: skip
    row = {
        "bench": {}, "judge": {"judge": "transformers:tiny", "prompt": "direct/1"}, "figures": figures, "manifest": {},
        "tasks": {"drawer_open": figures}, "faults": [{"name": "ignores the instruction"}],
        "teacher": {"all": {"pairs": pairs}},
    }  # fmt: skip
    (tmp_path / "rows" / "tiny").mkdir(parents=True)
    (tmp_path / "rows" / "tiny" / "bench.json").write_text(json.dumps(row))
    (tmp_path / "rows" / "bench.json").write_text(json.dumps(row | {"judge": {"judge": "other", "prompt": ""}}))
    for run in sweep_results(sweep).runs:
        if run.source == "good" and run.path.exists():
            (run.path / "judge_panel.jsonl").write_text(
                json.dumps({"env_steps": 1, "judge": "transformers:tiny", "prompt": "direct/1"}) + "\n"
            )
    results = with_benches(sweep_results(sweep), [tmp_path / "rows"])
    good, bad = group_rows(results, "drawer_open")
    assert good["bench"] == "90.0 % (0 to 100) right, 0.0 % (0 to 100) undecided; ignores the instruction"
    assert bad["bench"] is bad["expected"] is None
    expected = next((one for one in predict(row["teacher"], read_curve()) if one.task == "drawer_open"), None)
    wanted = f"{expected.success:.2f}" if expected and expected.success is not None else ""
    assert (good["expected"] or "").startswith(wanted) and good["score"] is not None
    assert results.remarks[-1] == f"No run here asked the judge of {tmp_path / 'rows' / 'bench.json'}."
    with pytest.raises(UsageError, match=r"no bench\.json"):
        with_benches(results, [sweep.path])


def make_run(config: RunConfig, success: list[float]) -> None:
    folder = create_folder(config, ["rlvlm"], datetime(2026, 1, 1))
    folder.evaluations.append(
        {"step": 1_000 * (number + 1), "success_rate": rate, "episode_return": rate}
        for number, rate in enumerate(success)
    )
    folder.write_summary({"exit_reason": "done", "wall_s": 60.0, "env_steps": 1_000 * len(success)})


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    oracle = StepRewardConfig(teacher="oracle")
    for seed, success in ((1, [0.0, 1.0]), (0, [0.0, 0.5])):
        make_run(StepsRun(task="drawer_open", seed=seed, out=tmp_path / f"judge{seed}"), success)
    make_run(StepsRun(task="drawer_open", reward=oracle, out=tmp_path / "oracle"), [0.2, 0.8])
    make_run(StepsRun(task="drawer_open", reward=oracle, steps=9, out=tmp_path / "short"), [0.1])
    return tmp_path


def read(file: Path) -> list[dict[str, str]]:
    with open(file) as stream:
        return list(csv.DictReader(stream))


@pytest.mark.slow
def test_runs_get_the_page_of_a_sweep_with_one_source_for_all_that_differ_in_their_seed(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = run_results([runs, runs / "oracle", runs / "oracle" / "eval.csv"])  # counted once, however it is named
    assert {name: [run.config.seed for run in results.of("drawer_open", name)] for name in results.sources} == {
        "judge labels, image reward": [0, 1],
        "oracle labels, image reward, steps=20000": [0],
        "oracle labels, image reward, steps=9": [0],
    }
    for _ in range(2):  # again: the tables are replaced, not grown
        assert compare([runs], runs / "report") == 0
    assert "0.38" in capsys.readouterr().out  # the mean of 0.5 and 0.25, the means of each seed's last evaluations
    by_run = {row["run"]: row for row in read(runs / "report" / "report_runs.csv")}
    assert len(by_run) == 4 and by_run["oracle"]["final_success_rate"] == "0.5" and by_run["judge1"]["seed"] == "1"
    assert [row["finished"] for row in read(runs / "report" / "report.csv")].count("2 of 2") == 1
    html = (runs / "report" / "report.html").read_text()
    assert html.count("data:image/png;base64,") == 2
    assert "3 sources, 1 task, 2 seeds: 4 of 4 runs finished" in html
    assert min((runs / "report" / name).stat().st_size for name in ("report.png", "report_curves.png")) > 5_000


def test_sources_have_the_shortest_names_that_tell_them_apart(tmp_path: Path) -> None:
    one = StepsRun(task="drawer_open")
    make_run(replace(one, out=tmp_path / "one"), [0.5])
    make_run(StepsRun(task="cartpole", out=tmp_path / "cartpole"), [0.5])
    results = run_results([tmp_path])
    assert list(results.sources) == ["judge labels, image reward"], "the same settings on two tasks are one source"
    assert results.common_tasks == results.tasks == ["cartpole", "drawer_open"]
    odd = replace(one, steps=9, algo=replace(one.algo, batch_size=64, actor_lr=1e-3, hidden=(8,)))
    looked_at = replace(odd, eval=replace(odd.eval, episodes=50), seed=1)
    for name, config in {"odd": odd, "looked_at": looked_at}.items():
        make_run(replace(config, out=tmp_path / name), [0.5])
    results = run_results([tmp_path / name for name in ("one", "odd", "looked_at")])
    assert len(results.sources) == 2, "who looks more often is no other source"
    assert "judge labels, image reward (one)" in results.sources, "by the folder where many settings differ"
    assert any("steps=9" in remark and "algo.batch_size=64" in remark for remark in results.remarks)
    wider = replace(odd, algo=replace(odd.algo, hidden=(16,)), out=tmp_path / "deep" / "one")  # as in a sweep's folders
    make_run(wider, [0.5])
    names = ("one", "odd", "looked_at", "deep")
    assert len(run_results([tmp_path / name for name in names]).sources) == 3, "no two sources are called alike"


def test_caveats_are_listed(runs: Path) -> None:
    assert not run_results([runs]).remarks
    (runs / "judge0" / "summary.json").unlink()
    RunFolder(runs / "judge1", 1).metrics.append(
        [
            {"env_steps": 500, "judge/alarm": 0.0},
            {"env_steps": 900, "judge/alarm": 1.0, "judge/false_positives": 0.3},
        ]
    )
    results = run_results([runs])
    (run,) = [run for run in results.runs if run.path.name == "judge0"]
    assert run.state == "not finished" and not run.is_finished
    assert np.array_equal(run.success, [0.0, 0.5])
    unfinished, alarm = results.remarks
    assert unfinished == "1 of 4 runs are unfinished: they have no final score and are left out."
    assert "an alarm, failures score like successes more often than before the run: judge1." in alarm


def test_sources_without_a_task_in_common_are_not_ranked_and_no_run_is_a_mistake(tmp_path: Path) -> None:
    for nothing in ([], [tmp_path]):
        with pytest.raises(UsageError):
            run_results(nothing)
    make_run(StepsRun(task="drawer_open", out=tmp_path / "a"), [0.5])
    make_run(StepsRun(task="soccer", reward=StepRewardConfig(teacher="oracle"), out=tmp_path / "b"), [0.5])
    results = run_results([tmp_path])
    assert overall(results).startswith("There is no task on which every source has a finished run")
    assert [len(group_rows(results, task)) for task in results.tasks] == [1, 1]
    assert compare([tmp_path], tmp_path / "report") == 0


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([7.0], 7.0),
        ([0.0, 1.0], 0.5),
        ([0.0, 1.0, 2.0, 9.0], 1.5),  # the outer quarter on each side is one value
        ([0.0, 1.0, 5.0], (0.25 * 0 + 1.0 + 0.25 * 5) / 1.5),
        ([100.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, -50.0], 3.0),
    ],
)
def test_the_middle_half_is_averaged(values: list[float], mean: float) -> None:
    assert interquartile_mean(values) == pytest.approx(mean)


def test_it_is_averaged_along_the_axis_asked_for() -> None:
    values = np.array([[0.0, 10.0], [1.0, 11.0], [2.0, 12.0], [9.0, 99.0]])
    np.testing.assert_allclose(interquartile_mean(values, axis=0), [1.5, 11.5])


def test_two_runs_are_drawn_in_their_four_ways() -> None:
    """Of runs 0 and 1, a draw of two gives the mean 0, 0.5 or 1, with chances 1/4, 1/2, 1/4."""
    means = resampled_means([np.array([0.0, 1.0])], np.random.default_rng(0), resamples=20_000)
    values, counts = np.unique(means, return_counts=True)
    np.testing.assert_allclose(values, [0.0, 0.5, 1.0])
    np.testing.assert_allclose(counts / 20_000, [0.25, 0.5, 0.25], atol=0.02)


def test_each_task_is_drawn_from_itself() -> None:
    """With one run per task every draw is the same: only runs of the same task stand in for one another."""
    strata = [np.array([0.0]), np.array([1.0])]
    assert estimate(strata, np.random.default_rng(0)) == Estimate(value=0.5, low=0.5, high=0.5)
    mixed = estimate([np.array([0.0, 1.0])], np.random.default_rng(0))
    assert (mixed.value, mixed.low, mixed.high) == (0.5, 0.0, 1.0)


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Of 200 samples of 12 runs from a normal around 3, about 95 % of the intervals hold 3 (bootstrap: a bit fewer)."""
    rng = np.random.default_rng(1)
    found = [estimate([rng.normal(3, 1, 12)], rng) for _ in range(200)]
    assert 0.86 <= np.mean([number.low <= 3 <= number.high for number in found]) <= 0.99


def test_a_lead_is_the_difference_and_turns_with_the_sides() -> None:
    left, right = [np.array([0.9, 1.0, 1.0])], [np.array([0.0, 0.1, 0.0])]
    lead = estimated_lead(left, right, np.random.default_rng(0))
    back = estimated_lead(right, left, np.random.default_rng(0))
    assert lead.value == pytest.approx(-back.value) and lead.excludes_zero and back.excludes_zero
    assert 0.8 < lead.low <= lead.value <= lead.high <= 1.0
    assert not estimated_lead(left, left, np.random.default_rng(0)).excludes_zero
