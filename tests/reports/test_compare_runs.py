import csv
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from rlvlm.core.errors import UsageError
from rlvlm.reports.compare import compare, group_rows, overall
from rlvlm.reports.results import run_results
from rlvlm.rewards.config import StepRewardConfig
from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder import RunFolder, create_folder


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
        make_run(RunConfig(task="drawer_open", seed=seed, out=tmp_path / f"judge{seed}"), success)
    make_run(RunConfig(task="drawer_open", reward=oracle, out=tmp_path / "oracle"), [0.2, 0.8])
    make_run(RunConfig(task="drawer_open", reward=oracle, steps=9, out=tmp_path / "short"), [0.1])
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
    one = RunConfig(task="drawer_open")
    make_run(replace(one, out=tmp_path / "one"), [0.5])
    make_run(RunConfig(task="cartpole", out=tmp_path / "cartpole"), [0.5])
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


def test_what_a_reader_must_know_is_said(runs: Path) -> None:
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
    assert unfinished == "1 of 4 runs have not come to their end: they have no final score and are left out."
    assert "alarm: judge1." in alarm


def test_sources_without_a_task_in_common_are_not_ranked_and_no_run_is_a_mistake(tmp_path: Path) -> None:
    for nothing in ([], [tmp_path]):
        with pytest.raises(UsageError):
            run_results(nothing)
    make_run(RunConfig(task="drawer_open", out=tmp_path / "a"), [0.5])
    make_run(RunConfig(task="soccer", reward=StepRewardConfig(teacher="oracle"), out=tmp_path / "b"), [0.5])
    results = run_results([tmp_path])
    assert overall(results).startswith("There is no task on which every source has a finished run")
    assert [len(group_rows(results, task)) for task in results.tasks] == [1, 1]
    assert compare([tmp_path], tmp_path / "report") == 0
