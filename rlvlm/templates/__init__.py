"""The pages: one base, one style sheet, one template per page. Whatever a page is given is escaped, so a model's text
stays text; a page is one file that loads nothing and runs no scripts, but for the one on which people answer and the
one of many judges, which sorts.
"""

import base64
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(name: str | Path, **facts: Any) -> str:
    """The HTML of a page.

    Args:
        name: of a template in this folder, or the file of one elsewhere, which may use those of this folder.
        facts: what the template asks for; a missing one raises jinja2's UndefinedError.
    """
    if isinstance(name, Path):
        pages = _PAGES.overlay(loader=FileSystemLoader([name.parent, Path(__file__).parent]))
        page = pages.get_template(name.name).render(facts)
    else:
        page = _PAGES.get_template(name).render(facts)
    return page.encode(errors="replace").decode()  # a model may write half of a surrogate pair, which has no UTF-8


def inline(image: Path | bytes, kind: str = "png") -> str:
    """An image as the `src` of an image, so that the page needs no file beside it.

    Args:
        image: an encoded image, or its file.
        kind: of the encoding: png, webp or svg+xml.
    """
    data = image.read_bytes() if isinstance(image, Path) else image
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
