"""An event loop in a thread: callers without a loop wait for results, coroutines of other loops await them."""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines concurrently; safe to use from any thread.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # a daemon: a finished process does not wait for requests whose replies are not needed
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` and returns its result; for callers without an event loop."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # also on Ctrl-C: nothing must keep running in the background
            future.cancel()
            raise

    async def on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` for a caller on another loop; cancelled with the task that awaits it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


class PerProcess(Generic[T]):
    """A value with threads or connections, made on first use in each process: they do not survive a fork or a pickle.

    Args:
        make: makes it.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self.__setstate__({"_make": make})

    def __call__(self) -> T:
        """Returns the value of this process."""
        with self._lock:
            if self._value is None:
                self._value = self._make()
            return self._value

    def __getstate__(self) -> dict[str, Any]:
        return {"_make": self._make}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._make = state["_make"]
        self._forget()
        forget = weakref.WeakMethod(self._forget)  # what is registered is never removed, and would keep this object
        os.register_at_fork(after_in_child=lambda: (now := forget()) and now())

    def _forget(self) -> None:
        # another thread of the parent may hold the lock while it forks
        self._lock, self._value = threading.Lock(), None
