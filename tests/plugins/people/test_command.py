"""`rlvlm labels ask`, and people in `labels show` and `export`, as typed."""

import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest

from rlvlm.cli import main
from rlvlm.core.judging import Query, Stamp
from rlvlm.judges.cache import CachedJudge
from rlvlm.labels.records import answer_key
from rlvlm.labels.store import LabelStore
from rlvlm.plugins.people.queue import PeopleQueue, Said, new_ticket
from rlvlm.runs.files.folder import create_folder
from rlvlm.runs.files.video import write_mp4
from rlvlm.runs.settings.kinds import StepsRun
from rlvlm.testing import FakeJudge


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    frames = np.arange(2 * 48, dtype=np.uint8).reshape(2, 1, 4, 4, 3)
    query = Query(goal="open it", left=frames[0], right=frames[1])
    CachedJudge(FakeJudge(), LabelStore(tmp_path / "store")).compare([query])
    return tmp_path / "store"


def test_people_are_shown_by_name_and_exported_without_theirs(store, capsys):
    queue = PeopleQueue(LabelStore(store))
    [question] = [item.question for item in LabelStore(store).answers()]
    queue.ask([question], agreement=2)
    said = Said(
        question=question.id, ticket=new_ticket(), name="anna", client="a", choice="left", seconds=2.0, when=1.0
    )
    queue.add(said)
    queue.add(replace(said, ticket=new_ticket(), name="ben", choice="equal"))
    queue.keep()
    assert main(["labels", "show", "store"]) == 0
    assert "ben: 1 answers, median 2.0 s, 1 of 1 pairs equal" in capsys.readouterr().out
    for options, people in (([], "human:person-1 human:person-2"), (["--names"], "human:anna human:ben")):
        assert main(["labels", "export", "store", *options]) == 0
        rows = pq.read_table("labels.parquet").to_pylist()
        assert sorted(row["judge"] for row in rows) == ["fake", *people.split()]
        for row in rows:  # the key is a hash of the name too
            stamp = Stamp(**{name: row[name] for name in ("judge", "revision", "prompt", "decoding")})
            assert row["key"] == answer_key(question.id, stamp)


def film_two_pushes(folder: Path) -> Path:
    """Two short videos with one sentence."""
    folder.mkdir()
    for name in ("a", "b"):
        frames = np.random.default_rng(ord(name)).integers(0, 256, (21, 32, 32, 3), np.uint8)
        write_mp4(folder / f"{name}.mp4", list(frames))
        (folder / f"{name}.txt").write_text("open it")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("store", 1), ("run", 1), ("data", 3)])
def test_a_person_answers_questions_of_runs_other_judges_and_recorded_data(store, tmp_path, monkeypatch, kind, count):
    links: list[str] = []
    place = film_two_pushes(tmp_path / "data") if kind == "data" else store
    answers = tmp_path / "data.people" / "answers" if kind == "data" else store
    if kind == "run":
        folder = create_folder(StepsRun(task="rlvlm.testing:TINY", out=tmp_path / "run"), [], datetime.now())
        place, answers = folder.path, shutil.copytree(store, folder.labels)
    monkeypatch.setattr("rlvlm.plugins.people.asking._say", links.append)
    monkeypatch.setattr("rlvlm.reports.score._log", links.append)

    def answer_all() -> None:
        """Answers until as many as are asked are kept, then does as Ctrl-C does."""
        while not links:
            time.sleep(0.02)
        with httpx.Client(follow_redirects=True) as client:
            address = client.get(links[0].split()[-1]).url
            while sum(stamp.judge == "human:anna" for stamp in LabelStore(answers).stamps().elements()) < count:
                if shown := client.post(address.join("/next"), json={"client": "a"}).json()["shown"]:
                    body = {"question": shown["question"], "ticket": shown["ticket"], "choice": "left", "seconds": 1}
                    assert client.post(address.join("/answer"), json={"client": "a", **body}).status_code == 200
                time.sleep(0.05)
        if kind != "data":
            os.kill(os.getpid(), signal.SIGINT)

    person = threading.Thread(target=answer_all)
    person.start()
    options = ["--pairs", "1"] if kind == "data" else []
    options += ["--people", "anna", "--port", "0", "--token-file", str(tmp_path / "token")]
    assert main(["labels", "ask", str(place), *options]) == 0
    person.join(timeout=10)
    assert not person.is_alive()
    if kind == "data":
        rows = pq.read_table(tmp_path / "data.people" / "pairs.parquet").to_pylist()
        assert {row["judge"] for row in rows} == {"human"} and len(rows) == 2 * count, "one answer is for both orders"


def test_unaskable_data_is_refused(tmp_path, store, capsys):
    (tmp_path / "empty").mkdir()
    for place, said in (("empty", "neither a run's folder, a label store, nor"), ("nowhere", "does not exist")):
        assert main(["labels", "ask", place]) != 0
        assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())
    for options, said in ((["--people", "a b"], "letters, digits"), (["--agreement", "0"], "must be >= 1")):
        assert main(["labels", "ask", "store", *options]) != 0
        assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())
