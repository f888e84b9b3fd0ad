"""Drawing of gym-cards' images: fonts, colours and playing cards. Uses no file of the reference."""

from functools import lru_cache
from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

SIDE_PX = 300
"""Height and width of every image of gym-cards."""
TABLE = "#35654d"
"""The green of the card table."""
RANKS = ("A", "2", "3", "4", "5", "6", "7", "8", "9", "10", "J", "Q", "K")
_SUITS = ("\u2663", "\u2666", "\u2665", "\u2660")  # clubs, diamonds, hearts, spades
SUIT_LETTERS = "CDHS"
"""One letter per suit, as in the reference."""
_RED, _BLACK, _EDGE, _BACK = "#c00000", "black", "#808080", "#1f3f7f"


@lru_cache(maxsize=32)
def font(size_px: int, is_bold: bool = False) -> ImageFont.FreeTypeFont:
    """Returns DejaVu Sans, the reference's font, from the copy that matplotlib ships."""
    name = "DejaVuSans-Bold.ttf" if is_bold else "DejaVuSans.ttf"
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name, size_px)


def table() -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """Returns an empty card table, and a pen for it."""
    image = Image.new("RGB", (SIDE_PX, SIDE_PX), TABLE)
    return image, ImageDraw.Draw(image)


def draw_cards(generator: np.random.Generator, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns [N, 2], rank and random suit of cards of the given ranks [N], 1 to 13."""
    return np.stack([ranks, generator.integers(0, len(_SUITS), len(ranks))], axis=1)


@lru_cache(maxsize=256)
def card_face(rank: int, suit: int, size_px: tuple[int, int]) -> Image.Image:
    """Returns an image of a card with a rank (1 to 13) and suit (0 to 3): a large rank above a large suit."""
    width, height = size_px
    image = Image.new("RGB", size_px, TABLE)
    pen = ImageDraw.Draw(image)
    pen.rounded_rectangle((0, 0, width - 1, height - 1), width // 12, fill="white", outline=_EDGE)
    colour = _RED if suit in (1, 2) else _BLACK
    large = font(round(0.4 * height), is_bold=True)
    bearing = pen.textbbox((0, 0), RANKS[rank - 1], font=large)[0]  # a J reaches to the left of its own origin
    pen.text((width // 10 - bearing, height // 40), RANKS[rank - 1], font=large, fill=colour)
    pen.text((width // 2, 0.72 * height), _SUITS[suit], font=font(round(0.5 * height)), fill=colour, anchor="mm")
    return image


@lru_cache(maxsize=4)
def card_back(size_px: tuple[int, int]) -> Image.Image:
    """Returns an image of a card that lies face down."""
    width, height = size_px
    image = Image.new("RGB", size_px, TABLE)
    pen = ImageDraw.Draw(image)
    pen.rounded_rectangle((0, 0, width - 1, height - 1), width // 12, fill="white", outline=_EDGE)
    pen.rounded_rectangle((5, 5, width - 6, height - 6), width // 12, fill=_BACK)
    for x in range(10, width - 10, 8):
        pen.line((x, 8, x, height - 9), fill="#5f7fbf")
    return image
