import csv
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from rlvlm.errors import UsageError
from rlvlm.reports.report import compare_runs, find_runs, group_runs, read_run
from rlvlm.rewards.config import RewardConfig
from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder.run_folder import create_folder


def make_run(path: Path, config: RunConfig, success: list[float]) -> None:
    folder = create_folder(config, ["rlvlm"], datetime(2026, 1, 1))
    folder.evaluations.append(
        {"step": 1_000 * (number + 1), "success_rate": rate, "episode_return": rate}
        for number, rate in enumerate(success)
    )
    folder.write_summary(
        {
            "exit_reason": "done",
            "final_success_rate": success[-1],
            "queries": 10,
            "wall_s": 60.0,
            "env_steps": 1_000 * len(success),
            "label_accuracy": 0.9,
        }
    )


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for seed, success in ((1, [0.0, 1.0]), (0, [0.0, 0.5])):
        make_run(tmp_path, RunConfig(task="drawer_open", seed=seed, out=tmp_path / f"judge{seed}"), success)
    oracle = RewardConfig(teacher="oracle")
    make_run(tmp_path, RunConfig(task="drawer_open", reward=oracle, out=tmp_path / "oracle"), [0.2, 0.8])
    make_run(tmp_path, RunConfig(task="drawer_open", reward=oracle, steps=9, out=tmp_path / "short"), [0.1])
    return tmp_path


def test_runs_that_differ_in_their_seed_form_a_group(runs: Path) -> None:
    groups = group_runs([read_run(folder) for folder in find_runs([runs])])
    assert {name: [run.config.seed for run in group] for name, group in groups.items()} == {
        "drawer_open: judge labels, image reward": [0, 1],
        "drawer_open: oracle labels, image reward, steps=20000": [0],
        "drawer_open: oracle labels, image reward, steps=9": [0],
    }


def test_a_run_is_counted_once_however_it_is_named(runs: Path) -> None:
    assert len(find_runs([runs, runs / "oracle", runs / "oracle" / "eval.csv"])) == 4


def test_the_report_is_written(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_runs([runs], runs / "report") == 0
    assert "75%" in capsys.readouterr().out  # the mean of the two seeds
    with open(runs / "report" / "report.csv") as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    assert len(rows) == 4 and rows["oracle"]["final_success_rate"] == "0.8" and rows["judge1"]["seed"] == "1"
    html = (runs / "report" / "report.html").read_text()
    assert "data:image/png;base64," in html and "50% to 100%" in html
    assert (runs / "report" / "report.png").stat().st_size > 5_000
    compare_runs([runs], runs / "report")  # again: the table is replaced, not grown
    with open(runs / "report" / "report.csv") as file:
        assert len(list(csv.DictReader(file))) == 4


def test_an_unfinished_run_is_shown_as_far_as_it_came(runs: Path) -> None:
    (runs / "judge0" / "summary.json").unlink()
    run = read_run(find_runs([runs / "judge0"])[0])
    assert run.summary["exit_reason"] == "not finished"
    assert np.array_equal(run.success, np.array([0.0, 0.5], np.float32))


def test_no_run_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        find_runs([])
    with pytest.raises(UsageError):
        find_runs([tmp_path])
