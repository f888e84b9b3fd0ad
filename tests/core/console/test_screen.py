import io

import pytest
from rich.text import Text

from rlvlm.core.console.screen import Screen
from rlvlm.core.console.tables import plain_console, plain_table


class Picture(Screen):
    def render(self) -> Text:
        return Text("an image")


def test_a_pipe_gets_lines_whatever_force_color_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    with Picture(stream, "a title") as screen:
        screen.line("a line")
    assert stream.getvalue() == "a title\na line\n"


def test_a_terminal_gets_the_image_and_lines_above_it() -> None:
    stream = io.StringIO()
    stream.isatty = lambda: True
    with Picture(stream, "a title") as screen:
        screen.line("a line")
    assert "\x1b[?25h" in stream.getvalue(), "the cursor comes back"
    assert "an image" in stream.getvalue() and "a line" in stream.getvalue() and "a title" not in stream.getvalue()


def test_brackets_of_a_path_or_a_title_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    console = plain_console(soft_wrap=True)
    console.print("look at /runs/[bold]/x")
    console.print(plain_table(("[red]",), [("[/b]",)]))
    assert capsys.readouterr().out.split() == ["look", "at", "/runs/[bold]/x", "[red]", "[/b]"]
