import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError

import rlvlm.templates
from rlvlm.templates import inline, render

EVIL = "</style><script>alert(1)</script><img src=x onerror=alert(2)>"
ROUTES = {"title": "t", "paths": {}, "schemas": {}, "type_name": str}


def test_whatever_a_page_is_given_stays_text() -> None:
    api = {EVIL: {EVIL: {"description": EVIL, "responses": {}}}}
    page = render("routes.html.j2", **{**ROUTES, "title": EVIL, "paths": api})
    assert "<script" not in page and "<img" not in page and page.count("</style>") == 1
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 4  # twice as the title, as a path, as a description


def test_a_page_loads_nothing_and_runs_nothing() -> None:
    page = render("routes.html.j2", **ROUTES)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert "width=device-width" in page and "prefers-color-scheme: dark" in page


def test_a_fact_that_is_missing_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="paths"):
        render("routes.html.j2", title="t", schemas={}, type_name=str)


def test_an_image_stands_in_the_page_itself(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"abc")
    assert inline(tmp_path / "a.png") == inline(b"abc") == "data:image/png;base64,YWJj"


def test_every_page_has_the_one_base_and_no_template_switches_escaping_off() -> None:
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
