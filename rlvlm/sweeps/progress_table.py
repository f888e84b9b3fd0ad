"""Progress display of a sweep: a live table on a terminal, one line per event elsewhere."""

from collections.abc import Mapping
from typing import TextIO

from rich.console import Group
from rich.text import Text

from rlvlm.core.console.screen import Screen, clock
from rlvlm.core.console.tables import plain_table
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
"""Order of the runs if the terminal is too low for all."""
_FRAME_LINES = 6


class ProgressTable(Screen):
    """Live table of a sweep's runs by key, as a context manager; a file or pipe gets plain lines instead."""

    def __init__(self, stream: TextIO, title: str, plans: Mapping[str, TrialPlan]) -> None:
        super().__init__(stream, title)
        self.records: dict[str, TrialRecord] = {}
        """State of each run; filled by the callback."""
        self._plans = plans
        self._speeds: dict[str, float] = {}
        self._evaluated: dict[str, int] = {}

    def change(self, key: str, record: TrialRecord) -> None:
        """Shows a run's change from one state to another."""
        self.records[key] = record
        if record.state is not State.RUNNING:
            self._speeds.pop(key, None)
        if self._live is None or record.state is State.FAILED:
            cause = f": {record.cause}" if record.cause else ""
            self.line(f"{self._plans[key].label}  {record.state}{cause}  ({self._counts()})")

    def update(self, key: str, record: TrialRecord, steps_per_s: float, evaluated_at: int) -> None:
        """Shows a run's report.

        Without a table this is a line per evaluation; `evaluated_at` is the newest one's env step, 0 before the first.
        """
        self.records[key] = record
        if record.state is State.RUNNING:
            self._speeds[key] = steps_per_s
        if self._live is None and evaluated_at > self._evaluated.get(key, 0):
            step, score, speed, left = self._cells(key)
            parts = [self._plans[key].label, f"step {step}", f"score {score}"]
            self.line("  ".join(parts + ([f"{speed} steps/s", f"left {left}"] if speed else [])))
        self._evaluated[key] = evaluated_at

    def render(self) -> Group:
        """Returns the table, as much of it as fits, and the progress of the sweep."""
        # rows that do not fit are those of the least urgent states; the others keep their order
        room = max(self._console.height - _FRAME_LINES, 5)
        ordered = sorted(self.records, key=lambda key: _ORDER.index(self.records[key].state))
        shown, rows = set(ordered[:room]), []
        for key, record in self.records.items():
            if key in shown:
                plan, state = self._plans[key], Text(str(record.state), style=COLOURS[record.state])
                rows.append((plan.task, plan.source, str(plan.seed), *self._cells(key), state))
        words, numbers = ("task", "source", "seed"), ("step", "score", "steps/s", "left")
        table = plain_table((*words, *numbers, "state"), rows, words=(*words, "state"))
        hidden = len(ordered) - len(shown)
        foot = self._counts() + (f", {hidden} not shown" if hidden > 0 else "")
        todo = [
            self._plans[key].config.steps - record.env_steps
            for key, record in self.records.items()
            if record.state not in (*FINISHED, State.FAILED)
        ]
        # as if everything left were done at the current speed: waiting runs follow those that end
        left = clock(sum(todo), sum(self._speeds.values())) or "-"
        foot = f"{self._phase}   {foot}   left about {left}"
        return Group(Text(self._title, style="bold"), table, Text(""), Text(foot))

    def _cells(self, key: str) -> tuple[str, str, str, str]:
        """Returns step, score, speed and time left of a run; the last two are empty if it does not run."""
        record, total = self.records[key], self._plans[key].config.steps
        speed = self._speeds.get(key, 0.0)
        score = "-" if record.score is None else f"{record.score:.2f}"
        left = clock(total - record.env_steps, speed)
        return f"{record.env_steps:,}/{total:,}", score, f"{speed:.0f}" if speed else "", left

    def _counts(self) -> str:
        states = [record.state for record in self.records.values()]
        done, failed = sum(state in FINISHED for state in states), states.count(State.FAILED)
        return f"{done} of {len(states)} finished" + (f", {failed} failed" if failed else "")
