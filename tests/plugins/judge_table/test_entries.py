"""Entries of the table of judges: figures follow from answers, or the entry is refused; a name is never a script."""

import base64
import hashlib
import json
import re
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from rlvlm.cli import run_command
from rlvlm.core.errors import UsageError
from rlvlm.judge_bench.asking import Reference
from rlvlm.judge_bench.bench import freeze, measure, summarise
from rlvlm.judge_bench.items import CASES
from rlvlm.judge_bench.suites import Suite, find_suite
from rlvlm.judges.config import JudgeConfig
from rlvlm.plugins.judge_table.entries import ALL, Questions, entry_of, entry_text, read_entry, read_questions
from rlvlm.testing import fooled

SMALL = Suite(name="small", tasks=("push_block",), episodes=8, pairs=12, videos=3, controls=3, tracks=1)
JUDGES = Path(__file__).parents[3] / "docs" / "judges"
SCRIPT = "</td><script>alert(1)</script>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The entries of two judges, and the questions."""
    folder = tmp_path_factory.mktemp("entries")
    file, config = folder / "small.zip", JudgeConfig(image_px=48)
    freeze(SMALL, file, num_frames=4, size_px=48, asks_turns=False, seed=0)
    for name, judge in {"left": Reference("left"), SCRIPT: fooled.brightness(config)}.items():
        found = measure(find_suite(str(file)), judge, config, num_frames=4)
        text = entry_text(entry_of(found, name, read_questions(file)))
        (folder / f"{'left' if name == 'left' else 'script'}.json").write_text(text)
        row = summarise(found)
        entry = json.loads(text)["figures"]
        assert entry["faults"] == sorted(fault["name"] for fault in row["faults"])
        for figure, kind in (("accuracy", "pairs"), ("auc", "scores"), ("voc", "scores")):
            assert entry[ALL][figure][0] == pytest.approx(row["figures"][kind][figure]["value"], abs=1e-3)
    return folder


@pytest.fixture(scope="module")
def questions(folder) -> Questions:
    return read_questions(folder / "small.zip")


@pytest.mark.slow
def test_a_page_of_entries_sorts_and_runs_nothing_of_theirs(folder, tmp_path):
    page = tmp_path / "page.html"
    run_command(["judge-bench", "compare", str(folder / "left.json"), str(folder / "script.json"), "--out", str(page)])
    text = page.read_text()
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in text.split("<title>")[0]
    assert SCRIPT not in text and "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "default-src 'none'" in text and "unsafe-inline'; script-src" in text
    assert text.count("<tr>") == 3 and text.count("<th ") == 11 and "prefers the left image" in text


@pytest.mark.slow
def test_a_bench_of_a_frozen_suite_leaves_an_entry(folder, questions, tmp_path):
    words = ["judge-bench", str(folder / "small.zip"), "--reference", "left", "--out", str(tmp_path), "--frames", "4"]
    run_command(words)
    entry = json.loads((tmp_path / "entry.json").read_text())
    assert entry["figures"] == json.loads((folder / "left.json").read_text())["figures"]
    assert read_entry(tmp_path / "entry.json", questions).name == "left none"


@pytest.mark.slow
def test_only_a_person_may_stop_after_forty_questions(folder, questions, tmp_path):
    person = JudgeConfig(backend="human", image_px=48)
    found = measure(find_suite(str(folder / "small.zip")), fooled.brightness(person), person, num_frames=4)
    found.stamp = replace(found.stamp, judge="human:anna")
    entry, file = entry_of(found, "anna", questions), tmp_path / "entry.json"
    file.write_text(entry_text(entry))
    assert read_entry(file, questions).name == "anna"
    counts = {kind: len(given) for kind, given in entry["answers"][TASK].items()}
    assert counts == {"pairs": 20, "scores": sum(item.case in CASES for item in found.made[TASK].items)}, "no controls"
    file.write_text(entry_text(entry | {"judge": asdict(replace(found.stamp, judge="pocket:pocket"))}))
    with pytest.raises(UsageError, match="20 answers to"):
        read_entry(file, questions)


def changed(*path: str | int, to: object):
    def change(entry: dict) -> None:
        for key in path[:-1]:
            entry = entry[key]
        entry[path[-1]] = to

    return change


TASK = "push_block"
slow = partial(pytest.param, marks=pytest.mark.slow)  # the figures are computed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        slow(changed("figures", ALL, "auc", to=[0.99, 0.9, 1.0]), "do not follow from its answers: all tasks, auc"),
        slow(changed("figures", TASK, "grade of scores", to="good enough"), "do not follow .*grade of scores"),
        slow(changed("figures", "faults", to=[]), "do not follow .*faults"),
        slow(changed("figures", to={}), "do not follow"),
        slow(changed("figures", TASK, "auc", to="<b>"), "do not follow"),
        (changed("digest", to="0" * 64), "was asked about other items: hash '000000000000', and .*small.zip has"),
        (changed("answers", TASK, "pairs", to="lrt"), "3 answers to"),
        (changed("answers", TASK, "scores", 0, to=1.5), "the score 1.5"),
        (changed("answers", TASK, "scores", 0, to=float("nan")), "the score nan"),
        (changed("answers", TASK, "scores", 0, to="q"), "KeyError"),
        (changed("answers", TASK, "p", to=[[1, 2, 3]]), "is no entry"),
        (changed("answers", "other", to={}), "or to other tasks"),
        (changed("name", to="two\nlines"), "its name"),
        (changed("name", to=""), "its name"),
        (changed("judge", to={"judge": 1}), "its judge"),
        (changed("cost", "usd_per_1000", to=-1), "its cost"),
        (changed("frames", to=99), "frames is 1 to 4"),
        (changed("seed", to=True), "seed"),
        (changed("score", to="utility"), "score is none"),
        (changed("version", to=7), "not of version 1"),
    ],
)  # fmt: skip
def test_an_altered_entry_is_refused_with_its_file(folder, questions, tmp_path, change, message):
    bad = json.loads((folder / "left.json").read_text())
    change(bad)
    (tmp_path / "bad.json").write_text(json.dumps(bad))
    with pytest.raises(UsageError, match=rf"(?s)bad.json.*{message}"):
        read_entry(tmp_path / "bad.json", questions)


@pytest.mark.parametrize("text", ["", "[" * 100_000, "[]", "{}", '{"version": 1}'])
def test_an_invalid_entry_is_refused(questions, tmp_path, text):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(UsageError, match="bad.json is no entry"):
        read_entry(tmp_path / "bad.json", questions)


@pytest.mark.slow  # a second each
def test_entries_of_the_docs_follow_from_their_answers():
    (file,) = JUDGES.glob("*.zip")
    questions = read_questions(file)
    entries = {path: read_entry(path, questions) for path in sorted(JUDGES.glob("*.json"))}
    assert len(entries) >= 20 and len({entry.name for entry in entries.values()}) == len(entries)
    for path in entries:  # as the bench writes them: a pull request adds one readable file
        assert path.read_text() == entry_text(json.loads(path.read_text()))
