"""What a run shows while it works: one live panel on a terminal, one plain line per interval elsewhere."""

from collections.abc import Mapping
from datetime import timedelta
from typing import TextIO

from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlvlm import metrics
from rlvlm.console.screen import Screen

_STATUSES = {
    "right or wrong": metrics.QUERIES_OK,
    "no preference": metrics.QUERIES_NO_PREFERENCE,
    "unreadable": metrics.QUERIES_INVALID,
    "no answer": metrics.QUERIES_FAILED,
}


class RunConsole:
    """Shows a run. A context: the panel is there while it is open.

    Args:
        stream: a terminal, or a file or pipe that gets plain lines.
        title: of the panel.
        total_steps: env steps of the whole run.
    """

    def __init__(self, stream: TextIO, title: str, total_steps: int) -> None:
        self._title = title
        self._total_steps = total_steps
        self._screen = Screen(stream, title, self._render)
        self._latest: dict[str, float] = {}
        self._phase = ""

    def __enter__(self) -> "RunConsole":
        self._screen.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._screen.__exit__(*error)

    def line(self, text: str) -> None:
        """Prints a line that stays, above the panel where there is one."""
        self._screen.line(text)

    def phase(self, text: str, is_line: bool = True) -> None:
        """Says what is being done now; where there is no panel, only if `is_line`."""
        self._phase = text
        if not self._screen.is_live and is_line:
            self.line(text)

    def update(self, latest: Mapping[str, float], is_due: bool) -> None:
        """Takes in the newest metrics.

        Args:
            latest: keys of `rlvlm.metrics`; those that are missing keep their last value.
            is_due: whether a plain line is to be printed where there is no panel.
        """
        self._latest.update(latest)
        self._phase = "training"
        if not self._screen.is_live and is_due:
            self.line(self._plain())

    def _plain(self) -> str:
        parts = [
            f"step {self._steps():>7,}/{self._total_steps:,}",
            f"success {self._number(metrics.EVAL_SUCCESS_RATE, '.0%')}",
            f"return {self._number(metrics.TRAIN_EPISODE_RETURN, '.1f')}",
            f"learned {self._number(metrics.TRAIN_LEARNED_RETURN, '.2f')}",
            f"labels {self._number(metrics.QUERIES, '.0f')} ({self._number(metrics.LABEL_ACCURACY, '.0%')} right)",
            f"{self._number(metrics.STEPS_PER_S, '.0f')} steps/s",
            f"left {self._time_left()}",
        ]
        return "  ".join(parts)

    def _render(self) -> Panel:
        grid = Table.grid(padding=(0, 3))
        for _ in range(4):
            grid.add_column()
        cells = [
            ("success, last evaluation", metrics.EVAL_SUCCESS_RATE, ".0%"),
            ("true return, training", metrics.TRAIN_EPISODE_RETURN, ".1f"),
            ("true return, evaluation", metrics.EVAL_EPISODE_RETURN, ".1f"),
            ("learned return, training", metrics.TRAIN_LEARNED_RETURN, ".2f"),
            ("queries", metrics.QUERIES, ",.0f"),
            ("labels right, of the decided", metrics.LABEL_ACCURACY, ".1%"),
            ("steps per second", metrics.STEPS_PER_S, ".0f"),
            ("memory, all processes, MiB", metrics.PEAK_RSS_MB, ",.0f"),
        ]
        for left, right in zip(cells[::2], cells[1::2], strict=True):
            row = [Text(text) for name, key, form in (left, right) for text in (name, self._number(key, form))]
            grid.add_row(row[0], Text(row[1].plain, style="bold"), row[2], Text(row[3].plain, style="bold"))
        statuses = "   ".join(f"{name} {self._number(key, ',.0f')}" for name, key in _STATUSES.items())
        bar = ProgressBar(total=self._total_steps, completed=self._steps(), width=60)
        foot = f"{self._phase}   step {self._steps():,} of {self._total_steps:,}   left {self._time_left()}"
        body = Group(grid, Text(statuses, style="dim"), Text(""), bar, Text(foot))
        return Panel(body, title=self._title, title_align="left", border_style="cyan")

    def _steps(self) -> int:
        return int(self._latest.get(metrics.ENV_STEPS, 0))

    def _number(self, key: str, form: str) -> str:
        return format(self._latest[key], form) if key in self._latest else "-"

    def _time_left(self) -> str:
        speed = self._latest.get(metrics.STEPS_PER_S, 0.0)
        if not speed:
            return "-"
        return str(timedelta(seconds=round(max(self._total_steps - self._steps(), 0) / speed)))
