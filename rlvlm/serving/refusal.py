"""Error answers: one exception, one body, `{"error": {"code", "message", "type", "param", "fix"}}`."""

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Send

RETRY_AFTER_S = 2.0
"""Time after which an overloaded caller may retry, seconds."""


class Refusal(Exception):  # noqa: N818 - it is an answer, not a failure
    """A request that is refused; it becomes the HTTP answer.

    Args:
        status: HTTP status, 4xx or 5xx.
        code: one word for programs, e.g. `token`.
        message: what happened and the rule it breaks; never quotes anything secret.
        fix: what the caller can do.
    """

    def __init__(self, status: int, code: str, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.fix = fix

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        # OpenAI's fields, which its clients read, and the fix
        said = {"code": self.code, "message": str(self), "type": kind, "param": None, "fix": self.fix}
        return {"error": said}

    @property
    def headers(self) -> dict[str, str]:
        """Returns the answer's headers, besides length and type."""
        headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        if self.status == 401:
            headers["www-authenticate"] = 'Bearer realm="rlvlm"'
        if self.status == 502:
            headers["x-should-retry"] = "false"  # read by OpenAI's clients: the judge would say the same again
        if self.status in (429, 503):
            headers["retry-after"] = str(math.ceil(RETRY_AFTER_S))
        return headers


def as_json(content: Any) -> bytes:
    """Returns JSON in plain ASCII: a judge's text may contain anything, even lone surrogates."""
    return json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


def overloaded(what: str) -> Refusal:
    """Returns a 429: too many requests at once."""
    return Refusal(
        429, "overloaded", f"{what}; nothing was judged", f"send the same request again after {RETRY_AFTER_S:.0f} s"
    )


async def send_json(send: Send, status: int, content: Any, headers: Mapping[str, str] | None = None) -> None:
    """Sends a complete answer."""
    body = as_json(content)
    all_headers = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    pairs = [(name.encode(), value.encode()) for name, value in all_headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


class AsciiJSON(JSONResponse):
    """JSON response whose bytes are ASCII whatever a model wrote."""

    def render(self, content: Any) -> bytes:
        return as_json(content)
