"""Measures of a judge by hand, and reports of runs and stores as a user gets them."""

import csv
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from grey_pairs import fill_store

from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Label, Query, Stamp, Status, Usage, Verdict
from rlvlm.judge_bench.asking import Answer
from rlvlm.judge_bench.figures import confidences, pair_figures
from rlvlm.judges.agreement import calibration_error, cohens_kappa
from rlvlm.judges.cache import CachedJudge
from rlvlm.labels.records import Origin
from rlvlm.labels.store import LabelStore
from rlvlm.pages.answers import Answers, by_bin, confusion, outcomes, read_sources, read_store, summarise
from rlvlm.preferences.config import THEIR_TASKS
from rlvlm.preferences.teachers import SHARES
from rlvlm.reports.judge_report import compare_answers, report_judges
from rlvlm.runs.files.answers import pair_of
from rlvlm.runs.files.records import query_row, truths_of
from rlvlm.runs.files.summary import summarise_answers
from rlvlm.testing import FakeJudge

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"


class Liar(FakeJudge):
    """Always names the left side, in words that a page must not run."""

    @property
    def stamp(self) -> Stamp:
        return Stamp(judge="liar <b>", revision="", prompt="two_stage/1", decoding="")

    def compare(self, queries):
        return [
            Verdict(
                status=Status.OK,
                label=Label.LEFT,
                stamp=self.stamp,
                probabilities=(0.8, 0.1, 0.1),
                text=EVIL,
                latency_s=0.5,
                usage=Usage(tokens_in=90, tokens_out=10, cost_usd=0.002),
            )
            for _ in queries
        ]


@pytest.mark.slow
def test_two_judges_in_a_store_are_compared(tmp_path, capsys):
    levels = np.random.default_rng(1).permutation(256)[:20].reshape(10, 2)
    for judge in (FakeJudge(), Liar()):
        fill_store(tmp_path / "s", judge, levels, both_orders=True)
    assert report_judges([tmp_path / "s"], tmp_path / "out") == 0
    rows = {row["source"]: row for row in json.loads((tmp_path / "out" / "judge_report.json").read_text())}
    assert rows["fake brightness/1"]["answers"] == 20 and rows["fake brightness/1"]["faults"] == []
    assert [fault["name"] for fault in rows["liar <b> two_stage/1"]["faults"]] == ["prefers the left image"]
    honest, liar = (rows[name]["figures"]["pairs"] for name in ("fake brightness/1", "liar <b> two_stage/1"))
    assert honest["accuracy"]["value"] == honest["consistent"]["value"] == 1.0
    assert [liar[name]["value"] for name in ("accuracy", "consistent", "said_left")] == [0.5, 0.0, 1.0]
    assert liar["ece"] == pytest.approx(abs(0.8 / 0.9 - 0.5))
    cost = rows["liar <b> two_stage/1"]["figures"]["cost"]
    assert cost["tokens"] == 100 and cost["usd_per_1000"] == pytest.approx(2.0)
    page = (tmp_path / "out" / "judge_report.html").read_text()
    assert EVIL not in page and "<script" not in page and "liar <b>" not in page and "liar &lt;b&gt;" in page
    assert page.count("<article") == 6 and "default-src 'none'" in page
    charts = re.findall(r'<img class="plot" alt="([^"]*)" src="data:image/svg', page)
    assert charts == [
        "answers to pairs, by difficulty", "accuracy by difficulty, one row each", "true side against chosen side",
        "calibration",
    ]  # fmt: skip
    with open(tmp_path / "out" / "judge_report.csv") as file:
        bins = list(csv.DictReader(file))
    assert len(bins) == 20 and sum(int(row["incorrect"]) for row in bins) == 10
    assert "50.0 %" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_is_reported_from_its_log_alone(filled, tmp_path, capsys):
    assert report_judges([filled.path], tmp_path / "out") == 0
    (row,) = json.loads((tmp_path / "out" / "judge_report.json").read_text())
    assert (row["answers"], row["correct"], row["incorrect"], row["truth_ties"]) == (12, 2, 2, 2)
    assert (row["no_preference"], row["invalid"], row["failed"]) == (2, 2, 2)
    pairs = row["figures"]["pairs"]
    assert pairs["accuracy"]["value"] == 0.5 and pairs["consistent"] is None
    assert pairs["undecided"]["value"] == pytest.approx(1 / 6) and pairs["unread"]["value"] == pytest.approx(1 / 3)
    page = (tmp_path / "out" / "judge_report.html").read_text()
    assert "<script" not in page and "not in a store" in page


def test_a_run_finds_its_images_and_prices_in_its_store(folder, make_records, tmp_path):
    """The question's name in the log leads to the line in the store, and the truth goes the other way."""
    store = LabelStore(folder.labels, Origin(run="run", task="drawer_open", seed=3))
    frames = np.random.default_rng(0).integers(0, 256, (12, 1, 16, 16, 3), np.uint8)
    verdicts = CachedJudge(Liar(), store).compare(
        [Query(goal="open it", left=frames[2 * n], right=frames[2 * n + 1]) for n in range(6)]
    )
    records = [replace(record, verdict=verdict) for record, verdict in zip(make_records(100, 0), verdicts, strict=True)]
    folder.queries.append(map(query_row, records))
    truths = list(truths_of(records))
    store.add_truths(truths)
    assert [truth.progress for truth in truths][:2] == [pytest.approx((0.9, 0.1)), pytest.approx((0.1, 0.9))]
    assert [each.scale for each in read_store(folder.labels)] == [1.0], "progress needs no scale"
    assert list(truths_of(make_records(100, 0))) == []  # answers that no store keeps
    (answers,) = read_sources([folder.path])
    assert [answer.cost_usd for answer in answers.answers] == pytest.approx([0.002] * 6) and "liar" in answers.about
    np.testing.assert_array_equal(answers.store.image(answers.images[3][1]), frames[7][0])


@pytest.mark.slow
def test_a_person_and_a_judge_are_held_against_each_other_on_the_same_queries(folder, make_records, tmp_path, capsys):
    def said(labels, judge, used_step, latency_s):
        ends = [(Status.of(label), label) for label in labels]
        stamp = Stamp(judge=judge, revision="", prompt="", decoding="")
        about = {"stamp": stamp, "latency_s": latency_s}
        records = zip(make_records(100, 0), ends, strict=True)
        return [
            replace(record, used_step=used_step, verdict=Verdict(status=status, label=label, **about))
            for record, (status, label) in records
        ]

    left, right, tie = Label.LEFT, Label.RIGHT, Label.TIE
    # the truths: left, right, left, left, right, tie; the judge's answer to the fourth cannot be read
    rows = said([left, left, right, None, right, left], "vlm", None, 0.5)
    rows += said([left, right, tie, left, right, left], "human", 130, 4.0)
    folder.queries.append(map(query_row, rows))
    sources = read_sources([folder.path])
    assert [source.name for source in sources] == ["run by vlm", "run by human"] and [*map(len, sources)] == [6, 6]
    (row,) = compare_answers(sources)
    # of five: the same label of 3; by chance (3 x 2 + 2 x 2 + 0 x 1) / 25 = 0.4
    assert (row["queries"], row["agree"], row["kappa"]) == (5, 0.6, pytest.approx((0.6 - 0.4) / (1 - 0.4)))
    # four have a truth: left, right, left, right against left, left, right, right and left, right, tie, right
    assert row["checked"] == 4 and row["accuracy"] == [0.5, 1.0] and row["median_s"] == [0.5, 4.0]
    assert row["kappa_truth"] == [0.0, pytest.approx((0.75 - 0.375) / (1 - 0.375))]
    assert report_judges([folder.path], tmp_path / "out") == 0
    shown, page = capsys.readouterr().out, (tmp_path / "out" / "judge_report.html").read_text()
    assert "run by vlm and run by human" in shown and "The same queries, answered by two" in page
    assert "0.5 / 4.0" in shown and "50.0 % / 100.0 %" in page
    assert summarise_answers(folder)["queries"] == 6, "a query that two answered is one query"


def test_kappa_of_the_textbook():
    first, second = ["yes"] * 25 + ["no"] * 25, ["yes"] * 20 + ["no"] * 5 + ["yes"] * 10 + ["no"] * 15
    assert cohens_kappa(first, second) == pytest.approx(0.4) and cohens_kappa(first, first) == 1.0
    assert cohens_kappa([], []) is None and cohens_kappa(["yes"], ["yes"]) is None


def test_missing_sources_are_refused(tmp_path, folder):
    for paths, message in (
        ([], "at least one"),
        ([tmp_path / "nowhere"], "does not exist"),
        ([folder.path], "no comparison"),
    ):
        with pytest.raises(UsageError, match=message):
            read_sources(paths)


def test_the_figures_of_the_reference_are_whole():
    assert len(SHARES) == 7
    for shares in SHARES.values():
        assert shares.shape == (10, 3) and np.abs(shares.sum(1) - 100).max() <= 3
    assert set(THEIR_TASKS.values()) == SHARES.keys()


def make(rows, scale: float = 1.0, **facts) -> Answers:
    """Rows of status, label, p_left, p_right, truth left, truth right, label in the other order."""
    made = Answers(name="n", about="a", task="drawer_open", store=None, scale=scale)
    for place, (status, label, p_left, p_right, left, right, _) in enumerate(rows):
        item = pair_of("g", (left / scale, right / scale))
        p = None if np.isnan(p_left) else (p_left, p_right, 0.0)
        own = {name: values[place] for name, values in facts.items()}
        answer = Answer(
            task="t", item=place, swapped=False, status=status, label=label, p=p, latency_s=0.1, **own
        )  # fmt: skip
        made.add(item, answer, ("", ""))
    return made


def in_both_orders(rows) -> Answers:
    """The same, and what was said in the other order."""
    made = make(rows)
    for place, row in enumerate(rows):
        if row[-1]:
            answer = Answer(task="t", item=place, swapped=True, status="ok", label=row[-1])
            made.add(made.items[place], answer, ("", ""))
    return made


NAN = float("nan")
SIX = [
    ("ok", "left", 0.9, 0.1, 0.85, 0.1, "right"),  # right, gap 0.75; swaps
    ("ok", "left", 0.6, 0.4, 0.1, 0.95, "left"),  # wrong, gap 0.85; the place decides
    ("ok", "right", 0.2, 0.8, 0.5, 0.5, ""),  # the truth ties
    ("ok", "right", 0.2, 0.8, NAN, NAN, ""),  # nobody knows
    ("no_preference", "tie", 0.3, 0.3, 0.30, 0.35, "tie"),
    ("invalid", "", NAN, NAN, 0.0, 1.0, "left"),
]


def test_outcomes_worked_by_hand():
    answers = make(SIX)
    decided = ["correct", "incorrect", "truth ties", "not checked"]
    assert outcomes(answers).tolist() == [*decided, "no preference", "invalid"]
    counts = by_bin(answers)
    assert counts["correct"].tolist() == [0] * 7 + [1, 0, 0]
    assert counts["incorrect"].tolist() == [0] * 8 + [1, 0]
    assert counts["truth ties"][0] == counts["no preference"][0] == counts["invalid"][9] == 1
    assert counts["not checked"].sum() == 0
    assert confusion(answers).tolist() == [[1, 0, 0, 0, 0], [1, 0, 1, 1, 0], [0, 1, 0, 0, 0], [0, 1, 0, 0, 0]]
    both = in_both_orders(SIX)
    consistent = pair_figures(both.items, both.answers)["consistent"]
    assert (consistent["count"], consistent["value"]) == (3, pytest.approx(2 / 3))


def ece(made: Answers) -> float | None:
    return pair_figures(made.items, made.answers)["ece"]


def test_calibration_worked_by_hand():
    made = make(SIX)
    table = confidences(made.items, made.answers)
    assert table.tolist() == [pytest.approx([0.9, 1]), pytest.approx([0.6, 0])]
    # 90 % sure and right, 60 % sure and wrong: (0.1 + 0.6) / 2
    assert ece(made) == pytest.approx(0.35)
    rng = np.random.default_rng(0)
    sure = rng.uniform(0.5, 1, 20_000)
    assert calibration_error(sure, rng.random(20_000) < sure, lowest=0.5) < 0.015  # as right as it is sure
    assert ece(make(SIX[4:])) is None


def test_a_row_of_figures():
    row = summarise(make(SIX, tokens=(10.0, 20, NAN, NAN, NAN, NAN), cost_usd=[0.001] * 6))
    pairs, cost = row["figures"]["pairs"], row["figures"]["cost"]
    assert pairs["accuracy"]["value"] == 0.5 and row["answers"] == 6 and pairs["said_left"]["value"] == 0.5
    assert cost["tokens"] == 15 and cost["usd_per_1000"] == pytest.approx(1.0)
    assert cost["latency_p50_s"] == pytest.approx(0.1)
    nothing = summarise(make([("failed", "", NAN, NAN, NAN, NAN, "")]))["figures"]
    assert nothing["pairs"]["accuracy"] is nothing["pairs"]["ece"] is nothing["pairs"]["said_left"] is None
    assert nothing["cost"]["latency_p50_s"] is None


def test_gaps_in_returns_are_measured_by_the_widest():
    rows = [("ok", "left", NAN, NAN, 0.0, value, "") for value in (5.0, 50.0)]
    assert np.flatnonzero(by_bin(make(rows, scale=50.0))["incorrect"]).tolist() == [1, 9]
