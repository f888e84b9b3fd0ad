"""Every answer that is not the wished one: one exception, one body, `{"error": {"code", "message", "fix"}}`."""

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.types import Send

RETRY_AFTER_S = 2.0
"""When a caller who met an overload may come back."""


class Refusal(Exception):  # noqa: N818 - it is an answer, not a failure
    """A request that is not served; it becomes the HTTP answer.

    Args:
        status: HTTP status, 4xx or 5xx.
        code: one word for programs, e.g. `token`.
        message: what happened and the rule it breaks; never quotes what the caller must not learn.
        fix: what the caller can do.
    """

    def __init__(self, status: int, code: str, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.fix = fix

    @property
    def body(self) -> dict[str, Any]:
        """The answer's body."""
        return {"error": {"code": self.code, "message": str(self), "fix": self.fix}}

    @property
    def headers(self) -> dict[str, str]:
        """The answer's headers, besides those of its length and type."""
        headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        if self.status == 401:
            headers["www-authenticate"] = 'Bearer realm="rlvlm"'
        if self.status in (429, 503):
            headers["retry-after"] = str(math.ceil(RETRY_AFTER_S))
        return headers


def as_json(content: Any) -> bytes:
    """JSON in plain ASCII: a judge's text may hold anything, lone surrogates too."""
    return json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


def overloaded(what: str) -> Refusal:
    """429: too much at once."""
    return Refusal(
        429, "overloaded", f"{what}; nothing was judged", f"send the same request again after {RETRY_AFTER_S:.0f} s"
    )


async def send_json(send: Send, status: int, content: Any, headers: Mapping[str, str] | None = None) -> None:
    """Sends a whole answer."""
    body = as_json(content)
    all_headers = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    pairs = [(name.encode(), value.encode()) for name, value in all_headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


async def send_refusal(send: Send, refusal: Refusal) -> None:
    """Sends `refusal` as a whole answer and closes the connection, whose body may be unread."""
    await send_json(send, refusal.status, refusal.body, {"connection": "close", **refusal.headers})
