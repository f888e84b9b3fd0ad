import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot as plt

from rlvlm.core import metrics
from rlvlm.core.judging import Score, Stamp, Status
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.labels.store import LabelStore
from rlvlm.preferences.records import QueryRecord, ScoreRecord
from rlvlm.rewards.scoring_items import ScoredItem, ScoringItem
from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder import RunFolder
from rlvlm.runs.pages import write_judge_page
from rlvlm.runs.plots import draw_judge_over_training
from rlvlm.runs.recipes import recipe
from rlvlm.runs.records import Recorder, nearness, outcome_of, query_row
from rlvlm.runs.summary import summarise_judge
from rlvlm.testing import TinyEnv

STAMP = Stamp(judge="pocket:scorer", revision="1", prompt="utility/1", decoding="")


def draw(snapshots: FloatArray, size_px: int) -> Frames:
    return np.broadcast_to(snapshots[:, :1, None, None], (len(snapshots), size_px, size_px, 3)).astype(np.uint8)


def no_labels() -> LabelStore:
    raise AssertionError("scores have no store of their own")


def told(value: float | None, success: bool, step: int) -> ScoredItem:
    snapshots = np.array([[3.0], [9.0]], np.float32)
    return ScoredItem(
        item=ScoringItem(goal="go <b>on</b>", snapshots=snapshots, action="+", is_success=success, progress=0.5),
        score=Score(status=Status.INVALID if value is None else Status.OK, value=value, stamp=STAMP, text="5 <i>"),
        env_step=step, timestamp=0.0, truth=0.75, claim=0.875,
    )  # fmt: skip


@pytest.fixture
def empty(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path, 1)


def test_outcomes_by_hand() -> None:
    cases = [(0.9, True), (0.9, False), (0.5, True), (0.5, False)]
    assert [outcome_of(value, told(value, success, 0).item, 0.875) for value, success in cases] == [
        "true positive", "false positive", "false negative", "true negative",
    ]  # fmt: skip
    undone = replace(told(0.5, True, 0).item, is_undone=True)
    assert outcome_of(0.5, undone, 0.875) == "success, undone at the end"
    assert [nearness(value, 0.5) for value in (0.45, 0.9, 0.1)] == [
        "near the truth", "above the truth", "below the truth",
    ]  # fmt: skip


def test_every_score_is_in_the_log_and_some_on_the_page(empty: RunFolder) -> None:
    recorder = Recorder(empty, no_labels, draw, "")
    recorder.keep([told(0.9, False, 7) for _ in range(9)])
    recorder.keep([told(None, False, 8)])
    recorder.keep([])
    rows = empty.scores.read()
    assert len(rows) == 10 and rows[0]["vlm_score"] == "0.9" and rows[0]["ground_truth_score"] == "0.75"
    assert [row["outcome"] for row in empty.samples.read()] == ["false positive"] * 4 + ["invalid"]
    empty.metrics.append([{"env_steps": 7, metrics.JUDGE_ALARM: 0.0}, {"env_steps": 9, metrics.JUDGE_ALARM: 1.0}])
    write_judge_page(empty, recipe("number_line"))
    page = empty.panel.read_text()
    assert "Alarm from step 9 on" in page and page.count("<article") == 5 and "5 of 10 scores" in page
    assert "<b>on</b>" not in page and "<i>" not in page.split("<main")[-1], "untrusted words stay words"
    assert summarise_judge(empty)["alarm_step"] == 9


def test_a_run_of_judged_images_has_a_page(
    filled: RunFolder, config: RunConfig, make_scores: Callable[[int], list[ScoreRecord]]
) -> None:
    for file in (filled.queries.path, filled.samples.path):
        file.unlink()
    env = TinyEnv()
    recorder = Recorder(filled, no_labels, env.draw, "reach <b>it</b>")
    recorder.keep([record for record in make_scores(100) if record.score.status is not Status.FAILED])
    recorder.keep(make_scores(200)[-1:])
    assert [row["outcome"] for row in filled.samples.read()] == [
        "near the truth", "above the truth", "below the truth", "invalid", "failed",
    ]  # fmt: skip
    write_judge_page(filled, config)
    page = filled.panel.read_text()
    assert page.count("<article") == 5 and "5 of 5 scores" in page and "judge: 0.80, truth: progress 0.50" in page
    assert "<b>0.20</b><span>mean error" in page, "the scores are 0.1, 0.3 and 0.2 from their truths"
    assert "reach &lt;b&gt;" in page and page.count("data:image/png") == 5


def test_a_run_that_nobody_scored_has_no_page(empty: RunFolder) -> None:
    write_judge_page(empty, recipe("number_line"))
    assert not empty.panel.exists() and summarise_judge(empty) == {}


def test_the_plot_marks_the_alarm() -> None:
    rows = [{"env_steps": 1_000 * step, metrics.JUDGE_SCORE: 0.5, metrics.JUDGE_ALARM: step > 2} for step in range(5)]
    figure = draw_judge_over_training(json.loads(json.dumps(rows)), "a run")
    lines = [line.get_xdata() for line in figure.axes[0].get_lines()]
    assert np.asarray(lines[-1]).tolist() == [3, 3]
    plt.close(figure)


def test_the_four_ends_of_a_query_stay_apart(folder: RunFolder, make_records: Callable[..., list[QueryRecord]]) -> None:
    folder.queries.append(map(query_row, make_records(1_500, 0)))
    with open(folder.queries.path) as file:
        rows = list(csv.DictReader(file))
    assert [row["vlm_predicted_label"] for row in rows] == ["0", "0", "-1", "-1", "-1", "1"]
    assert [row["status"] for row in rows] == ["ok", "ok", "no_preference", "invalid", "failed", "ok"]
    assert [row["correct"] for row in rows] == ["1", "0", "", "", "", ""]
    of_reference = "ground_truth_score_1 ground_truth_score_2 vlm_predicted_label timestamp train_iter"
    assert " ".join(list(rows[0])[:5]) == of_reference
    first = rows[0]
    assert (first["ground_truth_score_1"], first["ground_truth_score_2"], first["p_left"]) == ("0.9", "0.1", "0.6")
    assert first["timestamp"] == "2023-11-14T22:13:20.500+00:00"
    assert (first["env_step"], first["session"], first["index"]) == ("1500", "0", "0")
