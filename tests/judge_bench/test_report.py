"""The command: what it prints, what it leaves in its folder, and what a signal leaves of it."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from rlvlm.cli import run_word
from rlvlm.core.errors import EXIT_PREEMPTED, UsageError
from rlvlm.judge_bench.prediction import COLUMNS

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
    run_word(["judge-bench", TASK, "--pairs", "30", "--judge.picture-px", "32", "--out", str(out), *words])
    return json.loads((out / "bench.json").read_text())


def test_a_judge_of_ones_own_gets_a_row_a_page_and_its_answers(tmp_path, capsys):
    row = bench(tmp_path / "dim", "--judge.backend", "tests.judge_bench.test_report:dim", "--frames", "4")
    said = capsys.readouterr().out
    assert "accuracy on decided pairs" in said and "expected of training: push_block" in said and "fault: " in said
    assert row["bench"]["suite"] == TASK and row["bench"]["frames"] == 4 and row["tasks"].keys() == {TASK}
    page = (tmp_path / "dim" / "bench.html").read_text()
    assert "The worst answers to pairs" in page and "data:image/png;base64," in page and "<script" not in page
    answers = [json.loads(line) for line in (tmp_path / "dim" / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == row["figures"]["cost"]["answers"]
    assert {one["status"] for one in answers} <= {"ok", "no_preference"}
    oracle = bench(tmp_path / "oracle", "--reference", "oracle")
    assert oracle["manifest"] == row["manifest"]  # the same questions, whoever is asked
    capsys.readouterr()
    run_word(["judge-bench", "compare", str(tmp_path / "oracle"), str(tmp_path / "dim" / "bench.json")])
    said = capsys.readouterr().out
    assert "other items" not in said and "frames 4 and not 8" in said and "[1] oracle" in said
    with pytest.raises(UsageError, match="not a row"):
        run_word(["judge-bench", "compare", str(tmp_path), str(tmp_path)])


def test_what_was_answered_before_a_signal_is_kept(tmp_path, capsys):
    words = ["--judge.backend", "tests.judge_bench.test_report:interrupted"]
    code = run_word(["judge-bench", TASK, "--judge.picture-px", "32", "--out", str(tmp_path), *words])
    row = json.loads((tmp_path / "bench.json").read_text())
    assert code == EXIT_PREEMPTED and not row["bench"]["is_whole"]
    assert row["figures"]["cost"]["answers"] == 64 and "stopped before the end" in capsys.readouterr().out


def test_a_curve_gives_a_prediction(tmp_path, capsys):
    runs = [f"{TASK},scores,,,,,,{worth},{seed},0.5,{worth}" for worth in (0.96, 0.98, 1.0) for seed in range(2)]
    (tmp_path / "runs.csv").write_text("\n".join([",".join(COLUMNS), *runs]))
    row = bench(tmp_path / "oracle", "--reference", "oracle", "--curve", str(tmp_path / "runs.csv"))
    assert row["prediction"][0]["success"] == pytest.approx(1.0) and row["prediction"][0]["count"] == 6
    assert (
        "expected of training: push_block, by scores (worth those of a judge that is right in 100 %): success 1.00"
        in capsys.readouterr().out
    )
    row = bench(tmp_path / "random", "--reference", "random", "--curve", str(tmp_path / "runs.csv"))
    assert row["prediction"][0]["success"] is None and "no data" in capsys.readouterr().out
