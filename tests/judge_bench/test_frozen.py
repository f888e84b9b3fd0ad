"""Suites as files: asked as the suite itself is, and refused by name where they were damaged or altered."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlvlm.cli import run_command
from rlvlm.core.errors import UsageError
from rlvlm.judge_bench.archive import ArchiveWriter, open_archive
from rlvlm.judge_bench.bench import freeze, measure, summarise
from rlvlm.judge_bench.frozen import frozen_items
from rlvlm.judge_bench.suites import Suite, find_suite
from rlvlm.judges.config import JudgeConfig
from rlvlm.testing import fooled

SMALL = Suite(name="small", tasks=("push_block",), episodes=8, pairs=12, videos=3, controls=3, tracks=1)
PX = 48
HOW = {"num_frames": 4, "size_px": PX, "asks_turns": False, "seed": 0}
GOOD = {
    "kind": "video", "case": "success", "goal": "push it", "sides": [[0, 1]], "truth": [1.0], "success": True,
    "colours": [[1.0, 2.0, 3.0]],
}  # fmt: skip


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    path = tmp_path_factory.mktemp("frozen") / "small.zip"
    freeze(SMALL, path, **HOW)
    return path


@pytest.mark.slow
def test_a_frozen_suite_is_asked_as_the_suite_itself(frozen, tmp_path):
    config = JudgeConfig(image_px=PX)
    rows = [
        summarise(measure(suite, fooled.brightness(config), config, num_frames=4))
        for suite in (SMALL, find_suite(str(frozen)))
    ]
    live, asked = (row["figures"] for row in rows)
    assert asked["pairs"] == live["pairs"] and asked["scores"]["auc"] == live["scores"]["auc"]
    assert asked["scores"]["steady"] == live["scores"]["steady"] and asked["scores"]["voc"] == live["scores"]["voc"]
    assert rows[1]["bench"]["frozen"] == open_archive(frozen).digest and not rows[0]["bench"]["frozen"]
    # the same suite is the same file, and its questions alone have the same hash
    again = freeze(SMALL, tmp_path / "again.zip", **HOW)
    assert (tmp_path / "again.zip").read_bytes() == frozen.read_bytes() and again.digest == rows[1]["bench"]["frozen"]
    run_command(["judge-bench", "freeze", str(frozen), "--questions-only", "--out", str(tmp_path / "asked.zip")])
    asked = open_archive(tmp_path / "asked.zip")
    assert asked.digest == again.digest and frozen_items(asked, "push_block", None).made.items
    with pytest.raises(UsageError, match=r"asked.zip: 0.pixels .* it has no 0.pixels"):
        frozen_items(asked, "push_block", PX)


def test_a_size_of_its_own_stands_for_each_camera(tmp_path):
    images = [np.full((2, 4, 6, 3), 9, np.uint8), np.arange(75, dtype=np.uint8).reshape(1, 5, 5, 3)]
    rows = [GOOD, GOOD | {"camera": "side", "sides": [[2]]}]
    writer = ArchiveWriter(tmp_path / "a.zip", "a", frames=8, turns=False)
    with writer.writing():
        writer.add("t", "", rows, images)
    made = frozen_items(open_archive(tmp_path / "a.zip"), "t", 300).made
    for item, group in zip(made.items, images, strict=True):
        np.testing.assert_array_equal(made.draw(item.sides[0], item.camera), group)


def rewritten(path: Path, change: Callable[[str, bytes], bytes | None]) -> None:
    """The archive with other members; None leaves one out."""
    with zipfile.ZipFile(path) as old:
        members = {name: change(name, old.read(name)) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, content in members.items():
            if content is not None:
                new.writestr(name, content)


def only(name: str, change: Callable[[bytes], bytes | None]) -> Callable[[Path], None]:
    return lambda path: rewritten(path, lambda member, content: change(content) if member == name else content)


def fact(**facts: object) -> Callable[[Path], None]:
    return only("suite.json", lambda content: json.dumps(json.loads(content) | facts).encode())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-900]), "suite.json .*not a zip file"),
        (lambda path: path.write_bytes(b"none"), "suite.json .*not a zip file"),
        (lambda path: path.unlink(), "No such file"),
        (only("suite.json", lambda content: None), "it has no suite.json"),
        (only("suite.json", lambda content: b"[" * 100_000), "suite.json"),
        (fact(suite="another"), "it was altered"),
        (fact(suite="\x1b[2Jno"), "no name of a line of text"),
        (fact(version=2), "not of version 1"),
        (fact(frames=10**9), "frames is 1 to 64"),
        (fact(tasks=[]), "1 to 1000 tasks"),
        (fact(tasks=[{"task": "a", "note": "", "groups": [[2**23, 4096, 4096]], "pixels": "0" * 64,
                      "questions": "0" * 64}]), "bytes of pixels"),
        (only("0.items.jsonl", lambda content: content.replace(b"[1.0]", b"[0.9]", 1)), "0.items.jsonl .*altered"),
        (only("0.pixels", lambda content: content[:-1] + bytes([content[-1] ^ 1])), "0.pixels .*altered"),
        (only("0.pixels", lambda content: content[:-1]), "0.pixels .*truncated"),
        (only("0.pixels", lambda content: content + b"0"), "0.pixels .*more pixels"),
    ],
)  # fmt: skip
def test_a_damaged_or_altered_file_is_refused_by_name(frozen, tmp_path, damage, message):
    path = tmp_path / "bad.zip"
    shutil.copy(frozen, path)
    damage(path)
    with pytest.raises(UsageError, match=f"bad.zip: .*{message}"):
        frozen_items(open_archive(path), "push_block", PX)


def test_bytes_that_were_changed_in_place_are_noticed(frozen, tmp_path):
    content = bytearray(frozen.read_bytes())
    path = tmp_path / "bad.zip"
    for place in np.linspace(60, len(content) - 60, 12).astype(int).tolist():
        path.write_bytes(content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :])
        with pytest.raises(UsageError, match=r"bad.zip: "):
            frozen_items(open_archive(path), "push_block", PX)


@pytest.mark.parametrize(
    "bad",
    [
        {"sides": [[0, 2]]}, {"sides": [[-1]]}, {"sides": [[]]}, {"sides": [[0]] * 2}, {"sides": [[0.5]]},
        {"sides": [[True]]}, {"kind": "song"}, {"case": "pair"}, {"goal": "  "}, {"goal": 3}, {"truth": [1.5]},
        {"truth": []}, {"truth": ["1"]}, {"truth": "NaN"},
        {"progress": [0.5]}, {"success": 1}, {"source": 9}, {"change": "upside down"},
        {"colours": [[1, 2, 300]]}, {"colours": []}, {"extra": 1}, {"camera": "x" * 3_000},
    ],
)  # fmt: skip
def test_a_question_out_of_bounds_is_refused_with_its_line(tmp_path, bad):
    writer = ArchiveWriter(tmp_path / "a.zip", "a", frames=8, turns=False)
    with writer.writing():
        writer.add("t", "", [GOOD, GOOD | bad], [np.zeros((2, 4, 4, 3), np.uint8)])
    with pytest.raises(UsageError, match=r"a.zip: 0.items.jsonl, line 2: it is no question"):
        frozen_items(open_archive(tmp_path / "a.zip"), "t", None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pairs", "3"], "has its own"),
        (["--goal", "x"], "has its own"),
        (["--frames", "5"], "holds at most 4 images"),
        (["--judge.score", "utility"], "no single turns"),
    ],
)
def test_options_that_would_change_the_items_are_refused(frozen, tmp_path, words, message):
    with pytest.raises(UsageError, match=message):
        run_command(["judge-bench", str(frozen), "--out", str(tmp_path), *words])


def test_a_failed_freeze_leaves_no_file(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"name ends in .zip"):
        run_command(["judge-bench", "freeze", "push_block", "--out", str(tmp_path / "a.tar")])
    monkeypatch.setattr("rlvlm.judge_bench.frozen.MAX_TASK_BYTES", 10_000)
    with pytest.raises(UsageError, match="more than 10,000 bytes"):
        freeze(SMALL, tmp_path / "big.zip", **HOW)
    assert not list(tmp_path.iterdir())
