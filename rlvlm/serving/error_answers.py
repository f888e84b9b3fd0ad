"""Errors of the HTTP server's routes, each as an answer in the form of `refusal`."""

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from rlvlm.serving.refusal import AsciiJSON, Refusal

logger = logging.getLogger(__name__)


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
