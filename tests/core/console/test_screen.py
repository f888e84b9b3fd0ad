import io

import pytest
from rich.text import Text

from rlvlm.core.console.screen import Screen


class Picture(Screen):
    def render(self) -> Text:
        return Text("an image")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_lines_whatever_force_color_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    with Picture(stream, "a title") as screen:
        screen.line("a line")
    assert stream.getvalue() == "a title\na line\n"


def test_a_terminal_gets_the_image_and_lines_above_it() -> None:
    stream = Terminal()
    with Picture(stream, "a title") as screen:
        screen.line("a line")
    assert "\x1b[?25h" in stream.getvalue(), "the cursor comes back"
    assert "an image" in stream.getvalue() and "a line" in stream.getvalue() and "a title" not in stream.getvalue()
