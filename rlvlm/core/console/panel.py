"""The display of a working run: one live panel on a terminal, one plain line per interval elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlvlm.core import metrics
from rlvlm.core.console.screen import Screen, clock


@dataclass(frozen=True, kw_only=True, slots=True)
class PanelRow:
    """A number of the panel. An algorithm passes its own to `RunConsole`."""

    label: str
    """Label of the number in the panel."""
    metric: str
    """Name of the metric in `rlvlm.core.metrics`."""
    format: str
    """Format of the number, e.g. `.1f`."""
    word: str = ""
    """Label in plain lines; empty leaves the number out of them."""
    is_rare: bool = False
    """Whether only some runs have the number; it is shown from its first value on."""
    says: Mapping[int, str] | None = None
    """Texts in place of the numbers; None shows these."""


DEFAULT = (
    PanelRow(label="success at the end, evaluation", metric=metrics.EVAL_SUCCESS_AT_END, format=".0%", word="success"),
    PanelRow(label="success at any step", metric=metrics.EVAL_SUCCESS_RATE, format=".0%"),
    PanelRow(label="true return, training", metric=metrics.TRAIN_EPISODE_RETURN, format=".1f", word="return"),
    PanelRow(label="true return, evaluation", metric=metrics.EVAL_EPISODE_RETURN, format=".1f"),
)
"""Rows of every run."""
_MACHINE = (
    PanelRow(label="steps per second", metric=metrics.STEPS_PER_S, format=".0f", word="steps/s"),
    PanelRow(label="memory, all processes, MiB", metric=metrics.PEAK_RSS_MB, format=",.0f"),
)
"""Rows of every run's costs; shown last."""


class RunConsole(Screen):
    """Shows a run, as a context manager: the panel exists while it is open.

    Args:
        stream: a terminal, or a file or pipe that gets plain lines.
        title: title of the panel.
        total_steps: env steps of the whole run.
        rows: numbers to show, in order; speed and memory follow them.
    """

    def __init__(self, stream: TextIO, title: str, total_steps: int, rows: Sequence[PanelRow] = DEFAULT) -> None:
        super().__init__(stream, title)
        self._total_steps = total_steps
        self._rows = (*rows, *_MACHINE)
        self._latest: dict[str, float] = {}

    def update(self, latest: Mapping[str, float], is_due: bool) -> None:
        """Updates the newest metrics.

        Args:
            latest: keys of `rlvlm.core.metrics`; missing ones keep their last value.
            is_due: whether to print a plain line if there is no panel.
        """
        # numbers come at different times, and the last known one is shown until the next comes
        self._latest.update(latest)
        self._phase = "training"
        # the live panel redraws itself twice a second, from these values
        if self._live is None and is_due:
            step, left = self._progress()
            numbers = [f"{row.word} {self._number(row)}" for row in self._shown() if row.word]
            self.line("  ".join([f"step {step:>7,}/{self._total_steps:,}", *numbers, f"left {left}"]))

    def render(self) -> Panel:
        """Returns the panel: two numbers a line, then the progress of the run."""
        grid = Table.grid(padding=(0, 3))
        cells = [cell for row in self._shown() for cell in (Text(row.label), Text(self._number(row), style="bold"))]
        for start in range(0, len(cells), 4):
            grid.add_row(*cells[start : start + 4])
        step, left = self._progress()
        bar = ProgressBar(total=self._total_steps, completed=step, width=60)
        foot = f"{self._phase}   step {step:,} of {self._total_steps:,}   left {left}"
        body = Group(grid, Text(""), bar, Text(foot))
        return Panel(body, title=Text(self._title), title_align="left", border_style="cyan")

    def _shown(self) -> list[PanelRow]:
        return [row for row in self._rows if not row.is_rare or row.metric in self._latest]

    def _number(self, row: PanelRow) -> str:
        if row.metric not in self._latest:
            return "-"
        number = self._latest[row.metric]
        return format(number, row.format) if row.says is None else row.says[int(number)]

    def _progress(self) -> tuple[int, str]:
        """Returns the env step, and the time left at the current speed."""
        step, speed = int(self._latest.get(metrics.ENV_STEPS, 0)), self._latest.get(metrics.STEPS_PER_S, 0.0)
        return step, clock(self._total_steps - step, speed) or "-"
