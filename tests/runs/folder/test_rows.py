import csv
from collections.abc import Callable

import numpy as np

from rlvlm.algorithms.evaluation import Evaluation, PlayedEpisode
from rlvlm.core import metrics
from rlvlm.preferences.records import QueryRecord
from rlvlm.runs.folder.rows import evaluation_rank, evaluation_row, query_row, true_success
from rlvlm.runs.folder.run_folder import RunFolder


def test_the_four_ends_of_a_query_stay_apart(folder: RunFolder, make_records: Callable[..., list[QueryRecord]]) -> None:
    folder.queries.append(map(query_row, make_records(1_500, 0)))
    with open(folder.queries.path) as file:
        rows = list(csv.DictReader(file))
    assert [row["vlm_predicted_label"] for row in rows] == ["0", "0", "-1", "-1", "-1", "1"]
    assert [row["status"] for row in rows] == ["ok", "ok", "no_preference", "invalid", "failed", "ok"]
    assert [row["correct"] for row in rows] == ["1", "0", "", "", "", ""]
    assert list(rows[0])[:5] == [
        "ground_truth_score_1",
        "ground_truth_score_2",
        "vlm_predicted_label",
        "timestamp",
        "train_iter",
    ]
    first = rows[0]
    assert (first["ground_truth_score_1"], first["ground_truth_score_2"], first["p_left"]) == ("0.9", "0.1", "0.6")
    assert first["timestamp"] == "2023-11-14T22:13:20.500+00:00"
    assert (first["env_step"], first["session"], first["index"]) == ("1500", "0", "0")


def evaluation(successes: int, sampled: float | None, reward: float = 1.0) -> Evaluation:
    """Four episodes of one step."""
    one = np.ones(1, np.float32)
    episodes = [
        PlayedEpisode(
            snapshots=one[None],
            env_rewards=one * reward,
            learned_rewards=one * np.nan,
            success=np.array([i < successes]),
            progress=one,
        )
        for i in range(4)
    ]
    return Evaluation(episodes=episodes, metrics={} if sampled is None else {metrics.EVAL_SAMPLED_SUCCESS: sampled})


def test_greedy_and_sampled_play_choose_the_best_together_and_the_return_between_equals() -> None:
    def rank(*measured: float | None) -> tuple[float, float]:
        row = evaluation_row(evaluation(*measured), 0, 0.0)  # type: ignore[arg-type]
        as_read = {name: "" if value is None else str(value) for name, value in row.items()}
        assert evaluation_rank(as_read) == evaluation_rank(row)
        return evaluation_rank(row)

    assert rank(3, 0.25) == (0.5, 1.0)
    assert rank(4, 0.9) > rank(4, 0.8)
    assert rank(3, 0.9) > rank(4, 0.5), "one that goes round in circles when greedy, against one that is all noise"
    row = {"success_rate": "1", "sampled_success_rate": "0.8", "strict_success_rate": "1", "episode_return": "0"}
    assert true_success(row | {"sampled_strict_success_rate": "0.5"}) == 0.75, "a goal that chance reached is none"
    assert true_success(row | {"sampled_strict_success_rate": "1"}) == 0.9, "nor is a return without the goal"
    assert rank(3, None) == (0.75, 1.0) and rank(3, None, 2.0) > rank(3, None, 1.0)


def test_a_success_that_is_undone_counts_at_any_step_and_not_at_the_end() -> None:
    ones = np.ones(3, np.float32)
    episodes = [
        PlayedEpisode(
            snapshots=ones[:, None], env_rewards=ones, learned_rewards=ones, success=np.array(success), progress=ones
        )
        for success in ([False, True, False], [False, False, True], [False, False, False], [True, True, True])
    ]
    row = evaluation_row(Evaluation(episodes=episodes), 0, 0.0)
    assert (row["success_rate"], row["success_at_end"]) == (0.75, 0.5)
