"""What `rlvlm serve` says of its start: in a job's log each thing once, and again only while it lasts long."""

import io

import pytest
from rich.console import Console

from rlvlm.commands import serve
from rlvlm.commands.serve import REPORT_S, Progress


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Its one number is the time."""
    now = [1_000.0]
    monkeypatch.setattr(serve.time, "monotonic", lambda: now[0])
    return now


def test_each_new_thing_is_a_line_and_what_lasts_is_repeated(clock):
    log = io.StringIO()
    progress = Progress(Console(file=log, soft_wrap=True))
    progress.say("starting Ray")
    for half_seconds in range(int(2 * 2.5 * REPORT_S)):  # two judges for a while, then one of them
        is_short = half_seconds < 4
        progress.say("loading pocket, clip" if is_short else "loading clip", half_seconds / 2)
        clock[0] += 0.5
    progress.end()
    # by hand: the second judge is named at 2 s, and again 15 and 30 s after that
    assert log.getvalue().splitlines() == [
        "starting Ray",
        "loading pocket, clip",
        "loading clip (2 s)",
        "loading clip (17 s)",
        "loading clip (32 s)",
    ]


def test_on_a_terminal_one_line_changes_and_is_taken_away():
    screen = io.StringIO()
    progress = Progress(Console(file=screen, force_terminal=True, width=60))
    progress.say("loading pocket", 3.2)
    progress.end()
    assert "loading pocket (3 s)" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[1A\x1b[2K")  # up a line, and away with it
