"""The commands about labels, as typed."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlvlm.cli import main
from rlvlm.core.judging import Query
from rlvlm.judges.cache import CachedJudge
from rlvlm.labels.store import LabelStore
from rlvlm.testing import FakeJudge


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    frames = np.arange(2 * 48, dtype=np.uint8).reshape(2, 1, 4, 4, 3)
    query = Query(goal="open it", left=frames[0], right=frames[1])
    CachedJudge(FakeJudge(), LabelStore(tmp_path / "store")).compare([query])
    return tmp_path / "store"


def test_a_store_is_shown_and_exported(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["labels", "show", "store"]) == 0
    shown = capsys.readouterr().out
    assert "1 verdicts, 0 scores, 0 truths, 0 damaged and 0 unfinished lines; 1 distinct" in shown and "fake" in shown
    assert main(["labels", "export", "store", "--out", "a.parquet"]) == 0
    assert "1 answers in a.parquet" in capsys.readouterr().out and Path("a.parquet").stat().st_size > 1_000
    with open(next((store / "lines").iterdir()), "ab") as file:
        file.write(b"half a li")
    assert main(["labels", "show", "store"]) == 0 and "1 unfinished" in capsys.readouterr().out


def test_label_files_of_the_reference_are_imported(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = np.zeros((2, 1, 1))
    session = [np.zeros((2, 4, 8, 3), np.uint8), np.ones((2, 1)), np.array([[1], [0]]), two, two, two, two + 1]
    session[0][1] = 9
    Path("a.pkl").write_bytes(pickle.dumps(session))
    assert main(["labels", "import", ".", "--store", "theirs", "--goal", "open the drawer", "--judge", "gemini"]) == 0
    assert "2 labels from 1 files" in (told := capsys.readouterr().out)
    assert "1 are right and 1 wrong" in told and "1 of the files' own" not in told
    assert main(["labels", "show", "theirs"]) == 0 and "imported:gemini" in capsys.readouterr().out


MISTAKES = [
    ("labels", "followed by show, export, import"),
    ("labels shw store", "rlvlm labels show"),
    ("labels show nowhere", "no label store"),
    ("labels import --store s --goal g", "no file to import"),
    ("labels import none.pkl --store s --goal g", "cannot be opened"),
    ("labels import store/store.json --store s --goal g", "no pickle"),
    ("labels import store/store.json --store s --goal <b>", "plain words"),
    ("judge-report", "at least one"),
    ("judge-report nowhere", "does not exist"),
    ("judge-report store --ask-swapped -1", "must be >= 0"),
    ("judge-report store --ask-swapped 5", "not in a run"),
    ("distill --from nowhere --out d", "no label store"),
    ("distill --from store --out d", "too few"),
    ("distill --from store --out store", "in use"),
    ("distill --from store --out d --steps 0", "must be >= 1"),
    ("run drawer_open --judge.backend cached", "needs judge.cached.store"),
    ("run drawer_open --judge.store .", "not empty"),
]


@pytest.mark.parametrize(("line", "told"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_is_told_with_its_fix(
    line: str, told: str, store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUJOCO_GL", "egl")
    assert main(line.split()) == 2
    err = capsys.readouterr().err
    assert told in " ".join(err.replace("│", " ").split()) and "Traceback" not in err
    assert sorted(file.name for file in Path().iterdir()) == ["store"]


def test_help_loads_no_machinery() -> None:
    code = (
        "import sys\nfrom rlvlm.cli import main\n"
        "for line in ('judge-report --help', 'labels show --help', 'distill --help', 'labels import --help'):\n"
        "    assert main(line.split()) == 0\n"
        "assert not {'torch', 'ray', 'numpy', 'matplotlib'} & set(sys.modules)\n"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
