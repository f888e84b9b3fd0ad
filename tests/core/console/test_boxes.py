import errno
import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

from rlvlm.core.console.boxes import guarded
from rlvlm.core.errors import JudgeUnavailable, MachineError, NumericsError, UsageError


def raising(error: BaseException):
    def action() -> int:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("no such word", "say another"), 2),
        (MachineError("no disk", "buy one"), 3),
        (NumericsError("loss is nan", "smaller lr"), 4),
        (JudgeUnavailable("no judge", "start it"), 5),
    ],
)
def test_a_known_failure_is_a_box_with_its_fix_and_code(error, code, capsys):
    assert guarded(raising(error)) == code
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    assert str(error) in err and f"fix: {error.fix}" in err and err.startswith("╭─ rlvlm")


def test_the_unexpected_is_a_box_too_and_the_traceback_lies_in_a_file(capsys):
    assert guarded(raising(KeyError("oops"))) == 1
    text = capsys.readouterr().err
    assert "unexpected KeyError" in text and "Traceback" not in text
    words = "".join(line.strip("│ ") for line in text.splitlines())  # the path may be folded
    file = Path(words[words.index("/") : words.index(".txt") + 4])
    assert "KeyError: 'oops'" in file.read_text()
    file.unlink()


def test_a_full_disk_is_a_machine_error_for_every_writer(monkeypatch, capsys):
    def write(name: str = "") -> int:
        with open("/dev/full", "wb", buffering=0) as file:
            try:
                file.write(b"x")
            except OSError as error:
                error.filename = name or None
                raise
        return 0

    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", full)  # the temporary folder is full too
    assert guarded(write) == guarded(lambda: write("/data/labels")) == 3
    message = capsys.readouterr().err
    assert message.count("the disk is full") == 2 and "/data/labels" in message and "report" not in message
    assert guarded(lambda: 1 // 0) == 1 and "ZeroDivisionError" in capsys.readouterr().err


def test_a_command_returns_its_code(capsys):
    assert guarded(lambda: 75) == 75
    assert guarded(raising(SystemExit(2))) == 2 and guarded(raising(SystemExit())) == 0
    assert guarded(raising(KeyboardInterrupt())) == 130
    assert "[bold]" not in capsys.readouterr().err
    assert guarded(raising(SystemExit("no display"))) == 1, "as Python does with a text"
    assert "no display" in capsys.readouterr().err


def test_a_warning_without_a_log_is_shown_and_not_obeyed(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own, which keep it from the last resort
    assert guarded(lambda: logging.getLogger("x").warning("%s is odd", "\x1b[2J") or 0) == 0
    assert capsys.readouterr().err == "\\x1b[2J is odd\n"


def test_a_message_is_not_read_as_markup(capsys):
    guarded(raising(UsageError("[red]a[/b] b")))
    assert "[red]a[/b] b" in capsys.readouterr().err


def unread(code: str) -> tuple[int, bytes]:
    """Exit code and standard error of a Python program that begins once nobody reads its standard output any more."""
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as command:
        assert command.stdin and command.stdout and command.stderr
        command.stdout.close()
        command.stdin.close()
        return command.wait(), command.stderr.read()


@pytest.mark.parametrize("letters", [10, 1_000_000])
def test_a_closed_pipe_is_no_crash(letters):
    child = f"""
import sys
from rlvlm.core.console.boxes import guarded
sys.stdin.read()
sys.exit(guarded(lambda: print("x" * {letters}) or 0))
"""
    assert unread(child) == (141, b"")


def test_a_command_finishes_although_its_pipe_is_closed(tmp_path):
    child = f"""
import sys
from rlvlm.core.console.boxes import guarded
from rlvlm.core.console.tables import plain_console
from rlvlm.core.errors import UsageError
def command():
    console = plain_console()
    console.print("figures " * 100_000)
    console.print("more")
    open({str(tmp_path / "evaluation.json")!r}, "w").close()
    raise UsageError("so far, so good")
sys.stdin.read()
sys.exit(guarded(command))
"""
    code, said = unread(child)
    assert code == 2 and b"so far, so good" in said and (tmp_path / "evaluation.json").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path, capsys):
    def write() -> int:
        tmp_path.write_text("a folder is not a file")
        return 0

    assert guarded(write) == 3
    message = "".join(line.strip("│ ") for line in capsys.readouterr().err.splitlines())
    assert "Is a directory" in message and str(tmp_path) in message and "unexpected" not in message
    place = message.index(f"{tempfile.gettempdir()}/rlvlm-crash-")
    Path(message[place : message.index(".txt", place) + 4]).unlink()
