import sys
from pathlib import Path

import pytest

from rlvlm.cli import main
from rlvlm.core.errors import UsageError
from rlvlm.runs.folder import check_trust

EVIL = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"


@pytest.mark.parametrize("command", ["resume", "eval", "report", "judge-report"])
def test_a_folder_from_elsewhere_imports_nothing_without_trust(command, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "evil_module.py").write_text(EVIL)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("task: evil_module:TASK\n")
    (run / "command.txt").write_text("rlvlm run\n")
    monkeypatch.chdir(tmp_path)
    assert main([command, str(run)]) == 2
    said = "".join(char for char in capsys.readouterr().err if char.isalnum() or char in "._:-")
    assert "namescodeoutsideofrlvlmevil_module:" in said and "--trust" in said
    assert not (tmp_path / "ran").exists() and "evil_module" not in sys.modules


@pytest.mark.parametrize(
    ("file", "text", "is_code"),
    [
        ("config.yaml", "task: drawer_open\npipeline: policy", False),
        ("config.yaml", "task: gym:CartPole-v1", False),
        ("config.yaml", "task: gym:mine:CartPole-v1", True),
        ("config.yaml", "task: metaworld/door-open-v3", False),
        ("config.yaml", "task: rlvlm.testing:TINY", False),
        ("config.yaml", "task: rlvlm_mine:TASK", True),
        ("sweep.yaml", "tasks: [drawer_open, 'mine:TASK']", True),
        ("sweep.yaml", "tasks: [drawer_open, soccer]", False),
        ("config.yaml", "- a list", False),
    ],
)
def test_what_counts_as_code(file: str, text: str, is_code: bool, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    (run / "checkpoints" / "last").mkdir(parents=True)
    (run / file).write_text(text + "\n")
    for path in (run, run / "checkpoints" / "last", tmp_path / "runs"):  # itself, below it, above it
        check_trust([path], trust=True)
        if not is_code:
            check_trust([path], trust=False)
            continue
        with pytest.raises(UsageError, match="mine:"):
            check_trust([path], trust=False)
