"""A contact sheet: rows of labelled pictures on one page."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from rlvlm.types.steps import Frames

MARGIN_PX, TITLE_PX, LABEL_PX = 12, 26, 20
PAPER, INK, FAINT = (250, 250, 248), (38, 70, 83), (120, 132, 138)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Pictures that belong together."""

    title: str
    pictures: Frames
    """[N, H, W, 3], N >= 1, all rows of a sheet with the same H and W."""
    labels: tuple[str, ...]
    """N short texts, one below each picture."""


def contact_sheet(title: str, rows: Sequence[Row]) -> Image.Image:
    """The rows below one another under a title, as wide as the longest of them."""
    height, width = rows[0].pictures.shape[1:3]
    columns = max(len(row.pictures) for row in rows)
    row_px = TITLE_PX + height + LABEL_PX
    size = (MARGIN_PX + columns * (width + MARGIN_PX), TITLE_PX + MARGIN_PX + len(rows) * row_px + MARGIN_PX)
    page = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(page)
    large, small = ImageFont.load_default(size=16), ImageFont.load_default(size=12)
    draw.text((MARGIN_PX, MARGIN_PX // 2), title, fill=INK, font=large)
    for number, row in enumerate(rows):
        top = TITLE_PX + MARGIN_PX + number * row_px
        draw.text((MARGIN_PX, top + 6), row.title, fill=INK, font=small)
        for column, (picture, label) in enumerate(zip(row.pictures, row.labels, strict=True)):
            left = MARGIN_PX + column * (width + MARGIN_PX)
            page.paste(Image.fromarray(np.ascontiguousarray(picture)), (left, top + TITLE_PX))
            draw.text((left, top + TITLE_PX + height + 3), label, fill=FAINT, font=small)
    return page
