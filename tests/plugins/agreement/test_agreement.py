"""Judges of others on the same episodes: only frames that were asked about count, and the farthest are named."""

import json
from pathlib import Path

import numpy as np
import pytest

from rlvlm.cli import main
from rlvlm.core.errors import UsageError
from rlvlm.plugins.agreement.outputs import asked_frames, read_outputs


def test_frames_on_the_straight_lines_between_answers_do_not_count() -> None:
    # by hand: asked at 0, 40, 80, and the last of 100 frames; the second judge bends at 80 alone
    frames = np.arange(100)
    bent = np.interp(frames, [0, 40, 80, 99], [0, 50, 20, 90])
    late = np.interp(frames, [0, 80, 99], [0, 100, 10])
    assert asked_frames([bent, late]) == [0, 40, 80, 99]
    assert asked_frames([np.linspace(0, 1, 100)]) == [0, 99]


def test_the_command_says_rank_correlations_and_where_judges_part(tmp_path: Path, capsys) -> None:
    curves = {"a": np.interp(range(81), [0, 40, 80], [0, 10, 83]), "b": np.interp(range(81), [0, 40, 80], [60, 30, 12])}
    rows = [{"model": name, "rewards": curve.tolist()} for name, curve in curves.items()]
    (tmp_path / "ep0.json").write_text(json.dumps(rows))
    assert main(["labels", "agree", str(tmp_path), "--form", "roboreason", "--frames", "1"]) == 0
    said = capsys.readouterr().out
    assert "3 frames of 1 episodes" in said and "a, b: rank correlation -1.00 of 3 frames" in said
    assert "part most: ep0, frame 80: a 83, b 12" in said and "frame 40" not in said


def test_a_csv_is_read_and_a_bad_one_is_named(tmp_path: Path) -> None:
    table = tmp_path / "outputs.csv"
    table.write_text("episode,frame,judge,value\ne,3,a,0.5\ne,3,b,1\n")
    assert read_outputs(table, "csv") == {("e", 3): {"a": 0.5, "b": 1.0}}
    for bad in ("e,3,a,0.5\ne,3,a,1\n", "e,3,a,nan\n", "e,x,a,1\n"):
        table.write_text(f"episode,frame,judge,value\n{bad}")
        with pytest.raises(UsageError, match="cannot be read as csv"):
            read_outputs(table, "csv")
