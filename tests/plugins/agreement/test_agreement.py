"""Judges of others on the same episodes: only frames that were asked about count, and the farthest are shown."""

import json

import numpy as np
import pytest
from recorded_data import write_film

from rlvlm.cli import main
from rlvlm.core.errors import UsageError
from rlvlm.core.guests import guests
from rlvlm.core.judging import Score, Stamp, Status
from rlvlm.labels.store import open_store
from rlvlm.plugins.agreement.outputs import asked_frames, read_outputs
from rlvlm.plugins.agreement.page import part_most

GOAL = "lengthen the bar"


@pytest.fixture
def outputs(tmp_path, monkeypatch):
    """Two judges' outputs in roboreason's form, beside films: asked at 0, 4 and 8, opposite about every frame."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs"
    folder.mkdir()
    for name, last in (("ep0", 83), ("ep1", 60)):
        curves = {"a": np.interp(range(9), [0, 4, 8], [0, 10, last]), "b": np.interp(range(9), [0, 4, 8], [60, 30, 12])}
        rows = [{"model": judge, "rewards": curve.tolist()} for judge, curve in curves.items()]
        (folder / f"{name}.json").write_text(json.dumps(rows))
        levels = np.arange(9, dtype=np.uint8) * 20 + last
        write_film(folder / f"{name}.mp4", np.broadcast_to(levels[:, None, None, None], (9, 32, 32, 3)))
    return folder


def agree(*words: str) -> int:
    return main(["labels", "agree", "outputs", "--form", "roboreason", *words])


def test_frames_on_the_straight_lines_between_answers_do_not_count():
    # by hand: asked at 0, 40, 80, and the last of 100 frames; the second judge bends at 80 alone
    frames = np.arange(100)
    bent = np.interp(frames, [0, 40, 80, 99], [0, 50, 20, 90])
    late = np.interp(frames, [0, 80, 99], [0, 100, 10])
    assert asked_frames([bent, late]) == [0, 40, 80, 99]
    assert asked_frames([np.linspace(0, 1, 100)]) == [0, 99]


def test_the_widest_frame_of_each_episode_comes_before_the_others():
    values = {("x", 0): (0.0, 0.9), ("x", 1): (0.0, 0.8), ("y", 0): (0.5, 0.6), ("y", 1): (0.5, 0.5)}
    found = part_most({frame: dict(zip("ab", pair, strict=True)) for frame, pair in values.items()}, 3)
    assert found == [("x", 0), ("y", 0), ("x", 1)]


def test_the_page_shows_where_judges_part_with_peoples_answers_beside_them(outputs, capsys):
    words = ["--form", "roboreason", "--data", "outputs", "--store", "store", "--goal", GOAL]
    assert main(["labels", "import", "outputs", *words]) == 0
    assert "12 answers about 6 frames in store" in capsys.readouterr().out
    store = open_store(outputs.parent / "store")
    shown = {len(item.question.left): item for item in store.answers() if item.answer.stamp.judge == "imported:a"}
    assert sorted(shown) == [1, 2, 3] and shown[3].question.goal == GOAL and shown[3].answer.value in (0.83, 0.6)
    person = Stamp(judge="human:zoe", revision="", prompt="rating", decoding="")
    store.add_answers([(shown[3].question, Score(status=Status.OK, value=0.25, stamp=person))])
    assert agree("--data", "outputs", "--people", "store", "--frames", "1") == 0
    said, text = capsys.readouterr().out, (outputs.parent / "agreement.html").read_text()
    # by hand: 83 against 12 of 100 is the farthest
    assert "ep0, frame 8: a 0.83, b 0.12" in said and "In 1 of 2 last frames the 2 judges part" in said
    assert "ep0, frame 8</h3>" in text and "0.71 apart" in text and "people: person 1 0.25" in text
    assert "zoe" not in said + text and text.count("data:image/png") == 2, "the widest, and the person's"


def test_without_images_the_terminal_and_the_page_say_it_in_words(outputs, capsys):
    assert agree() == 0
    said, text = capsys.readouterr().out, (outputs.parent / "agreement.html").read_text()
    # by hand: ranks of a are 1.5 3.5 6 1.5 3.5 5, of b 5.5 3.5 1.5 twice: -16 / sqrt(16.5 * 16)
    assert "-0.98" in said and "frame 1" not in said
    assert "data:image/png" not in text and "a 0.83, b 0.12" in text


def test_a_csv_is_read_and_misfitting_rows_are_named(tmp_path, outputs, capsys):
    table = tmp_path / "outputs.csv"
    table.write_text("episode,frame,judge,value\ne,3,a,0.5\ne,3,b,1\n")
    assert read_outputs(table, "csv") == {("e", 3): {"a": 0.5, "b": 1.0}}
    assert read_outputs(table, "csv", 2.0) == {("e", 3): {"a": 0.25, "b": 0.5}}
    for bad, said in (
        ("e,3,a,0.5\ne,3,a,1\n", "cannot be read as csv"),
        ("e,3,a,nan\n", "cannot be read as csv"),
        ("e,x,a,1\n", "cannot be read as csv"),
        ("e,3,a,83\n", "values from 83 to 83, and a finished task is 1"),
    ):
        table.write_text(f"episode,frame,judge,value\n{bad}")
        with pytest.raises(UsageError, match=said):
            read_outputs(table, "csv")
    for rows, said in (
        ("e,3,a,0.5\ne,3,b,1\n", "none of the episodes e; it has ep0.mp4, ep1.mp4"),
        ("ep0,9,a,0.5\nep0,9,b,1\n", "has 9 frames, and the outputs one at 9"),
    ):
        table.write_text(f"episode,frame,judge,value\n{rows}")
        assert main(["labels", "agree", str(table), "--data", "outputs"]) == 2
        assert said in " ".join(capsys.readouterr().err.replace("│", "").split())


def test_a_form_that_no_guest_reads_is_refused_with_those_that_there_are(capsys):
    assert main(["labels", "import", "x", "--form", "xml"]) == 2
    forms = ["csv", "roboreason", *["pkl"] * ("pickles" in guests())]
    assert f"{', '.join(forms)}, got xml" in capsys.readouterr().err
    assert main(["labels", "import", "--help"]) == 0
    assert "--form roboreason" in capsys.readouterr().out
