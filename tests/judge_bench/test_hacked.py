"""Episodes that fooled a judge are kept, made into a suite, and asked about again."""

import sys
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from rlvlm.cli import main
from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Score, Stamp, Status
from rlvlm.envs.push_block import ASKED, HAND, draw_tables, random_table
from rlvlm.envs.registry import make_env, task_env
from rlvlm.judge_bench.hacked import SUFFIX, Distinct, HackedEpisode, parse_episode, read_suite, trick_of, write_suite
from rlvlm.judge_bench.preflight import scored_suite
from rlvlm.judge_bench.suites import find_suite
from rlvlm.rewards.scoring_items import ScoredItem, ScoringItem

STAMP = Stamp(judge="fooled", revision="", prompt="", decoding="")


def episode(number: int) -> HackedEpisode:
    """A hand that moves away from a block that stays where it is."""
    states = np.stack([random_table(np.random.default_rng(number))] * 8)
    states[:, HAND] += np.linspace(0, 1, 8)[:, None] * np.array([1.4, 0.5])
    goal = "push the red block onto the pad"
    return HackedEpisode(goal=goal, snapshots=states, progress=0.4, score=0.9, judge="fooled")


def test_a_second_one_of_the_same_end_is_dropped():
    distinct = Distinct(10)
    assert [distinct.add(episode(number)) for number in (1, 2, 3, 1, 2, 3)] == [True] * 3 + [False] * 3
    assert distinct.add(replace(episode(1), goal="another"))


TURNED = [0, 1, 2, 3, 4, 3, 2, 0]
"""Moments of an episode whose end looks like its start."""


@pytest.mark.parametrize(
    ("moments", "push", "progress", "trick"),
    [
        (range(8), 0.0, 0.4, "only something small moves"),
        ([0] * 8, 0.0, 0.4, "hardly anything moves"),
        (TURNED, 0.0, 0.4, "ends as it began"),
        (range(8), 0.5, 0.0, "makes no progress"),
        (range(8), 0.5, 0.4, "ends before half of the way"),
        (range(8), 0.5, 0.8, "ends past half of the way"),
    ],
)
def test_a_trick_is_named_by_its_measurements(moments, push, progress, trick):
    shown = episode(1)
    states = shown.snapshots[moments]
    states[-1, ASKED] += push
    shown = replace(shown, snapshots=states, progress=progress)
    assert trick_of(shown, draw_tables(shown.snapshots, 64)) == trick


def test_a_hidden_scene_is_detected_by_its_contrast():
    frames = draw_tables(episode(1).snapshots, 64)
    frames[-1] = 45
    assert trick_of(episode(1), frames) == "hides the scene"


def test_an_altered_file_is_refused(tmp_path):
    file = tmp_path / f"push_block{SUFFIX}"
    write_suite(file, "push_block", [episode(1), episode(2)])
    task, (first, _) = read_suite(file)
    assert task == "push_block" and parse_episode(first.row()).row() == first.row()
    np.testing.assert_allclose(first.snapshots, episode(1).snapshots, atol=1e-5)
    good = file.read_text()
    for bad in (good.replace("0.9", "0.8"), good[:-20], "[]", good.replace("push_block", "drawer_open")):
        file.write_text(bad)
        with pytest.raises(UsageError, match="is no suite of hacked episodes"):
            read_suite(file)


def test_a_file_that_names_code_asks_for_trust(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "canary.py").write_text("raise SystemExit(99)\n")
    write_suite(tmp_path / f"x{SUFFIX}", "canary:TASK", [episode(1)])
    assert main(["judge-bench", f"x{SUFFIX}", "--reference", "oracle", "--out", "new"]) == 2
    assert "--trust" in capsys.readouterr().err and "canary" not in sys.modules


@pytest.mark.parametrize(
    "damage", [{"progress": 2}, {"goal": 3}, {"snapshots": []}, {"snapshots": [[float("inf")]]}, {"judge": "a\nb"}]
)
def test_a_row_that_is_no_episode_is_refused(damage):
    with pytest.raises(ValueError, match=r".+"):
        parse_episode(episode(1).row() | damage)


def scored(number: int, value: float | None, *, is_success: bool, success_lost: bool = False) -> ScoredItem:
    shown = episode(number)
    item = ScoringItem(
        goal=shown.goal, snapshots=shown.snapshots, is_success=is_success, success_lost=success_lost, progress=0.4
    )
    status = Status.INVALID if value is None else Status.OK
    score = Score(status=status, value=value, stamp=STAMP)
    return ScoredItem(item=item, score=score, env_step=7, timestamp=0.0, truth=0.4, success_threshold=0.5)


@pytest.mark.parametrize(
    ("name", "task", "frames", "judges"),
    [
        ("push_block", "push_block", 2, {"hand distance", "motion", "pocket:scorer"}),
        ("minigrid", "empty_random_6x6", 4, {"biased", "contrast", "motion"}),
        pytest.param("drawer_open", "drawer_open", 1, {"brightness", "redness"}, marks=pytest.mark.slow),
    ],
)
def test_a_suite_that_ships_is_found_by_its_name_and_drawn(name, task, frames, judges):
    suite = find_suite(f"hacked_{name}")
    assert suite.tasks == (task,) and {shown.judge for shown in suite.hacked} == judges
    drawn = scored_suite(task, 32).hacked  # by a run's preflight
    assert len(drawn) == 8 and {shown.snapshots[0].tobytes() for shown in drawn} <= {
        shown.snapshots[0].tobytes() for shown in suite.hacked
    }
    with closing(make_env(task, task_env(task), 0)) as env:
        assert env.draw_sized(suite.hacked[0].snapshots, 64).shape == (frames, 64, 64, 3)
