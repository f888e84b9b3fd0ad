import re

import numpy as np
import pytest

from rlvlm.runs.pages import MAX_EPISODES, MAX_FRAMES, Caption, ShownEpisode, episodes_page

EVIL = '</p><script>alert(1)</script><img src=x onerror="alert(2)">'


def make_episode(steps: int = 3, thought: str = "The drawer is closed.", seed: int = 7, **changes) -> ShownEpisode:
    frames = np.stack([np.full((48, 64, 3), 10 * step % 256, np.uint8) for step in range(steps)])
    captions = [Caption(thought=thought, action=f"push {step}", reward=step - 1.0, value=0.25) for step in range(steps)]
    episode = {"title": "open it", "frames": frames, "captions": captions, "steps": steps, "seed": seed}
    return ShownEpisode(**{**episode, "is_success": seed % 2 == 1, "episode_return": 1.5, **changes})


def articles(page: str) -> list[str]:
    return re.findall(r"<article.*?</article>", page, re.DOTALL)


def test_each_frame_stands_above_its_caption() -> None:
    (card,) = articles(episodes_page([make_episode()], "tiny"))
    figures = re.findall(r"<figure>.*?</figure>", card, re.DOTALL)
    assert len(figures) == 3
    for step, figure in enumerate(figures):
        parts = (f'alt="step {step + 1}"', "data:image/webp;base64,", "<figcaption>", f">push {step}<", "The drawer")
        places = [figure.index(part) for part in parts]
        assert places == sorted(places)
        assert f"{step - 1:+.2f}</b>" in figure and "value <b>0.25</b>" in figure
    assert "return 1.5, 3 steps, seed 7" in card


def test_the_filter_knows_how_each_episode_ended() -> None:
    page = episodes_page([make_episode(seed=seed) for seed in (1, 2, 3)], "tiny")
    ends = [re.match(r'<article class="(\w+)"', card).group(1) for card in articles(page)]
    assert ends == ["success", "failure", "success"]
    assert "success <small>2</small>" in page and "failure <small>1</small>" in page and "all <small>3</small>" in page
    assert "body:has(#show-failure:checked) article:not(.failure) { display: none }" in page
    assert "<b>67%</b><span>success</span>" in page


def test_a_models_words_cannot_leave_their_place() -> None:
    captions = [Caption(thought=EVIL, action=EVIL)]
    episode = make_episode(1, title=EVIL, captions=captions)
    page = episodes_page([episode], EVIL, note=EVIL)
    assert "<script" not in page and "<img src=x" not in page
    assert page.count("&lt;script&gt;alert(1)") == 6  # the heading twice, note, title, thought, action
    assert "default-src 'none'" in page


def test_what_is_not_known_is_left_out() -> None:
    page = episodes_page([make_episode(2, captions=[Caption(), Caption(reward=0.0)])], "tiny")
    assert 'class="action"' not in page and 'class="thought"' not in page and "value <b>" not in page
    assert page.count("+0.00</b>") == 1
    with pytest.raises(ValueError, match="2 captions for 3 frames"):
        make_episode(3, captions=[Caption()] * 2)


def test_long_plays_are_thinned_and_the_page_says_so() -> None:
    card = articles(episodes_page([make_episode(100)], "tiny"))[0]
    assert f"100 steps ({MAX_FRAMES} of 100 images shown)" in card
    assert 'alt="step 1"' in card and 'alt="step 100"' in card
    many = [make_episode(1)] * (2 * MAX_EPISODES)
    page = episodes_page(many, "tiny")
    assert len(articles(page)) == MAX_EPISODES and f"{MAX_EPISODES} more episodes" in page
    assert f"<b>{2 * MAX_EPISODES}</b><span>episodes</span>" in page
    assert "No episode was played" in episodes_page([], "tiny")
