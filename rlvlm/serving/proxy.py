"""Limits on Serve's own HTTP proxy, which reads requests before our guard does: short headers, in a short time.

By default the proxy reads headers with httptools, which stores them at any length: a single endless header, from any
client, gets the process killed. If the environment of Serve's Ray has
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=rlvlm.serving.proxy.bound_headers, the proxy reads them with h11, which stops
at 64 KiB. A private Ray has this variable set.
"""

import asyncio
from typing import Any

import h11
import uvicorn.config
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_S = 10.0
"""Maximum time for a request's headers to arrive, seconds."""


class HeaderGuard(H11Protocol):
    """A connection that is closed if headers exceed 64 KiB or `HEADER_S` seconds."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        """Receives bytes; if they begin another request on this connection, restarts the timer."""
        super().data_received(data)
        # between two requests of a connection; a body may take as long as the guard allows
        if self.conn.their_state is h11.IDLE:
            self._await_headers()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
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
    """Makes the HTTP server that this process is about to start guard its headers; adds no middleware."""
    # Serve starts uvicorn itself and passes no setting for this; it looks up the protocol by name and finds ours
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{HeaderGuard.__name__}"
    return []
