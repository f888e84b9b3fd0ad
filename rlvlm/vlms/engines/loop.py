"""An event loop in a thread: callers without a loop wait for results, coroutines of other loops await them."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

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
