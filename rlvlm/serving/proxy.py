"""What Serve's own HTTP proxy takes in before any guard of ours sees a request: short headers, and soon.

By default the proxy reads headers with httptools, which keeps them however long they get: one endless header, from
any client, has the process killed. Where the environment of the Ray that Serve runs on has
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=rlvlm.serving.proxy.bound_headers, the proxy reads them with h11, which stops
at 64 KiB. A private Ray has it.
"""

import asyncio
from typing import Any

import h11
import uvicorn.config
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_S = 10.0
"""Longest time that a request's headers may take to arrive."""


class HeaderGuard(H11Protocol):
    """A connection on which headers have 64 KiB and `HEADER_S` seconds, on pain of being closed."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begins to wait for the first request."""
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        """Takes in some bytes; those of another request on this connection may begin the wait anew."""
        super().data_received(data)
        # between two requests of one connection; a body may take as long as the guard allows
        if self.conn.their_state is h11.IDLE:
            self._await_headers()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leaves no timer behind."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_headers(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def bound_headers() -> list[Any]:
    """Has the HTTP server that this process is about to start guard its headers; adds no middleware."""
    # Serve starts uvicorn by itself and hands over no setting for this; by name it finds ours
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{HeaderGuard.__name__}"
    return []
