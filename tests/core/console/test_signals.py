import os
import signal
import subprocess
import sys

import pytest

from rlvlm.core.console.signals import ASKED_BY, StopRequest


@pytest.mark.parametrize("number", ASKED_BY)
def test_the_first_signal_only_asks(number):
    # tests that run under nohup find SIGHUP ignored, which is then left alone
    handed_down = signal.signal(number, signal.SIG_DFL) if number == signal.SIGHUP else signal.getsignal(number)
    before = signal.getsignal(number)
    lines: list[str] = []
    with StopRequest() as stop:
        stop.log = lines.append
        assert not stop
        os.kill(os.getpid(), number)
        assert len(lines) == 1 and lines[0].startswith(f"{number.name}: ")
        assert ("at once" in lines[0]) == (number not in (signal.SIGUSR1, signal.SIGHUP))
        assert stop and stop.signal_name == number.name
    assert signal.getsignal(number) == before
    signal.signal(number, handed_down)


def test_a_run_under_nohup_outlives_the_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as stop:
        stop.take_over()
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop
    signal.signal(signal.SIGHUP, before)


def test_the_second_signal_ends_the_process_at_once():
    code = (
        "import os, signal, time\nfrom rlvlm.core.console.signals import StopRequest\n"
        "with StopRequest():\n    os.kill(os.getpid(), signal.SIGTERM)\n    print('asked', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(60)\n"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert child.stdout == "asked\n"
    assert child.returncode in (-signal.SIGINT, 130)


def test_a_time_limit_that_signals_the_process_and_its_group_asks_once():
    """`timeout` sends SIGTERM to its child, and then to the child's whole group."""
    code = (
        "import time\nfrom rlvlm.core.console.signals import StopRequest\n"
        "with StopRequest() as stop:\n    print('ready', flush=True)\n    while not stop:\n        time.sleep(0.01)\n"
        "    time.sleep(0.3)\n    print('saved')\n"
    )
    command = ["timeout", "2", sys.executable, "-c", code]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert child.stdout == "ready\nsaved\n" and child.returncode == 124, "the code of timeout itself"


@pytest.mark.parametrize("warned", [False, True])
def test_a_repeat_while_the_line_is_written_is_the_same_request(warned):
    """The second signal of `timeout` may find the first one's handler at work, also after SLURM's early warning."""
    code = (
        "import os, signal\nfrom rlvlm.core.console.signals import StopRequest\n"
        "again = lambda _: os.kill(os.getpid(), signal.SIGTERM)\n"
        "with StopRequest() as stop:\n"
        f"    {'os.kill(os.getpid(), signal.SIGUSR1)' if warned else 'stop.log = again'}\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    os.kill(os.getpid(), signal.SIGTERM)\n    print('saved')\n"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (child.stdout, child.returncode) == ("saved\n", 0)


def test_an_early_warning_beside_the_real_signal_ends_nothing():
    for order in ((signal.SIGUSR1, signal.SIGTERM), (signal.SIGTERM, signal.SIGUSR1)):
        with StopRequest() as stop:
            for number in order:
                os.kill(os.getpid(), number)
            assert stop.signal_name == order[0].name
