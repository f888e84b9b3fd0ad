from pathlib import Path

import pytest
from PIL import Image

from rlvlm.cli import main
from rlvlm.envs.push_block.env import PushBlock
from rlvlm.envs.task import Task


class Forgetful(PushBlock):
    """Breaks a promise: the state does not hold how long the episode has lasted."""

    def set_state(self, state):
        super().set_state(state | {"age": 0})


FORGETFUL = Task(name="forgetful", goal=PushBlock.goal, maker=f"{__name__}:Forgetful", kind="chunks")


def test_a_task_in_chunks_is_checked_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sheet.png"
    assert main(["check-task", "push_block", "--episodes", "3", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "keeps every promise" in told and "script       success in 3 of 3" in told
    assert Image.open(out).width > 400


def test_a_broken_promise_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-task", f"{__name__}:FORGETFUL", "--out", str(tmp_path / "sheet.png")]) == 2
    assert "breaks a promise of its env" in " ".join(capsys.readouterr().err.replace("│", " ").split())
