from collections.abc import Callable

import pytest

from rlvlm.preferences.records import ScoreRecord
from rlvlm.runs.checkpoints import RunState
from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder import RunFolder
from rlvlm.runs.records import score_row
from rlvlm.runs.summary import summarise

STATE = RunState(env_steps=4_000, wall_s=240.0, peak_rss_mb=1234.4)


def test_the_numbers_of_a_filled_folder(filled: RunFolder, config: RunConfig) -> None:
    summary = summarise(filled, config, STATE, "done")
    assert summary["final_success_rate"] == 0.7  # mean of 0.2, 1.0 and 0.9
    assert (summary["success"], summary["best_success_rate"]) == (0.9, 1.0), "the headline is of the last evaluation"
    assert summary["final_episode_return"] == 30.0
    assert summary["queries"] == 12
    assert summary["labels"] == {"ok": 6, "no_preference": 2, "invalid": 2, "failed": 2}
    assert summary["label_accuracy"] == 0.5  # one right, one wrong per session; where the truth ties none counts
    assert (summary["env_steps"], summary["steps_per_s"], summary["peak_rss_mb"]) == (4_000, 16.7, 1234)
    assert (summary["seed"], summary["exit_reason"]) == (3, "done")


def test_a_run_that_never_got_anywhere_has_no_rates(folder: RunFolder, config: RunConfig) -> None:
    summary = summarise(folder, config, RunState(env_steps=0, wall_s=0.0, peak_rss_mb=0.0), "SIGTERM")
    assert summary["final_success_rate"] is summary["label_accuracy"] is summary["steps_per_s"] is None
    assert summary["queries"] == 0


def test_scores_count_as_queries_and_are_measured_against_the_truth(
    folder: RunFolder, config: RunConfig, make_scores: Callable[..., list[ScoreRecord]]
) -> None:
    folder.scores.append(map(score_row, make_scores(2_000), range(9)))
    summary = summarise(folder, config, STATE, "done")
    assert summary["queries"] == 5 and summary["labels"] == {"ok": 3, "no_preference": 0, "invalid": 1, "failed": 1}
    assert summary["score_error"] == pytest.approx(0.2)  # 0.1, 0.3 and 0.2 away
    assert summary["label_accuracy"] is None
    row = folder.scores.read()[0]
    assert (row["ground_truth_score"], row["vlm_score"], row["env_step"], row["return"]) == ("0", "0.1", "2000", "0")
    folder.cut(1_999)
    assert folder.scores.read() == []
