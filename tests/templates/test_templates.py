import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError

import rlvlm.templates
from rlvlm.templates import inline, render

EVIL = "</style><script>alert(1)</script><img src=x onerror=alert(2)>"
ROUTES = {"title": "t", "paths": {}, "schemas": {}, "type_name": str}


def test_values_on_a_page_stay_text():
    api = {EVIL: {EVIL: {"description": EVIL, "responses": {}}}}
    page = render("routes.html.j2", **{**ROUTES, "title": EVIL, "paths": api})
    assert "<script" not in page and "<img" not in page and page.count("</style>") == 1
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 4  # twice as the title, as a path, as a description


def test_a_page_loads_nothing_and_runs_nothing():
    page = render("routes.html.j2", **ROUTES)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert "width=device-width" in page and "prefers-color-scheme: dark" in page


def test_a_fact_that_is_missing_is_an_error():
    with pytest.raises(UndefinedError, match="paths"):
        render("routes.html.j2", title="t", schemas={}, type_name=str)


def test_an_image_stands_in_the_page_itself(tmp_path):
    (tmp_path / "a.png").write_bytes(b"abc")
    assert inline(tmp_path / "a.png") == inline(b"abc") == "data:image/png;base64,YWJj"


def test_every_page_has_the_one_base_and_no_template_switches_escaping_off():
    files = sorted(Path(rlvlm.templates.__file__).parent.glob("*.html.j2"))
    pages = [file for file in files if file.name not in ("base.html.j2", "parts.html.j2")]
    assert len(pages) >= 3
    for file in files:
        text = file.read_text()
        assert "autoescape" not in text
        # the filter `safe` is for attributes that stand in the template itself
        assert all(re.fullmatch(r"' class=\"\w+\"' \| safe", use) for use in re.findall(r"[^{ ]*'[^']*' \| safe", text))
        assert text.count("| safe") == len(re.findall(r"' class=\"\w+\"' \| safe", text)), file.name
    assert all(file.read_text().startswith('{% extends "base.html.j2" %}') for file in pages)


def luminance(colour: str) -> float:
    """As the guidelines for accessible content (WCAG 2.2) define it, of `#rgb` or `#rrggbb`."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_words_can_be_read_by_day_and_by_night_and_tables_be_scrolled_by_keys():
    folder = Path(rlvlm.templates.__file__).parent
    style = (folder / "style.css").read_text()
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w+)", part)) for part in re.findall(r":root \{(.*?)\}", style, re.S)
    )
    for colours in (light, light | dark):
        for paper in ("paper", "card", "tint", "warm"):
            for ink in ("ink", "faint", "good-ink", "bad-ink") if paper in ("paper", "card") else ("ink",):
                low, high = sorted((luminance(colours[ink]), luminance(colours[paper])))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, paper)
    # marks have any colour, so what stands on them would be readable on some alone
    assert not re.findall(r"background: var\(--mark\);[^}]*color:", style)
    for file in folder.glob("*.html.j2"):
        text = file.read_text()
        assert not re.search(r"[^-]color: ?var\(--(good|bad|mark)\)", text), file
        assert "<th></th>" not in text and text.count('class="wide"') == text.count('class="wide" tabindex="0"'), file
