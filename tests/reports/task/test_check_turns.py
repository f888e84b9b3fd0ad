from pathlib import Path

import pytest
from PIL import Image

from rlvlm.cli import main
from rlvlm.envs.gym_cards.number_line import NumberLine
from rlvlm.envs.task import Task


class Deaf(NumberLine):
    """Breaks a promise: takes what it cannot read for a plus."""

    def act(self, action):
        return super().act(1 if action is None else action)


DEAF = Task(name="deaf", goal=NumberLine.goal, maker=f"{__name__}:Deaf", kind="turns")


def test_a_task_in_turns_is_checked_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sheet.png"
    assert main(["check-task", "number_line", "--episodes", "2", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "keeps every promise" in told and "expert       success in 2 of 2, return above 0 in 2" in told
    assert Image.open(out).width > 400


def test_a_broken_promise_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-task", f"{__name__}:DEAF", "--out", str(tmp_path / "sheet.png")]) == 2
    told = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "breaks a promise of its env: a reply that cannot be read does nothing" in told
