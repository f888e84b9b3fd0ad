from pathlib import Path

import pytest

from rlvlm.cli import run_word
from rlvlm.demonstrations.folder import create_folder
from rlvlm.errors import UsageError


def test_a_task_is_wanted_first() -> None:
    with pytest.raises(UsageError, match="name a task first"):
        run_word(["sft", "--from", "somewhere"])


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no folder of demonstrations"):
        run_word(["sft", "number_line", "--from", str(tmp_path)])
    create_folder(tmp_path / "demos", "ez_points", "turns", ("1",))
    with pytest.raises(UsageError, match="holds demonstrations of ez_points, not of number_line"):
        run_word(["sft", "number_line", "--from", str(tmp_path / "demos")])


def test_a_wrong_number_is_told_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_word(["sft", "number_line", "--sft.updates", "0"])
    assert "sft.updates must be > 0" in capsys.readouterr().err
