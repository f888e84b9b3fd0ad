"""`episodes.html`: what its filter, captions and frames show, and that a model's words stay words."""

import re
from typing import Any

import numpy as np

from rlvlm.runs.pages import MAX_FRAMES, episodes_page, moments_of

EVIL = '</p><script>alert(1)</script><img src=x onerror="alert(2)">'


def card(
    steps: int = 3, outcome: str = "success", captions: list[dict[str, Any]] | None = None, title: str = "open it"
):
    frames = np.stack([np.full((48, 64, 3), 10 * step % 256, np.uint8) for step in range(steps)])
    said = [{"thought": "It is closed.", "action": f"push {n}", "reward": n - 1.0, "value": 0.25} for n in range(steps)]
    facts = {"title": title, "outcome": outcome, "episode_return": 1.5, "steps": steps, "seed": 7, "num_frames": steps}
    return facts | {"moments": moments_of(frames, captions or said)}


def articles(page: str) -> list[str]:
    return re.findall(r"<article.*?</article>", page, re.DOTALL)


def test_each_frame_stands_above_its_caption_and_unknown_parts_are_left_out() -> None:
    (shown,) = articles(episodes_page([card()], "tiny", "", {}))
    figures = re.findall(r"<figure>.*?</figure>", shown, re.DOTALL)
    assert len(figures) == 3
    for step, figure in enumerate(figures):
        parts = (f'alt="step {step + 1}"', "data:image/webp;base64,", "<figcaption>", f">push {step}<", "It is closed")
        places = [figure.index(part) for part in parts]
        assert places == sorted(places)
        assert f"{step - 1:+.2f}</b>" in figure and "value <b>0.25</b>" in figure
    assert "return 1.5, 3 steps, seed 7" in shown
    bare = episodes_page([card(2, captions=[{}, {"reward": 0.0}])], "tiny", "", {})
    assert 'class="action"' not in bare and 'class="thought"' not in bare and "value <b>" not in bare
    assert bare.count("+0.00</b>") == 1


def test_the_filter_knows_how_each_episode_ended() -> None:
    page = episodes_page([card(1, end) for end in ("success", "failure", "success")], "tiny", "", {"success": "67%"})
    ends = [re.match(r'<article class="(\w+)"', shown)[1] for shown in articles(page)]  # type: ignore[index]
    assert ends == ["success", "failure", "success"]
    assert "success <small>2</small>" in page and "failure <small>1</small>" in page and "all <small>3</small>" in page
    assert "body:has(#show-failure:checked) article:not(.failure) { display: none }" in page
    assert "<b>67%</b><span>success</span>" in page
    assert "No episode was played" in episodes_page([], "tiny", "", {})


def test_a_models_words_cannot_leave_their_place() -> None:
    evil = card(1, captions=[{"thought": EVIL, "action": EVIL}], title=EVIL)
    page = episodes_page([evil], EVIL, EVIL, {})
    assert "<script" not in page and "<img src=x" not in page
    assert page.count("&lt;script&gt;alert(1)") == 6  # the heading twice, note, title, thought, action
    assert "default-src 'none'" in page


def test_long_plays_are_thinned_and_the_page_says_so() -> None:
    (shown,) = articles(episodes_page([card(100)], "tiny", "", {}))
    assert f"100 steps ({MAX_FRAMES} of 100 images shown)" in shown
    assert 'alt="step 1"' in shown and 'alt="step 100"' in shown
