"""Whole runs in envs that cannot draw their past again: labels by a judge, replay, resume, videos and pages.

For one in chunks see tests/examples.
"""

import pytest
from tiny_run import WORDS, arrays, assert_same_run, resumed, run_here

from rlvlm.algorithms.checkpoint import load_tree
from rlvlm.envs.pixels import PIXELS

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_run_whose_env_cannot_redraw_is_resumed_to_the_last_digit(local_ray, tmp_path, capfd):
    whole = tmp_path / "whole"
    judged = "--goal bright --judge.backend own_envs:brightness --reward.teacher judge --reward.model image"
    PIXELS.clear()
    run_here(
        *("run", "gym:own_envs:OwnReach-v0", *WORDS[1:], *judged.split(), "--algo.env-runners", "1"),
        *("--steps", "240", "--track.checkpoint-every-steps", "120", "--out", str(whole)),
    )
    assert "48 x 48 pixels of each are kept" in capfd.readouterr().out
    assert (whole / "judge_panel.html").exists() and len(list((whole / "videos").iterdir())) == 2
    assert_same_run(whole, resumed(whole))
    # a checkpoint brings the images of all that it may still draw, and no others
    PIXELS.clear()
    load_tree(whole / "checkpoints/last/algorithm")
    found = [values for name, values in arrays(whole).items() if name.endswith("/snapshots")]
    assert len(found) >= 2, "the replay, the queries"
    assert len(PIXELS) == len(PIXELS.known(found)) > 100


def test_an_env_in_turns_resumes_in_the_middle_of_episodes(local_ray, tmp_path):
    whole = tmp_path / "whole"
    learning = "--steps 80 --algo.rollout-turns 20 --algo.num-envs 10 --algo.epochs 1 --sft.turns 32 --sft.updates 5"
    often = "--eval.every-steps 20 --eval.episodes 2 --track.checkpoint-every-steps 20"
    PIXELS.clear()
    run_here("run", "filmed_lamp:TASK", *learning.split(), *often.split(), "--out", str(whole))
    killed = resumed(whole)
    for file in ("episodes.html", "checkpoints/last/algorithm/pixels.bin"):
        assert (whole / file).read_bytes() == (killed / file).read_bytes()
