"""What evaluations come to, and what `rlvlm eval` counts, prints and writes."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlvlm.algorithms.evaluation import Evaluation, PlayedEpisode, Players
from rlvlm.core import metrics
from rlvlm.core.errors import MachineError
from rlvlm.envs.registry import Task, register
from rlvlm.runs import evaluate
from rlvlm.runs.files.scores import evaluation_rank, evaluation_row, score_name, scores, true_success
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.settings.tree import override
from rlvlm.runs.start import build

ROWS = [{"success_rate": "0.2", "episode_return": "-100"}, {"success_rate": "1", "episode_return": "50"}]


def test_a_task_is_compared_by_success_or_by_its_return():
    np.testing.assert_allclose(scores("drawer_open", ROWS), [0.2, 1.0])
    register(Task(name="test_scores", goal="", maker="rlvlm.testing:TinyEnv", return_range=(-200.0, 0.0)))
    np.testing.assert_allclose(scores("test_scores", ROWS), [0.5, 1.25])  # half-way, and better than solved
    assert score_name("test_scores") == "true return, 0 is -200 and 1 is 0"
    assert scores("drawer_open", []).shape == (0,)


def test_runs_are_ranked_by_success_at_the_end_and_not_at_any_step():
    passes_by = {"success_rate": "1", "success_at_end": "0.25", "episode_return": "9"}
    holds = {"success_rate": "0.5", "success_at_end": "0.5", "episode_return": "1"}
    assert list(scores("drawer_open", [passes_by, holds])) == [0.25, 0.5]
    sampled = passes_by | {"sampled_success_rate": "0.8"}  # success ends these episodes
    assert list(scores("drawer_open", [sampled])) == [0.9]


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


def test_greedy_and_sampled_play_choose_the_best_together_and_the_return_between_equals():
    def rank(*measured: float | None) -> tuple[float, float, float]:
        row = evaluation_row(evaluation(*measured), 0, 0.0)  # type: ignore[arg-type]
        as_read = {name: "" if value is None else str(value) for name, value in row.items()}
        assert evaluation_rank(as_read) == evaluation_rank(row)
        return evaluation_rank(row)

    assert rank(3, 0.25) == (0.5, 0.5, 1.0)
    assert rank(4, 0.9) > rank(4, 0.8)
    assert rank(3, 0.9) > rank(4, 0.5), "one that goes round in circles when greedy, against one that is all noise"
    row = {"success_rate": "1", "sampled_success_rate": "0.8", "strict_success_rate": "1", "episode_return": "0"}
    assert true_success(row | {"sampled_strict_success_rate": "0.5"}) == 0.75, "a goal that chance reached is none"
    assert true_success(row | {"sampled_strict_success_rate": "1"}) == 0.9, "nor is a return without the goal"
    assert rank(3, None) == (0.75, 0.75, 1.0) and rank(3, None, 2.0) > rank(3, None, 1.0)


def test_a_success_that_is_undone_counts_at_any_step_and_not_at_the_end():
    ones = np.ones(3, np.float32)
    episodes = [
        PlayedEpisode(
            snapshots=ones[:, None], env_rewards=ones, learned_rewards=ones, success=np.array(success), progress=ones
        )
        for success in ([False, True, False], [False, False, True], [False, False, False], [True, True, True])
    ]
    row = evaluation_row(Evaluation(episodes=episodes), 0, 0.0)
    assert (row["success_rate"], row["success_at_end"]) == (0.75, 0.5)
    passes_by = row | {"success_rate": 1.0, "success_at_end": 0.25, "episode_return": 9.0}
    assert evaluation_rank(row) > evaluation_rank(passes_by), "the best holds its success"


def test_equal_episodes_count_once_and_unknown_success_is_none():
    played = evaluation(0, None)
    row = evaluation_row(played, 0, 0.0)
    assert (row["episodes"], row["distinct_episodes"], row["success_rate"]) == (4, 1, 0.0)
    untold = evaluation_row(replace(played, has_success=False), 0, 0.0)
    assert untold["success_rate"] is untold["success_at_end"] is None
    assert evaluation_rank(untold) == (0.0, 0.0, 1.0), "the return is what is left to choose by"


class OneStart:
    """Plays the same episode again and again, or, given seeds that count, another one each time."""

    def __init__(self, is_varied: bool) -> None:
        self.is_varied = is_varied

    def play(self, seeds: Sequence[int]) -> list[PlayedEpisode]:
        ones = np.ones(3, np.float32)
        return [
            PlayedEpisode(
                snapshots=np.full((3, 1), seed if self.is_varied else 0, np.float32),
                env_rewards=ones,
                learned_rewards=ones * np.nan,
                success=np.array([False, True, self.is_varied]),
                progress=ones,
            )
            for seed in seeds
        ]


CHOSEN: Any = SimpleNamespace(step=5, algorithm=Path())


@pytest.fixture
def played(monkeypatch):
    players = Players(own=OneStart(False), draw=lambda rows, size_px: rows, others={"random": OneStart(True)})
    monkeypatch.setattr(evaluate, "open_players", lambda *_: players)


def test_one_episode_played_forty_times_is_one_episode(folder, played, capsys):
    folder.checkpoints = SimpleNamespace(all=lambda: [SimpleNamespace(step=5)])
    evaluate.evaluate_run(folder, CHOSEN, 40, False)
    said = capsys.readouterr().out
    compared = json.loads((folder.path / "evaluation.json").read_text())["compared"]
    own, varied = compared["policy"], compared["random"]
    assert (own["episodes"], own["distinct"], varied["distinct"]) == (40, 1, 40)
    assert own["success_low"] < 0.25 and varied["success_low"] > 0.9, "one success supports little, forty much"
    assert (own["success"], own["success_at_end"], varied["success_at_end"]) == (1.0, 0.0, 1.0)
    (line,) = (line for line in said.splitlines() if line.startswith("policy  "))
    assert "100.0 (" not in line and line.rstrip().endswith("1 of 40"), "no interval is shown of one episode"
    assert "100.0 (91 to 100)" in said and "policy: fewer starts than episodes" in said


def test_figures_are_printed_even_if_they_cannot_be_written(folder, played, tmp_path, capsys):
    folder.checkpoints = SimpleNamespace(all=lambda: [SimpleNamespace(step=9)])
    (tmp_path / "a file").touch()
    with pytest.raises(MachineError, match="the figures above could not be written") as caught:
        evaluate.evaluate_run(folder, CHOSEN, 3, False, tmp_path / "a file" / "below")
    said = capsys.readouterr().out
    assert "success at end, %" in said and "the best; the last is of step 9" in said
    assert "--out DIR" in caught.value.fix
    out = tmp_path / "elsewhere"
    evaluate.evaluate_run(folder, CHOSEN, 3, False, out)
    assert (out / "evaluation.json").is_file() and not (folder.path / "evaluation.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("task", "others"), [("drawer_open", ["policy, random starts"]), ("rlvlm.testing:TINY", None)])
def test_a_policy_of_one_start_is_also_played_from_others(task, others, monkeypatch):
    monkeypatch.setattr("rlvlm.algorithms.sac_pebble.player.load_policy", lambda _: None)
    players = build.open_players(recipe(task), Path())
    assert others is None or list(players.others) == others
    assert not build.open_players(override(recipe(task), {"env.start": "random"}), Path()).others


@pytest.mark.parametrize(
    ("share", "mean_return", "is_shown"), [(0.0, -5.0, False), (0.0, 0.0, True), (0.5, -1.0, True)]
)
def test_a_return_above_zero_is_counted_where_there_can_be_one(share, mean_return, is_shown):
    shares = {
        f"{name}{end}": share for name in ("success_at_end", "success", "above_zero") for end in ("", "_low", "_high")
    }
    one = shares | {"episodes": 4, "distinct": 4, "episode_return": mean_return, "length": 2.0}
    table = evaluate._table_of_players({"policy": one}, (), has_success=True)
    assert any("return > 0" in str(column.header) for column in table.columns) == is_shown
    assert len(list(table.columns)) == 6 + is_shown
