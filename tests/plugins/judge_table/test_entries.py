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
from rlvlm.core.judging import Stamp
from rlvlm.judge_bench.asking import Reference
from rlvlm.judge_bench.bench import freeze, measure, summarise
from rlvlm.judge_bench.items import CASES
from rlvlm.judge_bench.suites import Suite, find_suite
from rlvlm.judges.config import JudgeConfig
from rlvlm.plugins.judge_table.checks import note_asked_again
from rlvlm.plugins.judge_table.entries import ALL, entry_of, entry_text, read_entry, read_questions
from rlvlm.testing import fooled
from rlvlm.testing.item_judge import honest

SMALL = Suite(name="small", tasks=("push_block",), episodes=8, pairs=12, videos=3, controls=3, tracks=1)
JUDGES = Path(__file__).parents[3] / "docs" / "judges"
SCRIPT = "</td><script>alert(1)</script>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The entries of two judges, and the questions."""
    folder = tmp_path_factory.mktemp("entries")
    file, config = folder / "small.zip", JudgeConfig(image_px=48)
    freeze(SMALL, file, num_frames=4, size_px=48, asks_turns=False, seed=0)
    invented = honest(0.98)  # the published truth with 2 % errors
    for name, judge in {"left": Reference("left"), SCRIPT: fooled.brightness(config), "invented": invented}.items():
        found = measure(find_suite(str(file)), judge, config, num_frames=4)
        text = entry_text(entry_of(found, name, read_questions(file)))
        (folder / f"{'script' if name == SCRIPT else name}.json").write_text(text)
        row = summarise(found)
        entry = json.loads(text)["figures"]
        assert entry["faults"] == sorted(fault["name"] for fault in row["faults"])
        for figure, kind in (("accuracy", "pairs"), ("auc", "scores"), ("voc", "scores")):
            assert entry[ALL][figure][0] == pytest.approx(row["figures"][kind][figure]["value"], abs=1e-3)
    return folder


@pytest.fixture(scope="module")
def questions(folder):
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
    assert text.count("<tr>") == 3 and text.count("<th ") == 12 and "prefers the left image" in text


def compared(folder: Path, capsys, *names: str) -> tuple[str, str]:
    """The page of entries, and what the console said."""
    words = [str(folder / f"{name}.json") for name in names]
    run_command(
        ["judge-bench", "compare", *words, "--items", str(folder / "small.zip"), "--out", str(folder / "p.html")]
    )
    return (folder / "p.html").read_text(), capsys.readouterr().out


@pytest.mark.slow
def test_the_published_truth_with_a_few_errors_is_marked_and_comes_last(folder, capsys):
    page, _ = compared(folder, capsys, "invented", "left")
    assert page.index(">left</b>") < page.index(">invented</b>") < page.index("too near the truth (pairs right")
    assert page.count('data-value="self-reported"') == page.count("too near the truth") + 1 == 2


@pytest.mark.slow
def test_one_bad_entry_is_a_line_and_the_others_are_shown(folder, capsys):
    bad = json.loads((folder / "left.json").read_text())
    bad["answers"][TASK]["scores"][0] = float("nan")
    (folder / "bad.json").write_text(json.dumps(bad))
    page, said = compared(folder, capsys, "bad", "left")
    assert "the score nan" in page.split("Refused")[1] and page.count("<tr>") == 2 and ">left</b>" in page
    assert "refused: " in said and "1 judges, 1 refused" in said


@pytest.mark.slow
def test_a_judge_that_was_asked_again_about_other_items_is_marked_until_its_answers_change(folder, tmp_path, capsys):
    for name in ("left.json", "script.json", "small.zip"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    second, config = tmp_path / "again" / "second.zip", JudgeConfig(image_px=48)
    freeze(SMALL, second, num_frames=4, size_px=48, asks_turns=False, seed=1)
    found = measure(find_suite(str(second)), Reference("left"), config, num_frames=4)
    again = second.with_suffix(".json")
    again.write_text(entry_text(entry_of(found, "left", read_questions(second))))
    with pytest.raises(UsageError, match="items of its own"):
        note_asked_again(tmp_path / "left.json", tmp_path / "left.json", None, tmp_path / "small.zip")
    with pytest.raises(UsageError, match=r"ask the same judge|again.* is of"):
        note_asked_again(tmp_path / "script.json", again, None, second)
    run_command(["judge-bench", "asked-again", str(tmp_path / "left.json"), str(again), "--second", str(second)])
    page, _ = compared(tmp_path, capsys, "left", "script")
    assert page.count('data-value="asked again"') == page.count('data-value="self-reported"') == 1
    entry = json.loads((tmp_path / "left.json").read_text())
    text = (tmp_path / "left.json").read_text()
    (tmp_path / "left.json").write_text(text.replace(f'"seed": {entry["seed"]}', '"seed": 5'))
    page, _ = compared(tmp_path, capsys, "left")
    assert 'data-value="asked again"' not in page


@pytest.mark.slow
def test_figures_that_do_not_hold_on_other_items_are_no_confirmation(folder, questions, tmp_path):
    """A stamp is easily copied; what the judge then says is not."""
    second = tmp_path / "second.zip"
    freeze(SMALL, second, num_frames=4, size_px=48, asks_turns=False, seed=1)
    found = measure(find_suite(str(second)), Reference("random"), JudgeConfig(image_px=48), num_frames=4)
    entry = json.loads((folder / "invented.json").read_text())
    found.stamp = Stamp(**entry["judge"])
    (tmp_path / "again.json").write_text(entry_text(entry_of(found, "invented", read_questions(second))))
    with pytest.raises(UsageError, match="does not hold: accuracy"):
        note_asked_again(folder / "invented.json", tmp_path / "again.json", None, second)


@pytest.mark.slow
def test_replies_of_a_judge_are_kept_with_its_answers(folder, questions, tmp_path):
    found = measure(find_suite(str(folder / "small.zip")), Reference("left"), JudgeConfig(image_px=48), num_frames=4)
    found.answers[TASK] = [replace(answer, text="the left one") for answer in found.answers[TASK]]
    (tmp_path / "entry.json").write_text(entry_text(entry_of(found, "l", questions)))
    kept = json.loads((tmp_path / "entry.json").read_text())["answers"][TASK]
    assert set(kept["replies"]["pairs"]) == {"the left one"} and len(kept["replies"]["scores"]) == len(kept["scores"])
    assert read_entry(tmp_path / "entry.json", questions).name == "l", "a name of one letter is one"


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
        (changed("answers", TASK, "p", to=[[0.1, 0.2, 0.7]]), "1 probabilities for"),
        (changed("answers", TASK, "scores", 0, to=10**400), "a number of 401 digits"),
        (changed("cost", "usd_per_1000", to=10**400), "a number of 401 digits"),
        (changed("answers", TASK, "replies", to={"pairs": ["left"], "scores": []}), "not one reply"),
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
