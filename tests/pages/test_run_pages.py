"""What is written down of questions and episodes, and the pages made of it."""

import csv
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot as plt

from rlvlm.core import metrics
from rlvlm.core.judging import Score, Stamp, Status
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.labels.store import LabelStore
from rlvlm.pages.run import asked_text, episodes_page, judge_page, write_run_pages
from rlvlm.pages.run_charts import draw_judge_over_training
from rlvlm.rewards.scoring_items import ScoredItem, ScoringItem
from rlvlm.runs.files.folder import RunFolder
from rlvlm.runs.files.played import MAX_FRAMES, moments_of
from rlvlm.runs.files.records import Recorder, nearness, outcome_of, query_row
from rlvlm.runs.files.summary import summarise_judge
from rlvlm.testing import TinyEnv


def test_the_page_of_comparisons_shows_images_answers_and_truth(filled, config):
    page = judge_page(filled, "a & b", asked_text(replace(config, goal="open & shut")))
    assert "8 of 12 queries" in page and "<b>12</b><span>queries</span>" in page, "all are counted, some are shown"
    assert "<b>50.0 %</b><span>accuracy, of 4 decided pairs whose progress differs</span>" in page
    cards = re.findall(r"<article.*?</article>", page, re.DOTALL)
    assert len(cards) == 8  # four of the six queries of each of two sessions
    outcomes = [re.search(r'class="([a-z-]+)"', card)[1] for card in cards]  # type: ignore[index]
    assert outcomes[:4] == ["incorrect"] * 2 + ["correct"] * 2, "what says something comes first, errors before all"
    right = cards[2]
    assert right.count("data:image/png;base64,") == 2
    assert "left, truth: left" in right and ">correct</span>" in right
    assert "true progress 90.0 %" in right and "true progress 10.0 %" in right
    assert right.index("<b>chosen</b>") < right.index("right image")
    assert "left 60 %, right 30 %, tie 10 %" in right
    # words of models and users cannot leave their place, and the page loads nothing
    assert "<script" not in page and "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "open &amp; shut" in page and "open & shut" not in page
    assert "default-src 'none'" in page and not re.search(r"(src|href)=.?(http|//)", page)


def test_a_run_without_examples_has_a_page_of_figures(filled, config):
    filled.samples.path.unlink()
    page = judge_page(filled, "a run")
    assert "No query was asked of which images were kept" in page and "0 of 12 queries" in page


EVIL = '</p><script>alert(1)</script><img src=x onerror="alert(2)">\ud83d'


def card(
    steps: int = 3, outcome: str = "success", captions: list[dict[str, Any]] | None = None, title: str = "open it"
):
    frames = np.stack([np.full((48, 64, 3), 10 * step % 256, np.uint8) for step in range(steps)])
    said = [{"thought": "It is closed.", "action": f"push {n}", "reward": n - 1.0, "value": 0.25} for n in range(steps)]
    facts = {"title": title, "outcome": outcome, "episode_return": 1.5, "steps": steps, "seed": 7, "num_frames": steps}
    return facts | {"moments": moments_of(frames, captions or said)}


def episodes(*cards: dict[str, Any], title: str = "tiny", note: str = "", **measures: str) -> str:
    return episodes_page({"episodes": cards, "note": note, "measures": measures}, title)


def articles(page: str) -> list[str]:
    return re.findall(r"<article.*?</article>", page, re.DOTALL)


def test_each_frame_stands_above_its_caption_and_unknown_parts_are_left_out():
    (shown,) = articles(episodes(card()))
    figures = re.findall(r"<figure>.*?</figure>", shown, re.DOTALL)
    assert len(figures) == 3
    for step, figure in enumerate(figures):
        parts = (f'alt="step {step + 1}"', "data:image/webp;base64,", "<figcaption>", f">push {step}<", "It is closed")
        places = [figure.index(part) for part in parts]
        assert places == sorted(places)
        assert f"{step - 1:+.2f}</b>" in figure and "value <b>0.25</b>" in figure
    assert "return 1.5, 3 steps, seed 7" in shown
    bare = episodes(card(2, captions=[{}, {"reward": 0.0}]))
    assert "<code>" not in bare and 'class="thought"' not in bare and "value <b>" not in bare
    assert bare.count("+0.00</b>") == 1


def test_the_filter_knows_how_each_episode_ended():
    page = episodes(*(card(1, end) for end in ("success", "failure", "success")), success="67%")
    ends = [re.match(r'<article class="(\w+)"', shown)[1] for shown in articles(page)]  # type: ignore[index]
    assert ends == ["success", "failure", "success"]
    assert "success <small>2</small>" in page and "failure <small>1</small>" in page and "all <small>3</small>" in page
    assert "body:has(#show-failure:checked) article:not(.failure) { display: none }" in page
    assert "<b>67%</b><span>success</span>" in page
    assert "No episode was played" in episodes()


def test_a_models_words_cannot_leave_their_place():
    evil = card(1, captions=[{"thought": EVIL, "action": EVIL}], title=EVIL)
    page = episodes(evil, title=EVIL, note=EVIL)
    assert "<script" not in page and "<img src=x" not in page
    assert page.count("&lt;script&gt;alert(1)") == 6  # the heading twice, note, title, thought, action
    assert page.encode(), "half of a surrogate pair is no reason to have no page"
    assert "default-src 'none'" in page


def test_long_plays_are_thinned_and_the_page_says_so():
    (shown,) = articles(episodes(card(100)))
    assert f"100 steps ({MAX_FRAMES} of 100 images shown)" in shown
    assert 'alt="step 1"' in shown and 'alt="step 100"' in shown


STAMP = Stamp(judge="pocket:scorer", revision="1", prompt="utility/1", decoding="")


def draw(snapshots: FloatArray, size_px: int) -> Frames:
    return np.broadcast_to(snapshots[:, :1, None, None], (len(snapshots), size_px, size_px, 3)).astype(np.uint8)


def no_labels() -> LabelStore:
    raise AssertionError("scores have no store of their own")


def scored(value: float | None, success: bool, step: int) -> ScoredItem:
    snapshots = np.array([[3.0], [9.0]], np.float32)
    return ScoredItem(
        item=ScoringItem(goal="go <b>on</b>", snapshots=snapshots, action="+", is_success=success, progress=0.5),
        score=Score(status=Status.INVALID if value is None else Status.OK, value=value, stamp=STAMP, text="5 <i>"),
        env_step=step, timestamp=0.0, truth=0.75, success_threshold=0.875,
    )  # fmt: skip


@pytest.fixture
def empty(tmp_path):
    return RunFolder(tmp_path, 1)


def test_outcomes_by_hand():
    cases = [(0.9, True), (0.9, False), (0.5, True), (0.5, False)]
    assert [outcome_of(value, scored(value, success, 0).item, 0.875) for value, success in cases] == [
        "true positive", "false positive", "false negative", "true negative",
    ]  # fmt: skip
    undone = replace(scored(0.5, True, 0).item, success_lost=True)
    assert outcome_of(0.5, undone, 0.875) == "success, undone at the end"
    assert [nearness(value, 0.5) for value in (0.45, 0.9, 0.1)] == [
        "near the truth", "above the truth", "below the truth",
    ]  # fmt: skip


def test_every_score_is_in_the_log_and_some_on_the_page(empty):
    recorder = Recorder(empty, no_labels, draw, "")
    recorder.keep([scored(0.9, False, 7) for _ in range(9)])
    recorder.keep([scored(None, False, 8)])
    recorder.keep([])
    rows = empty.scores.read()
    assert len(rows) == 10 and rows[0]["vlm_score"] == "0.9" and rows[0]["ground_truth_score"] == "0.75"
    assert [row["outcome"] for row in empty.samples.read()] == ["false positive"] * 4 + ["invalid"]
    empty.metrics.append([{"env_steps": 7, metrics.JUDGE_ALARM: 0.0}, {"env_steps": 9, metrics.JUDGE_ALARM: 1.0}])
    page = judge_page(empty, "a run")
    assert "1 that it took for successes are in fooled.jsonl" in page
    assert "Alarm from step 9 on" in page and page.count("<article") == 5 and "5 of 10 scores" in page
    assert "<b>on</b>" not in page and "<i>" not in page.split("<main")[-1], "untrusted words stay words"
    assert summarise_judge(empty)["alarm_step"] == 9
    empty.fooled.path.unlink()  # an alarm by controls may come before any failure is called a success
    page = judge_page(empty, "a run")
    assert "Alarm from step 9 on" in page and "fooled.jsonl" not in page


def test_a_run_of_judged_images_has_a_page(filled, config, make_scores):
    for file in (filled.queries.path, filled.samples.path):
        file.unlink()
    env = TinyEnv()
    recorder = Recorder(filled, no_labels, env.draw, "reach <b>it</b>")
    recorder.keep([record for record in make_scores(100) if record.score.status is not Status.FAILED])
    recorder.keep(make_scores(200)[-1:])
    assert [row["outcome"] for row in filled.samples.read()] == [
        "near the truth", "above the truth", "below the truth", "invalid", "failed",
    ]  # fmt: skip
    write_run_pages(filled)
    page = filled.panel.read_text()
    assert page.count("<article") == 5 and "5 of 5 scores" in page and "judge: 0.80, truth: progress 0.50" in page
    assert "<b>0.20</b><span>mean error" in page, "the scores are 0.1, 0.3 and 0.2 from their truths"
    assert "reach &lt;b&gt;" in page and page.count("data:image/png") == 5


def test_a_run_without_scores_has_no_page(empty):
    assert judge_page(empty, "a run") == "" and summarise_judge(empty) == {}


def test_the_plot_marks_the_alarm():
    rows = [{"env_steps": 1_000 * step, metrics.JUDGE_SCORE: 0.5, metrics.JUDGE_ALARM: step > 2} for step in range(5)]
    figure = draw_judge_over_training(json.loads(json.dumps(rows)), "a run")
    lines = [line.get_xdata() for line in figure.axes[0].get_lines()]
    assert np.asarray(lines[-1]).tolist() == [3, 3]
    plt.close(figure)


def test_the_four_ends_of_a_query_stay_apart(folder, make_records):
    folder.queries.append(map(query_row, make_records(1_500, 0)))
    with open(folder.queries.path) as file:
        rows = list(csv.DictReader(file))
    assert [row["vlm_predicted_label"] for row in rows] == ["0", "0", "-1", "-1", "-1", "1"]
    assert [row["status"] for row in rows] == ["ok", "ok", "no_preference", "invalid", "failed", "ok"]
    assert [row["correct"] for row in rows] == ["1", "0", "", "", "", ""]
    of_reference = "ground_truth_score_1 ground_truth_score_2 vlm_predicted_label timestamp train_iter"
    assert " ".join(list(rows[0])[:5]) == of_reference
    first = rows[0]
    assert (first["ground_truth_score_1"], first["ground_truth_score_2"], first["p_left"]) == ("0.9", "0.1", "0.6")
    assert first["timestamp"] == "2023-11-14T22:13:20.500+00:00"
    assert (first["env_step"], first["session"], first["index"]) == ("1500", "0", "0")
