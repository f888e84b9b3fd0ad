import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot as plt

from rlvlm import metrics
from rlvlm.rewards.showings import Showing, Told
from rlvlm.runs.artifacts.plots import draw_judge_over_training
from rlvlm.runs.artifacts.scored import ScoreRecorder, outcome_of, write_score_page
from rlvlm.runs.artifacts.summary import summarise_judge
from rlvlm.runs.folder.run_folder import RunFolder
from rlvlm.runs.recipes import recipe
from rlvlm.types.judging import Score, Stamp, Status
from rlvlm.types.steps import FloatArray, Frames

STAMP = Stamp(judge="pocket:scorer", revision="1", prompt="utility/1", decoding="")


def draw(snapshots: FloatArray, size_px: int) -> Frames:
    return np.broadcast_to(snapshots[:, :1, None, None], (len(snapshots), size_px, size_px, 3)).astype(np.uint8)


def told(value: float | None, success: bool, step: int) -> Told:
    snapshots = np.array([[3.0], [9.0]], np.float32)
    return Told(
        showing=Showing(goal="go <b>on</b>", snapshots=snapshots, action="+", is_success=success, progress=0.5),
        score=Score(status=Status.INVALID if value is None else Status.OK, value=value, stamp=STAMP, text="5 <i>"),
        env_step=step, timestamp=0.0, truth=0.75,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path, 1)


def test_outcomes_by_hand() -> None:
    cases = [(0.9, True), (0.9, False), (0.5, True), (0.5, False)]
    assert [outcome_of(value, "ok", success, 0.875) for value, success in cases] == [
        "true positive", "false positive", "false negative", "true negative",
    ]  # fmt: skip
    assert outcome_of(None, "invalid", True, 0.875) == "invalid"


def test_every_score_is_in_the_log_and_some_on_the_page(folder: RunFolder) -> None:
    recorder = ScoreRecorder(folder, draw, claim=0.875)
    recorder.keep([told(0.9, False, 7) for _ in range(9)])
    recorder.keep([told(None, False, 8)])
    recorder.keep([])
    rows = folder.scores.read()
    assert len(rows) == 10 and rows[0]["vlm_score"] == "0.9" and rows[0]["ground_truth_score"] == "0.75"
    assert [row["outcome"] for row in folder.samples.read()] == ["false positive"] * 4 + ["invalid"]
    folder.metrics.append([{"env_steps": 7, metrics.JUDGE_ALARM: 0.0}, {"env_steps": 9, metrics.JUDGE_ALARM: 1.0}])
    write_score_page(folder, recipe("number_line"))
    page = folder.panel.read_text()
    assert "Alarm from step 9 on" in page and page.count("<article") == 5 and "5 of 10 scores" in page
    assert "<b>on</b>" not in page and "<i>" not in page.split("<main")[-1], "untrusted words stay words"
    assert summarise_judge(folder)["alarm_step"] == 9


def test_a_run_that_nobody_scored_has_no_page(folder: RunFolder) -> None:
    write_score_page(folder, recipe("number_line"))
    assert not folder.panel.exists() and summarise_judge(folder) == {}


def test_the_plot_marks_the_alarm() -> None:
    rows = [{"env_steps": 1_000 * step, metrics.JUDGE_SCORE: 0.5, metrics.JUDGE_ALARM: step > 2} for step in range(5)]
    figure = draw_judge_over_training(json.loads(json.dumps(rows)), "a run")
    lines = [line.get_xdata() for line in figure.axes[0].get_lines()]
    assert list(lines[-1]) == [3, 3]
    plt.close(figure)
