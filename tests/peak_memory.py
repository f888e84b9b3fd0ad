"""What a piece of work takes of this process's own memory at most."""

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_M_MMAP_THRESHOLD = -3
"""glibc's name for the size from which an allocation has pages of its own, which go back when it is freed."""


def peak_of(work: Callable[[], Any]) -> int:
    """Bytes that `work` takes at most beside what the process has before, files mapped into memory left out."""

    def now() -> int:
        return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) << 10

    # else glibc keeps freed tensors of up to 32 MiB for later, and what counts here is what `work` holds
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 64 << 10)
    libc.malloc_trim(0)  # nor may it have room left by earlier tests, which `work` would fill unseen
    begun, is_over, found = now(), threading.Event(), [0]

    def watch() -> None:
        while not is_over.is_set():
            found.append(now())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        is_over.set()
        watcher.join()
    return max(found) - begun
