import ast
import io
from pathlib import Path

import pytest
from rich.text import Text

import rlvlm
from rlvlm.core.console.boxes import show_failure
from rlvlm.core.console.screen import Screen
from rlvlm.core.console.tables import plain_console, plain_table


class Picture(Screen):
    def render(self) -> Text:
        return Text("an image")


def test_a_pipe_gets_plain_lines_despite_force_color(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    with Picture(stream, "a title") as screen:
        screen.line("a line")
    assert stream.getvalue() == "a title\na line\n"


def test_a_terminal_gets_the_image_and_lines_above_it():
    stream = io.StringIO()
    stream.isatty = lambda: True
    with Picture(stream, "a title") as screen:
        screen.line("a line")
    assert "\x1b[?25h" in stream.getvalue(), "the cursor comes back"
    assert "an image" in stream.getvalue() and "a line" in stream.getvalue() and "a title" not in stream.getvalue()


def test_brackets_of_a_path_or_a_title_are_no_markup(capsys):
    console = plain_console(soft_wrap=True)
    console.print("look at /runs/[bold]/x of gym:boat:Boat-v0")
    console.print(plain_table((":boat:",), [("[/b]",)]))
    assert capsys.readouterr().out.split() == "look at /runs/[bold]/x of gym:boat:Boat-v0 :boat: [/b]".split()


@pytest.mark.slow
def test_every_console_shows_texts_as_they_are():
    made = [
        f"{file.name}: {node.func.id}"
        for file in Path(rlvlm.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Console", "get_console")
    ]
    assert not made, f"use QuietConsole: {made}"


def test_control_characters_of_others_are_shown_and_not_obeyed(capsys):
    console = plain_console(soft_wrap=True)
    console.print("a\x1b]0;title\x07b\u202ec\ud800\n\té")  # rich itself drops the bell
    console.print(plain_table(("head\x9b31m",), [("\x1b[2J",)]))
    show_failure("no \x1b[8mhidden", "the fix\x7f")
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0] == r"a\x1b]0;titleb\u202ec\ud800"
    assert shown.out.split()[1:] == ["é", r"head\x9b31m", r"\x1b[2J"]
    assert r"no \x1b[8mhidden" in shown.err and r"the fix\x7f" in shown.err and "\x1b[8m" not in shown.err
