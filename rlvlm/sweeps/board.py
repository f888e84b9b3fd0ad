"""What a sweep shows while it works: a live table on a terminal, one line per event elsewhere."""

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TextIO

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rlvlm.console.screen import Screen
from rlvlm.sweeps.folder import FINISHED, State, TrialRecord
from rlvlm.sweeps.plan import TrialPlan

COLOURS = {
    State.RUNNING: "cyan",
    State.DONE: "green",
    State.FLAT: "green",
    State.HALTED: "yellow",
    State.FAILED: "bold red",
    State.SAVED: "blue",
    State.WAITING: "dim",
}
_ORDER = (State.RUNNING, State.FAILED, State.SAVED, State.DONE, State.FLAT, State.HALTED, State.WAITING)
"""Who is shown first where the terminal is too low for all."""
_FRAME_LINES = 6


class Board:
    """The runs of a sweep. A context: the table is there while it is open.

    Args:
        stream: a terminal, or a file or pipe that gets plain lines.
        title: of the sweep.
        plans: its runs, by key.
    """

    def __init__(self, stream: TextIO, title: str, plans: Mapping[str, TrialPlan]) -> None:
        self._screen = Screen(stream, title, self._render)
        self._title = title
        self._plans = plans
        self._records: dict[str, TrialRecord] = {}
        self._speeds: dict[str, float] = {}
        self._evaluated: dict[str, int] = {}
        self._started = time.monotonic()
        self._phase = ""

    def __enter__(self) -> "Board":
        self._screen.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._screen.__exit__(*error)

    def line(self, text: str) -> None:
        """Prints a line that stays, above the table where there is one."""
        self._screen.line(text)

    def phase(self, text: str) -> None:
        """Says what is being done now."""
        self._phase = text
        if not self._screen.is_live:
            self.line(text)

    def show(self, records: Mapping[str, TrialRecord]) -> None:
        """Takes in what has become of all runs so far."""
        self._records = dict(records)

    def change(self, key: str, record: TrialRecord) -> None:
        """A run has passed from one state to another."""
        self._records[key] = record
        if record.state is not State.RUNNING:
            self._speeds.pop(key, None)
        if not self._screen.is_live or record.state is State.FAILED:
            cause = f": {record.cause}" if record.cause else ""
            self.line(f"{self._plans[key].label}  {record.state}{cause}  ({self._counts()})")

    def update(self, key: str, record: TrialRecord, steps_per_s: float, evaluated_at: int) -> None:
        """A run has reported; where there is no table, a line per evaluation.

        Args:
            key: the run.
            record: where it is.
            steps_per_s: its speed.
            evaluated_at: env step of its newest evaluation, 0 before the first.
        """
        self._records[key] = record
        if record.state is State.RUNNING:
            self._speeds[key] = steps_per_s
        if not self._screen.is_live and evaluated_at > self._evaluated.get(key, 0):
            self.line("  ".join(cell for cell in (self._plans[key].label, *self._progress(key)) if cell))
        self._evaluated[key] = evaluated_at

    def _render(self) -> Group:
        table = Table(box=None, padding=(0, 2, 0, 0), title=self._title, title_justify="left", title_style="bold")
        for name in ("task", "source", "seed"):
            table.add_column(name, no_wrap=True)
        for name in ("step", "score", "steps/s", "left"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("state", no_wrap=True)
        room = max(self._screen.height - _FRAME_LINES, 5)
        ordered = sorted(self._records, key=lambda key: _ORDER.index(self._records[key].state))
        shown = set(ordered[:room])
        for key, record in self._records.items():
            if key in shown:
                plan, colour = self._plans[key], COLOURS[record.state]
                table.add_row(
                    plan.task, plan.source, str(plan.seed), *self._cells(key), Text(str(record.state), style=colour)
                )
        hidden = len(ordered) - len(shown)
        foot = self._counts() + (f", {hidden} not shown" if hidden > 0 else "")
        return Group(table, Text(""), Text(f"{self._phase}   {foot}   left about {self._sweep_left()}"))

    def _progress(self, key: str) -> list[str]:
        step, score, speed, left = self._cells(key)
        return [f"step {step}", f"score {score}", f"{speed} steps/s" if speed else "", f"left {left}" if left else ""]

    def _cells(self, key: str) -> tuple[str, str, str, str]:
        """Step, score, speed and time left of a run."""
        record, total = self._records[key], self._plans[key].config.steps
        speed = self._speeds.get(key, 0.0)
        left = _clock((total - record.env_steps) / speed) if speed else ""
        score = "-" if record.score is None else f"{record.score:.2f}"
        return f"{record.env_steps:,}/{total:,}", score, f"{speed:.0f}" if speed else "", left

    def _counts(self) -> str:
        states = [record.state for record in self._records.values()]
        done = sum(state in FINISHED for state in states)
        failed = states.count(State.FAILED)
        return f"{done} of {len(states)} finished" + (f", {failed} failed" if failed else "")

    def _sweep_left(self) -> str:
        """The steps still to be taken, at the speed of those that run now."""
        speed = sum(self._speeds.values())
        todo = [
            self._plans[key].config.steps - record.env_steps
            for key, record in self._records.items()
            if record.state not in (*FINISHED, State.FAILED)
        ]
        return _clock(sum(todo) / speed) if speed else "-"


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(max(seconds, 0))))
