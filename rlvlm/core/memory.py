"""Memory use of a process and its descendants. Watched by a run, and freed after its sessions."""

import ctypes
import threading
from contextlib import suppress

import psutil


class MemoryWatch:
    """Samples the memory of this process and its descendants while the context is open.

    Proportional set sizes are summed, so that pages shared by processes count once.

    Args:
        start_mb: peak so far, MiB.
        period_s: seconds between samples.
    """

    def __init__(self, start_mb: float, period_s: float = 3.0) -> None:
        self.peak_mb = start_mb
        self._period_s = period_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        # short peaks between samples are missed, but not the processes' long-lived memory
        while not self._ended.wait(self._period_s):
            self.peak_mb = max(self.peak_mb, tree_memory_mb())


def tree_memory_mb() -> float:
    """Returns the memory of this process and all its descendants together, MiB."""
    own = psutil.Process()
    total = 0
    for process in (own, *own.children(recursive=True)):
        try:
            # PSS: a page shared by n processes counts 1/n in each
            total += process.memory_full_info().pss
        except psutil.Error:  # it ended meanwhile, or is not readable
            continue
    return total / 2**20


def release_free_memory() -> None:
    """Returns memory that this process has freed to the system, if the C library can.

    The images of a feedback session and the passes of a fit are allocated between small objects that stay, so glibc's
    heap keeps gaps: without this some 20 MB more after every session. Mapping each large block on its own
    (`M_MMAP_THRESHOLD`) leaves no gaps either, but makes a fit 1.5 to 1.9 times as slow.
    """
    with suppress(OSError, AttributeError):  # a C library other than glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
