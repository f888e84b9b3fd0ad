"""A page, and the same on the terminal: a title and sections, in one HTML file that loads nothing else.

Every page about a judge's answers is made of these: of a bench, of recorded answers, of a run, of scored data. To
add to one, append a `Section`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

from rlvlm.core.console.tables import plain_console, plain_table
from rlvlm.pages.charts import to_svg
from rlvlm.templates import inline, render


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of cells under headings."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = (0,)
    """Indices of the columns that hold words, which are aligned to the left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """An image of a card, and what stands below it."""

    src: str
    """`data:` URI, see `rlvlm.templates.inline`."""
    alt: str
    caption: str = ""
    note: str = ""
    """A second, fainter line."""
    code: str = ""
    """A model's action, untrusted."""
    measures: Sequence[tuple[str, str, str]] = ()
    """Name, value and tone of numbers; the tone is gain, loss or empty."""
    words: str = ""
    """A model's thought, untrusted."""
    is_chosen: bool = False
    """Whether a judge chose this side."""
    is_tiny: bool = False
    """Whether the image is enlarged pixel by pixel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A question with its answer, or an episode."""

    title: str
    outcome: str = ""
    """Key of the section's `colours`: the colour of the card, and the button that shows it."""
    badge: str = ""
    facts: Sequence[str] = ()
    """Lines below the title."""
    alerts: Sequence[str] = ()
    """What is wrong, set in bold."""
    pictures: Sequence[Picture] = ()
    """Two sides of a pair, or images in order of time."""
    is_pair: bool = False
    shares: Mapping[str, float] = field(default_factory=dict)
    """Probabilities by name, drawn as a bar."""
    curve: Sequence[tuple[float, float]] = ()
    """Points of progress over time, both in [0, 1]."""
    text: str = ""
    """A judge's raw answer, untrusted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A part of a page. The terminal gets its words and tables, and no charts, cards or notes below."""

    heading: str = ""
    finding: str = ""
    """The one sentence to read."""
    alerts: Sequence[str] = ()
    notes: Sequence[str] = ()
    points: Sequence[tuple[str, str]] = ()
    """Name and explanation of the points of a list; either may be empty."""
    tiles: Mapping[str, Any] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    """Shares in [0, 1] by key of `colours`, drawn as a bar."""
    tables: Sequence[Table] = ()
    charts: Mapping[str, Figure | str] = field(default_factory=dict)
    """Figures, or sources of images, by title."""
    folded: tuple[str, str] = ("", "")
    """Summary and text of a part that opens."""
    notes_below: Sequence[str] = ()
    cards: Sequence[Card] = ()
    colours: Mapping[str, str] = field(default_factory=dict)
    """Colours by outcome; with them, the cards have a button for each outcome."""
    is_wide: bool = False
    """Whether each card is as wide as the page."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show but a heading."""
        shown = (self.finding, self.alerts, self.notes, self.points, self.tiles, self.shares, self.tables, self.charts)
        return not any((*shown, self.folded[0], self.cards, self.notes_below))

    @property
    def counts(self) -> dict[str, int]:
        """Number of cards of each outcome that some card has, in the order of `colours`."""
        found = Counter(card.outcome for card in self.cards)
        return {name: found[name] for name in self.colours if found[name]}

    @property
    def sources(self) -> list[tuple[str, str]]:
        """Titles and sources of the charts."""
        drawn = {
            name: inline(to_svg(one), "svg+xml") if isinstance(one, Figure) else one
            for name, one in self.charts.items()
        }
        return list(drawn.items())


def page(title: str, sections: Sequence[Section]) -> str:
    """Returns the HTML of a page; sections without content are left out."""
    return render("page.html.j2", title=title, sections=[section for section in sections if not section.is_empty])


def print_sections(sections: Sequence[Section]) -> None:
    """Prints what a page says, in the same words; what it says first comes last, next to the prompt."""
    console = plain_console(soft_wrap=True)
    for section in reversed(sections):
        lines = [*section.alerts, *section.notes, *(": ".join(filter(None, point)) for point in section.points)]
        if not (lines or section.tables or section.tiles or section.finding):
            continue  # charts and cards alone
        console.print(f"\n{section.heading}" if section.heading else "", style="bold")
        for name, value in section.tiles.items():
            console.print(f"{name:40} {value}")
        for table in section.tables:
            # an empty heading names no column, so that all of them may be words
            words = [table.heads[place] for place in table.words]
            console.print(plain_table(table.heads, table.rows, words=words))
        for line in filter(None, (*lines, section.finding)):
            console.print(line)
