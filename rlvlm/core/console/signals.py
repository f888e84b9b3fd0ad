"""SIGTERM, SIGINT, SIGHUP and SIGUSR1 ask a run to save and stop; a second SIGTERM or SIGINT ends it at once."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

ASKED_BY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals of a cluster's time limit or preemption, Ctrl-C, a closed terminal, and SLURM's early warning."""

ONLY_ASK = (signal.SIGHUP, signal.SIGUSR1)
"""Signals that only ask, however often: a closed terminal's hangup is sent by the kernel and again by the shell."""

REPEAT_S = 0.5
"""Time within which the same signal is the same request, seconds: `timeout` signals its child, then the whole group."""


class StoppedEarly(Exception):  # noqa: N818 - no error
    """A signal stopped a run or a job in the middle of what is done in one piece, such as the start of a run."""


class StopRequest:
    """Whether a signal has asked the run to stop, as a context manager: the handlers are set while it is open.

    SIGUSR1 only ever asks: SLURM's SIGTERM often follows it, or comes together with it, while the run is saving.
    """

    def __init__(self) -> None:
        self.signal_name = ""
        self.log: Callable[[str], None] = lambda _: None
        """Called with a line for the user at the first signal."""
        self.advice = ""
        """Command that resumes the run, for the end of that line."""
        self.promise = "finishing what is under way, then saving"
        """What the run does now at the first signal, for that line."""
        self._unsaid = ""  # line of a signal that came in the middle of a write
        self._was_asked = False
        self._last: tuple[int, float] = (0, 0.0)  # number and time of the first signal that does more than ask
        self._before: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        if self._unsaid:
            text, self._unsaid = self._unsaid, ""
            with suppress(OSError):
                self.log(text)
        return bool(self.signal_name)

    def __enter__(self) -> "StopRequest":
        found = {number: signal.getsignal(number) for number in ASKED_BY}
        # `nohup` ignores SIGHUP so that a run outlives its terminal
        if found[signal.SIGHUP] == signal.SIG_IGN:
            del found[signal.SIGHUP]
        self._before = found
        self.take_over()
        return self

    def __exit__(self, *_: object) -> None:
        # other threads have no handlers of ours, see `take_over`
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take_over(self) -> None:
        """Sets our handlers again, since starting Ray replaces some of them.

        Outside of the main thread, where Python allows none, the run cannot be stopped by a signal.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._before:
            signal.signal(number, self._ask)

    def _ask(self, number: int, _: FrameType | None) -> None:
        # the same signal may come again between any two lines of this, so what is decided on is read once
        was_asked = self._was_asked
        is_repeat = number == self._last[0] and time.monotonic() < self._last[1] + REPEAT_S
        if number not in ONLY_ASK:
            if was_asked and not is_repeat:
                # the default action, as without a handler: the exit status is that of the signal
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            if not was_asked:
                self._last = number, time.monotonic()
                self._was_asked = True
        was_named, self.signal_name = self.signal_name, self.signal_name or signal.Signals(number).name
        if not was_named:
            self._say(number)
        if not was_asked and number not in ONLY_ASK:
            self._last = number, time.monotonic()  # again after the line, which may take a while to write

    def _say(self, number: int) -> None:
        again = " (once more ends it at once)" if self._was_asked else ""
        later = f"; go on later with: {self.advice}" if self.advice else ""
        text = f"{signal.Signals(number).name}: {self.promise}{again}{later}"
        try:
            self.log(text)
        except RuntimeError:  # the signal interrupted a write: it is said when the run next looks
            self._unsaid = text
        except OSError:  # the terminal is gone
            pass
