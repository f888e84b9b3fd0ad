"""Tables that commands print: columns without lines, text on the left and numbers on the right."""

import sys
from collections.abc import Collection, Iterable, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from rlvlm.core.console.screen import QuietConsole
from rlvlm.core.foreign import visible

WIDTH = 160
"""Width of a table in a file or a pipe, in columns."""


def plain_console(*, soft_wrap: bool = False) -> Console:
    """Returns a console on standard output; `soft_wrap` leaves long lines to the terminal."""
    width = None if sys.stdout.isatty() else WIDTH
    return QuietConsole(file=sys.stdout, soft_wrap=soft_wrap, width=width)


def plain_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[RenderableType]],
    words: Collection[str] = (),
    wraps: Collection[str] = (),
) -> Table:
    """Returns a table of `rows` of cells; the text of a cell is shown unchanged, with its brackets.

    Args:
        heads: headings of the columns; if all are empty there is no line of headings.
        rows: cells in the order of `heads`.
        words: headings of the columns that are aligned to the left.
        wraps: headings of the columns whose cells may take several lines.
    """
    # a Text shows brackets as they are; in a string rich takes them for markup. Control characters are made visible
    # before widths are measured, since they have no width
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=any(heads))
    for head in heads:
        table.add_column(visible(head), justify="left" if head in words else "right", no_wrap=head not in wraps)
    for row in rows:
        table.add_row(*(Text(visible(cell)) if isinstance(cell, str) else cell for cell in row))
    return table
