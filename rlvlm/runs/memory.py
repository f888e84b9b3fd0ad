"""How much memory a run takes, all its processes together. Watched by `train`."""

import ctypes
import threading
from contextlib import suppress

import psutil


class MemoryWatch:
    """Samples the memory of this process and all below it while the context is open.

    Proportional set size is summed, so that pages which processes share are counted once.

    Args:
        start_mb: the peak so far, in MiB.
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
        # sampling: a peak between two samples is missed, but the processes' long-lived memory is not
        while not self._ended.wait(self._period_s):
            self.peak_mb = max(self.peak_mb, tree_memory_mb())


def tree_memory_mb() -> float:
    """Memory of this process and all its descendants together, in MiB."""
    own = psutil.Process()
    total = 0
    for process in (own, *own.children(recursive=True)):
        try:
            # PSS: a page that n processes share counts 1/n in each
            total += process.memory_full_info().pss
        except psutil.Error:  # it ended meanwhile, or hides from us
            continue
    return total / 2**20


def release_free_memory() -> None:
    """Gives memory that this process has freed back to the system, where the C library can.

    The images of a feedback session and the passes of a fit come and go between small objects that stay, so glibc's
    heap is left with holes that it keeps: without this some 20 MB more after every session. Having each large block
    mapped on its own (`M_MMAP_THRESHOLD`) leaves no holes either, but makes a fit 1.5 to 1.9 times as slow.
    """
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
