"""A link that opens the dashboard of a Ray of our own, signed in: that Ray has a random token that no user could type.

Ray's dashboard reads its token from a cookie, and cookies hold for all ports of a host. A server on another port of the
loopback address answers one secret path with that cookie, and leads to the dashboard.
"""

import hmac
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ray._private.authentication.authentication_constants import (
    AUTHENTICATION_TOKEN_COOKIE_NAME,
    AUTHORIZATION_BEARER_PREFIX,
)
from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled

_SLOW_CLIENT_S = 5.0


@contextmanager
def signed_in_link(dashboard: str) -> Iterator[str]:
    """Yields a link that signs a browser of this machine in while the context is open, as often as it is opened, and
    says where it leads.

    Args:
        dashboard: the dashboard's address, HOST:PORT, on the loopback address.
    """
    target = f"http://{dashboard}"
    headers: dict[str, str] = get_auth_headers_if_auth_enabled({})
    if not headers:  # a user who switched Ray's tokens off needs none here
        yield target
        return
    token = next(iter(headers.values())).removeprefix(AUTHORIZATION_BEARER_PREFIX)
    path = f"/{secrets.token_urlsafe(16)}"

    class SignIn(BaseHTTPRequestHandler):
        timeout = _SLOW_CLIENT_S

        def do_GET(self) -> None:
            if not hmac.compare_digest(self.path.encode("latin-1"), path.encode()):
                self.send_error(404)
                return
            self.send_response(303)
            # the attributes of the cookie that the dashboard itself sets, but only until the browser is closed
            self.send_header(
                "Set-Cookie", f"{AUTHENTICATION_TOKEN_COOKIE_NAME}={token}; Path=/; HttpOnly; SameSite=Strict"
            )
            self.send_header("Location", target)
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Logs nothing: the path is a secret."""

    with ThreadingHTTPServer(("127.0.0.1", 0), SignIn) as server:
        thread = threading.Thread(target=server.serve_forever, name="dashboard-link", daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}{path}  (signs in, and leads to {target})"
        finally:
            server.shutdown()
            thread.join()
