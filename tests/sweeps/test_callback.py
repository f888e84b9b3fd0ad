from pathlib import Path
from types import SimpleNamespace

from rlvlm.sweeps.callback import cause_of


def test_a_cause_is_the_last_line_that_was_noted(tmp_path: Path) -> None:
    file = tmp_path / "error.txt"
    file.write_text("Failure # 1 (at 2026-01-01)\n  File train.py\nrlvlm.core.errors.NumericsError: the loss: nan\n\n")
    assert cause_of(SimpleNamespace(error_file=str(file))) == "the loss: nan"
    file.write_text("Failure # 1\nThe actor died because its process was killed.\n")
    assert cause_of(SimpleNamespace(error_file=str(file))) == "The actor died because its process was killed."
    assert cause_of(SimpleNamespace(error_file=None)) == "its process ended"
