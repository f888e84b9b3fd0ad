"""How charts look: colours, bars, curves that hide each other, and their files."""

from collections.abc import Mapping
from io import BytesIO
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from rlvlm.core.disk import write_whole

OUTCOMES = {
    "correct": "#2a9d8f",
    "incorrect": "#e76f51",
    "truth ties": "#a8c5da",
    "not checked": "#d9c9a3",
    "no preference": "#cfcfcf",
    "invalid": "#8d6e97",
    "failed": "#454b54",
}
"""Outcomes of a query with their colours in every plot and page."""
SCORED = {"scored": "#457b9d"}
"""Scores are neither right nor wrong, so have a single colour."""
INK = "#264653"
ACCENT = "#e9a23b"
COLOURS = ("#2a9d8f", "#e76f51", "#457b9d", "#e9a23b", "#8d6e97", "#264653", "#9aa84f", "#d4779c", "#6b4f3a", "#7fb3d5")
"""Colours of the items compared, in the order in which they are named."""
_ALIKE, _HIDDEN, _WIDEST = 0.012, 0.2, 8.0
"""Curves closer than this share of a panel's height hide each other; if they do so on this share of their segments,
they are drawn as stripes, the widest of this many points.
"""
STYLE: dict[Any, Any] = {
    "figure.dpi": 120,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e8e8e8",
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.title_fontsize": 8,
}


def titled(width: float, height: float, title: str) -> Figure:
    """Returns an empty figure of that size in inches, with a title at the top."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    return figure


def to_png(figure: Figure) -> bytes:
    """Renders a figure as PNG."""
    data = BytesIO()
    figure.savefig(data, format="png", bbox_inches="tight")
    return data.getvalue()


def to_svg(figure: Figure) -> bytes:
    """Renders a figure as SVG, with the same bytes each time."""
    data = BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "rlvlm"}):
        figure.savefig(data, format="svg", bbox_inches="tight", metadata={"Date": None})
    return data.getvalue()


def save(figure: Figure, file: Path) -> Path:
    """Writes a figure as PNG, atomically."""
    write_whole(file, to_png(figure))
    return file


def show_coinciding(axes: Axes, curves: Mapping[str, Line2D] | None = None) -> str:
    """Draws curves that coincide as stripes, the first the widest, and returns a note that names them, e.g. `A and B
    coincide`; empty if all curves can be seen.

    Args:
        axes: axes whose limits are set.
        curves: curves by name, in the order of drawing; None: the lines with a label.
    """
    if curves is None:
        labelled = ((str(line.get_label()), line) for line in axes.get_lines())
        curves = {name: line for name, line in labelled if not name.startswith("_")}
    drawn = {name: np.asarray(line.get_xydata(), float) for name, line in curves.items()}
    drawn = {name: points[np.isfinite(points).all(1)] for name, points in drawn.items()}
    tolerance = _ALIKE * abs(float(np.subtract(*axes.get_ylim())))
    shares: dict[
        tuple[str, str], float
    ] = {}  # by pair: on which of the segments where both are drawn one hides the other
    for left, right in combinations([name for name, points in drawn.items() if len(points)], 2):
        (x_left, y_left), (x_right, y_right) = drawn[left].T, drawn[right].T
        places = np.union1d(x_left, x_right)
        places = places[(places >= max(x_left[0], x_right[0])) & (places <= min(x_left[-1], x_right[-1]))]
        if len(places):
            apart = np.abs(np.interp(places, x_left, y_left) - np.interp(places, x_right, y_right))
            is_alike = apart <= tolerance
            # a segment is hidden if both of its ends are: curves may well begin or cross at a point
            shares[left, right] = float((is_alike[:-1] & is_alike[1:] if len(places) > 1 else is_alike).mean())
    hidden = [pair for pair, share in shares.items() if share >= _HIDDEN]
    groups: list[set[str]] = []
    for pair in hidden:  # curves that hide one another directly or through a third
        met = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if group not in met] + [set(pair).union(*met)]
    notes = []
    for group in ([name for name in curves if name in group] for group in groups):
        for place, name in enumerate(reversed(group)):
            line = curves[name]
            line.set_linewidth(min(float(line.get_linewidth()) + 1.8 * place, _WIDEST))
            line.set_markersize(float(line.get_markersize()) + 3 * place)
        is_all = min(shares.get(pair, 0.0) for pair in combinations(group, 2)) == 1.0
        notes.append(f"{', '.join(group[:-1])} and {group[-1]} coincide{'' if is_all else ' in part'}")
    return "; ".join(notes)


def stack_shares(axes: Axes, shares: Mapping[str, np.ndarray], colours: Mapping[str, str], **look: Any) -> None:
    """Draws one bar per difficulty bin, stacked from `shares` [N] in percent by name, each with its number if it fits;
    `look` are further settings of matplotlib's bars.
    """
    base: np.ndarray | float = 0.0
    for name, share in shares.items():
        base = np.broadcast_to(base, share.shape)
        axes.bar(
            range(len(share)), share, bottom=base, color=colours[name], label=name, width=0.86, linewidth=0, **look
        )
        for place in np.flatnonzero(share >= 6).tolist():
            middle = base[place] + share[place] / 2
            ink = "white" if sum(to_rgb(colours[name])) < 1.4 and "alpha" not in look else "black"
            axes.text(place, middle, f"{share[place]:.0f}", ha="center", va="center", fontsize=8, color=ink)
        base = base + share
