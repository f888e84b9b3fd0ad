"""Error answers: one exception, one body, `{"error": {"code", "message", "fix"}}`."""

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Send

logger = logging.getLogger(__name__)

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
        return {"error": {"code": self.code, "message": str(self), "fix": self.fix}}

    @property
    def headers(self) -> dict[str, str]:
        """Returns the answer's headers, besides length and type."""
        headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        if self.status == 401:
            headers["www-authenticate"] = 'Bearer realm="rlvlm"'
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


def answer_errors(app: FastAPI) -> None:
    """Gives every error the same form, without anything that the caller must not learn."""

    @app.exception_handler(Refusal)
    async def refused(_: Request, refusal: Refusal) -> Response:
        return AsciiJSON(refusal.body, refusal.status, refusal.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        # a body that is not JSON is the fault of the caller's library, a field that breaks a rule the caller's
        is_json = not any(problem["type"] == "json_invalid" for problem in error.errors())
        found = error.errors()[:5]
        places = [".".join(str(part)[:40] for part in problem["loc"][1:]) or "body" for problem in found]
        # only places and rules: pydantic's errors also contain the input, which may be a key
        problems = [f"{place}: {problem['msg']}" for place, problem in zip(places, found, strict=True)]
        refusal = Refusal(
            422 if is_json else 400,
            "field" if is_json else "json",
            "; ".join(problems)[:1_000],
            "the fields and their limits are at /docs",
        )
        return await refused(request, refusal)

    @app.exception_handler(HTTPException)
    async def not_served(_: Request, error: HTTPException) -> Response:
        # 400 is FastAPI's answer to unparsable bodies: bytes that are not UTF-8, a number of ten thousand digits
        code = {400: "json", 404: "route", 405: "method"}.get(error.status_code, "request")
        refusal = Refusal(error.status_code, code, str(error.detail), "the routes are at /docs")
        return AsciiJSON(refusal.body, refusal.status, dict(error.headers or {}) | refusal.headers)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        # only its class: the message may contain the caller's input, and logs are read by others
        logger.error("a request broke the gateway: %s", type(error).__name__)
        refusal = Refusal(500, "internal", "the gateway broke on this request", "please report it with the request")
        return AsciiJSON(refusal.body, refusal.status, refusal.headers)
