import re
from collections import Counter

from rlvlm.runs.folder import RunFolder
from rlvlm.runs.pages import comparison_page, outcome_of
from rlvlm.runs.plots import outcome


def page_of(folder: RunFolder) -> str:
    counts = Counter(map(outcome, folder.queries.read()))
    return comparison_page(folder.samples.read(), counts, "tiny", "Which is <nearer>?")


def test_a_card_shows_images_answer_and_truth(filled: RunFolder) -> None:
    cards = re.findall(r"<article.*?</article>", page_of(filled), re.DOTALL)
    assert len(cards) == 8  # four of the six queries of each of two sessions
    outcomes = [re.search(r'class="([a-z-]+)"', card)[1] for card in cards]  # type: ignore[index]
    assert outcomes[:4] == ["incorrect"] * 2 + ["correct"] * 2, "what says something comes first, errors before all"
    right = cards[2]
    assert right.count("data:image/png;base64,") == 2
    assert "judge: left, truth: left" in right and ">correct</span>" in right
    assert "true progress 90.0 %" in right and "true progress 10.0 %" in right
    assert right.index("chosen by the judge") < right.index("right image")
    assert "left 60 %, right 30 %, tie 10 %" in right


def test_a_judges_text_cannot_leave_its_place(filled: RunFolder) -> None:
    html = page_of(filled)
    assert "<script" not in html and "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "Which is &lt;nearer&gt;?" in html
    assert "default-src 'none'" in html
    assert not re.search(r"(src|href)=.?(http|//)", html)


def test_the_header_counts_all_queries_not_only_those_shown(filled: RunFolder) -> None:
    html = page_of(filled)
    assert "8 of 12 queries" in html
    assert "<b>12</b><span>queries</span>" in html
    assert "<b>50.0 %</b><span>right of the decided</span>" in html


def test_outcomes_of_rows_and_samples_agree(filled: RunFolder) -> None:
    by_place = {(row["env_step"], row["index"]): outcome(row) for row in filled.queries.read()}
    for sample in filled.samples.read():
        assert outcome_of(sample) == by_place[str(sample["env_steps"]), str(sample["index"])]


def test_no_query_is_a_page_too() -> None:
    assert "No query was asked" in comparison_page([], {}, "tiny", "")
