import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlvlm.console.quiet import quiet_output


def test_everybody_is_sent_to_the_log_but_the_one_who_asks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "run.log"
    with quiet_output(log) as terminal:
        os.write(2, b"a C++ library warns\n")
        subprocess.run([sys.executable, "-c", "print('a child talks')"], check=True)
        terminal.write("the run speaks\n")
    os.write(1, b"afterwards\n")
    assert capfd.readouterr().out == "the run speaks\nafterwards\n"
    assert log.read_text() == "a C++ library warns\na child talks\n"


def test_a_second_sitting_adds_to_the_log(tmp_path: Path) -> None:
    for text in (b"one\n", b"two\n"):
        with quiet_output(tmp_path / "run.log"):
            os.write(1, text)
    assert (tmp_path / "run.log").read_text() == "one\ntwo\n"
