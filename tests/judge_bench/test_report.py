"""The command: what it prints, what it leaves in its folder, and what a signal leaves of it."""

import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from rlvlm.cli import run_command
from rlvlm.core.errors import EXIT_PREEMPTED, UsageError
from rlvlm.judge_bench.prediction import COLUMNS
from rlvlm.pages.answers import read_sources

pytestmark = pytest.mark.slow  # each bench draws five charts

TASK = "push_block"
SENT: list[signal.Signals] = []
"""To this process, by `interrupted`."""


def dim(images, goal):
    """A judge of one's own, see `--judge.backend`: the brighter, the nearer."""
    return [float(np.mean(image)) / 255 for image in images]


def interrupted(images, goal):
    """Ctrl-C while the judge is asked for the first time."""
    if not SENT:
        SENT.append(signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    return dim(images, goal)


def bench(out: Path, *words: str) -> dict:
    run_command(["judge-bench", TASK, "--pairs", "30", "--judge.image-px", "32", "--out", str(out), *words])
    return json.loads((out / "bench.json").read_text())


def scored(row: dict) -> dict:
    """What is predicted of training with its scores."""
    return next(one for one in row["prediction"] if one["kind"] == "scores")


def test_a_users_own_judge_gets_a_row_a_page_and_its_answers(tmp_path, capsys):
    row = bench(tmp_path / "dim", "--judge.backend", "tests.judge_bench.test_report:dim", "--frames", "4")
    said = capsys.readouterr().out
    assert "accuracy on decided pairs" in said and "Good enough to train with?" in said and "\nWhat is wrong\n" in said
    assert row["bench"]["suite"] == TASK and row["bench"]["frames"] == 4 and row["tasks"].keys() == {TASK}
    page = (tmp_path / "dim" / "bench.html").read_text()
    assert "The worst answers to pairs" in page and "data:image/png;base64," in page and "<script" not in page
    answers = pq.read_table(tmp_path / "dim" / "answers.parquet").to_pylist()
    assert len(answers) == row["figures"]["cost"]["answers"]
    assert {answer["status"] for answer in answers} <= {"ok", "no_preference"}
    (again,) = read_sources([tmp_path / "dim"])
    # images are not in the table, so what needs them is not found again; all else follows from it
    assert json.loads(json.dumps(again.graded.pairs)) == row["figures"]["pairs"]
    assert json.loads(json.dumps(again.graded.scores)) == row["figures"]["scores"]
    assert {fault.name for fault in again.graded.faults} <= {fault["name"] for fault in row["faults"]}
    oracle = bench(tmp_path / "oracle", "--reference", "oracle")
    assert oracle["manifest"] == row["manifest"]  # the same questions, whoever is asked
    capsys.readouterr()
    run_command(["judge-bench", "compare", str(tmp_path / "oracle"), str(tmp_path / "dim" / "bench.json")])
    said = capsys.readouterr().out
    assert "other items" not in said and "frames 4 and not 8" in said and "[1] oracle" in said
    assert "accuracy on decided pairs" in said and said.count(f"\n{TASK} ") == 2, "a line of each judge"
    # of a judge that was asked about more, only what both were asked is compared
    more = {name: row[name] | {"drawer_open": row[name][TASK]} for name in ("tasks", "manifest")}
    (tmp_path / "more.json").write_text(json.dumps(row | more))
    run_command(["judge-bench", "compare", str(tmp_path / "oracle"), str(tmp_path / "more.json")])
    said = capsys.readouterr().out
    assert "other tasks (drawer_open)" in said and "accuracy on decided pairs" not in said
    assert said.count(f"\n{TASK} ") == 2 and "\ndrawer_open " not in said
    with pytest.raises(UsageError, match="not a row"):
        run_command(["judge-bench", "compare", str(tmp_path), str(tmp_path)])


def test_answers_from_before_a_signal_are_kept(tmp_path, capsys):
    words = ["--judge.backend", "tests.judge_bench.test_report:interrupted"]
    code = run_command(["judge-bench", TASK, "--judge.image-px", "32", "--out", str(tmp_path), *words])
    row = json.loads((tmp_path / "bench.json").read_text())
    assert code == EXIT_PREEMPTED and not row["bench"]["is_whole"]
    assert row["figures"]["cost"]["answers"] == 64 and "Stopped before the end" in capsys.readouterr().out


def test_a_curve_gives_a_prediction(tmp_path, capsys):
    runs = [f"{TASK},scores,,,,,,{worth},{seed},0.5,{worth}" for worth in (0.96, 0.98, 1.0) for seed in range(2)]
    (tmp_path / "runs.csv").write_text("\n".join([",".join(COLUMNS), *runs]))
    row = bench(tmp_path / "oracle", "--reference", "oracle", "--curve", str(tmp_path / "runs.csv"))
    assert scored(row)["success"] == pytest.approx(1.0) and scored(row)["count"] == 6
    said = capsys.readouterr().out.split("Good enough to train with?")[1]
    assert re.search(r"push_block +scores +uncertain +100 % \(.*\) +1.00 \(0.\d\d to 1.00\), from 0.50, 6 runs", said)
    assert re.search(r"push_block +comparisons +uncertain +100 % \(.*\) +-", said) and "nor of another task" in said
    page = (tmp_path / "oracle" / "bench.html").read_text()
    answer = re.search(r"1.00 \(0.\d\d to 1.00\), from 0.50", page)
    heads = ("What it would teach", "What is wrong", "How it answers", "Figures", "The worst", "Tasks")
    places = [page.find(f"<h2>{head}") for head in heads]
    assert answer and 0 < answer.start() < places[0] and places == sorted(places), "the answer first, the tables last"
    assert page.count("data:image/svg+xml;base64,") == 5, "worth, curve, difficulty, scores, sides"
    row = bench(tmp_path / "random", "--reference", "random", "--curve", str(tmp_path / "runs.csv"))
    said = capsys.readouterr().out
    assert scored(row)["success"] is None and "all learned" not in said, "its fault says more than runs of other judges"
    assert scored(row)["grade"] == "too weak" and "does not tell success from failure" in said
