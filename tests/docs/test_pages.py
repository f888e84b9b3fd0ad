"""The docs: pages of readable length, all of them in the site, and no link that leads nowhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
IN_SITE = re.compile(r"\.\./(rlvlm/pocket/\w+/CARD\.md|examples/\w+\.py|CONTRIBUTING\.md|CHANGELOG\.md|$)")
"""Links to files beside `docs/` that `made_pages.py` makes pages of."""
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub and MkDocs name them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\- ]", "", head.lower()).strip()) for head in heads}


def test_no_page_is_longer_than_can_be_read():
    assert not {page.name: lines for page in PAGES if (lines := len(page.read_text().splitlines())) > 265}


def test_no_cell_of_a_table_is_a_paragraph():
    rows = [(page.name, line) for page in PAGES for line in page.read_text().splitlines() if line.startswith("|")]
    long = [(name, cell) for name, line in rows for cell in line.split("|") if len(cell.split()) > 60]
    assert not long, "say it below the table, and link there"


@pytest.mark.parametrize(
    "page", [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name
)
def test_links_lead_somewhere(page):
    lost = []
    for target, anchor in LINK.findall(page.read_text()):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        file = (page.parent / target).resolve() if target else page
        if page.parent == DOCS and target.startswith("../") and not IN_SITE.match(target):
            lost.append(f"{target}, which is no page of the site")
        if not file.exists() or anchor and file.suffix == ".md" and anchor not in anchors(file):
            lost.append(f"{target}#{anchor}")
    assert not lost


def test_every_page_is_in_the_site():
    found = set(re.findall(r"[\w/.-]+\.md", str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])))
    assert {page.name for page in PAGES} <= found


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2_000:]
    settings = (tmp_path / "site" / "settings" / "ppo.html").read_text()
    assert "max_reply_tokens" in settings and "Maximum length of a reply" in settings
    assert "load_policy" in (tmp_path / "site" / "api.html").read_text()
