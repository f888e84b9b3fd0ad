import csv
from collections.abc import Callable

from rlvlm.preferences.records import QueryRecord
from rlvlm.runs.folder.rows import query_row
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
