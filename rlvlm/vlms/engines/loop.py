"""An event loop in a thread of its own: callers without one wait for it, coroutines of other loops await it."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines side by side; safe in any thread.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # a daemon: a process that is done does not wait for requests whose replies are not needed
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of `work`; for callers without an event loop."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # also on Ctrl-C: nothing goes on behind our back
            future.cancel()
            raise

    async def on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """The same for callers on another loop; cancelled with the task that awaits it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
