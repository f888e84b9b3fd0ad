import re
from dataclasses import replace

from rlvlm.runs.config import RunConfig
from rlvlm.runs.folder import RunFolder
from rlvlm.runs.pages import write_judge_page


def test_the_page_of_comparisons_shows_images_answers_and_truth(filled: RunFolder, config: RunConfig) -> None:
    write_judge_page(filled, replace(config, goal="open & shut"))
    page = filled.panel.read_text()
    assert "8 of 12 queries" in page and "<b>12</b><span>queries</span>" in page, "all are counted, some are shown"
    assert "<b>50.0 %</b><span>right of the decided</span>" in page
    cards = re.findall(r"<article.*?</article>", page, re.DOTALL)
    assert len(cards) == 8  # four of the six queries of each of two sessions
    outcomes = [re.search(r'class="([a-z-]+)"', card)[1] for card in cards]  # type: ignore[index]
    assert outcomes[:4] == ["incorrect"] * 2 + ["correct"] * 2, "what says something comes first, errors before all"
    right = cards[2]
    assert right.count("data:image/png;base64,") == 2
    assert "judge: left, truth: left" in right and ">correct</span>" in right
    assert "true progress 90.0 %" in right and "true progress 10.0 %" in right
    assert right.index("chosen by the judge") < right.index("right image")
    assert "left 60 %, right 30 %, tie 10 %" in right
    # words of models and users cannot leave their place, and the page loads nothing
    assert "<script" not in page and "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "open &amp; shut" in page and "open & shut" not in page
    assert "default-src 'none'" in page and not re.search(r"(src|href)=.?(http|//)", page)


def test_a_run_without_examples_has_a_page_of_figures(filled: RunFolder, config: RunConfig) -> None:
    filled.samples.path.unlink()
    write_judge_page(filled, config)
    assert "Nothing was asked" in filled.panel.read_text() and "0 of 12 queries" in filled.panel.read_text()
