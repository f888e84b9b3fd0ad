import os
import signal
import subprocess
import sys

from rlvlm.core.console.quiet import quiet_output


def test_only_the_asker_writes_to_the_terminal(tmp_path, capfd):
    log = tmp_path / "run.log"
    with quiet_output(log) as terminal:
        os.write(2, b"a C++ library warns\n")
        subprocess.run([sys.executable, "-c", "print('a child talks')"], check=True)
        terminal.write("the run speaks\n")
    os.write(1, b"afterwards\n")
    assert capfd.readouterr().out == "the run speaks\nafterwards\n"
    with quiet_output(log):  # a second sitting adds to it
        os.write(1, b"again\n")
    assert log.read_text() == "a C++ library warns\na child talks\nagain\n"


def test_a_run_whose_reader_went_away_goes_on(tmp_path):
    child = f"""
import os, sys, time
from pathlib import Path
from rlvlm.core.console.boxes import guarded
from rlvlm.core.console.panel import RunConsole
from rlvlm.core.console.quiet import quiet_output

def run():
    with quiet_output(Path({str(tmp_path / "run.log")!r})) as terminal, RunConsole(terminal, "title", 1) as console:
        sys.stdin.read()
        for number in range(3):
            console.line(f"line {{number}}")
        os.write(1, b"done\\n")
    return 0

sys.exit(guarded(run))
"""
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    with subprocess.Popen([sys.executable, "-c", child], **pipes) as run:
        assert run.stdin and run.stdout and run.stderr
        assert run.stdout.readline() == b"title\n"
        run.stdout.close()
        run.stdin.close()
        assert run.wait() == 0, run.stderr.read()
    assert (tmp_path / "run.log").read_text() == "done\n"


def test_a_run_whose_terminal_was_closed_goes_on(tmp_path):
    master, terminal = os.openpty()
    child = f"""
import signal, time
from pathlib import Path
from rlvlm.core.console.panel import RunConsole
from rlvlm.core.console.quiet import quiet_output
from rlvlm.core.console.signals import StopRequest

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that run under nohup hand on that it is ignored
with StopRequest() as stop, quiet_output(Path({str(tmp_path / "run.log")!r})) as terminal:
    with RunConsole(terminal, "title", 1) as console:
        stop.log = console.line
        console.line("ready")
        while not stop:
            time.sleep(0.05)
        console.line("saved")
Path({str(tmp_path / "saved")!r}).write_text(stop.signal_name)
"""
    with subprocess.Popen(
        [sys.executable, "-c", child], stdout=terminal, stderr=terminal, start_new_session=True
    ) as run:
        os.close(terminal)
        while b"ready" not in os.read(master, 4096):
            pass
        os.close(master)
        run.send_signal(signal.SIGHUP)
        try:
            run.wait(timeout=60)
        finally:
            run.kill()
    assert (tmp_path / "saved").read_text() == "SIGHUP", (tmp_path / "run.log").read_text()
