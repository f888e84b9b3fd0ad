"""The commands about labels, as typed."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from rlvlm.cli import main
from rlvlm.core.judging import Query
from rlvlm.judges.cache import CachedJudge
from rlvlm.labels.store import LabelStore
from rlvlm.testing import FakeJudge


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    frames = np.arange(2 * 48, dtype=np.uint8).reshape(2, 1, 4, 4, 3)
    query = Query(goal="open it", left=frames[0], right=frames[1])
    CachedJudge(FakeJudge(), LabelStore(tmp_path / "store")).compare([query])
    return tmp_path / "store"


def test_a_store_is_shown_and_exported(store, capsys):
    assert main(["labels", "show", "store"]) == 0
    shown = capsys.readouterr().out
    assert "1 verdicts, 0 scores, 0 truths, 0 damaged and 0 unfinished lines; 1 distinct" in shown and "fake" in shown
    assert main(["labels", "export", "store", "--out", "a.parquet"]) == 0
    assert "1 answers in a.parquet" in capsys.readouterr().out and Path("a.parquet").stat().st_size > 1_000
    with open(next((store / "lines").iterdir()), "ab") as file:
        file.write(b"half a li")
    assert main(["labels", "show", "store"]) == 0 and "1 unfinished" in capsys.readouterr().out


def test_label_files_of_the_reference_are_imported(store, capsys):
    two = np.zeros((2, 1, 1))
    session = [np.zeros((2, 4, 8, 3), np.uint8), np.ones((2, 1)), np.array([[1], [0]]), two, two, two, two + 1]
    session[0][1] = 9
    Path("a.pkl").write_bytes(pickle.dumps(session))
    words = ["labels", "import", ".", "--store", "theirs", "--goal", "open the drawer", "--judge", "gemini"]
    assert main(words) == 0, capsys.readouterr().err
    assert "2 labels from 1 files" in (message := capsys.readouterr().out)
    assert "1 are right and 1 wrong" in message and "1 of the files' own" not in message
    assert main(["labels", "show", "theirs"]) == 0 and "imported:gemini" in capsys.readouterr().out
