import io

import pytest
from rich.text import Text

from rlvlm.console.screen import Screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_lines_whatever_force_color_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    with Screen(stream, "a title", lambda: Text("a picture")) as screen:
        assert not screen.is_live
        screen.line("a line")
    assert stream.getvalue() == "a title\na line\n"


def test_a_terminal_gets_the_picture_and_lines_above_it() -> None:
    stream = Terminal()
    with Screen(stream, "a title", lambda: Text("a picture")) as screen:
        assert screen.is_live
        screen.line("a line")
    assert not screen.is_live
    assert "a picture" in stream.getvalue() and "a line" in stream.getvalue() and "a title" not in stream.getvalue()
