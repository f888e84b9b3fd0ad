"""The gateway's routes: questions in, answers out. Everything about callers and sizes was settled by `guard`."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

import rlvlm
from rlvlm.core.judging import Clip, Query
from rlvlm.gateway import messages as wire
from rlvlm.gateway.async_client import AsyncJudge
from rlvlm.gateway.media.images import read_pictures
from rlvlm.gateway.page import docs_page
from rlvlm.judges.prompts import check_goal
from rlvlm.serving.refusal import Refusal, as_json, overloaded

logger = logging.getLogger(__name__)

DECODERS = 2
"""Threads that decode images."""
MAX_WAITING = 64
"""Requests that may wait for them."""
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": wire.ErrorAnswer, "description": text}
    for status, text in {
        400: "malformed, or a video that may not be read",
        401: "no or wrong token",
        408: "body too slow",
        413: "body too long",
        415: "not JSON",
        422: "a field or image breaks a rule",
        429: "overloaded; Retry-After",
        503: "the judge does not answer",
        504: "the judge took too long",
    }.items()
}

Result = TypeVar("Result")


class AsciiJSON(JSONResponse):
    """JSON whose bytes are ASCII whatever a model wrote."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return as_json(content)


class FastRequest(Request):
    """A request whose JSON is read by pydantic's parser: a body of images takes a quarter of the time."""

    async def json(self) -> Any:
        """The body; raises ValueError where it is no JSON."""
        return from_json(await self.body(), allow_inf_nan=False)


class FastRoute(APIRoute):
    """A route that reads its body with `FastRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler that FastAPI calls."""
        handle = super().get_route_handler()

        async def handle_fast(request: Request) -> Response:
            return await handle(FastRequest(request.scope, request.receive))

        return handle_fast


Ready = Callable[[], Awaitable[Collection[str]]]
"""Names the apps that answer now."""


class RequestHandler:
    """Where requests become questions: finds the judge, and reads images in a bounded pool of threads.

    Args:
        clients: the judges, the default first.
        ready: names those of them that answer now; None takes all for ready.
    """

    def __init__(self, clients: Mapping[str, AsyncJudge], ready: Ready | None = None) -> None:
        self._clients = clients
        self._ready = ready
        self._pool = ThreadPoolExecutor(DECODERS, thread_name_prefix="pictures")
        self._waiting = 0

    @property
    def names(self) -> list[str]:
        """Names of the judges, the default first."""
        return list(self._clients)

    async def loaded(self) -> list[str]:
        """Names of the judges that answer now, the default first."""
        ready = self.names if self._ready is None else await self._ready()
        return [name for name in self.names if name in ready]

    def client(self, name: str | None) -> tuple[str, AsyncJudge]:
        """The judge that a request names, by default the first.

        Raises:
            Refusal: there is none of that name.
        """
        chosen = self.names[0] if name is None else name
        if chosen not in self._clients:
            raise Refusal(422, "backend", f"there is no judge {chosen!r} here", f"use one of {self.names}, or none")
        return chosen, self._clients[chosen]

    async def run(self, work: Callable[..., Result], *args: Any) -> Result:
        """Runs decoding work in the pool.

        Raises:
            Refusal: too much is waiting already.
        """
        if self._waiting >= MAX_WAITING:
            raise overloaded("too many images are waiting to be decoded")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)
        finally:
            self._waiting -= 1


def build_app(handler: RequestHandler) -> FastAPI:
    """The app behind the guard, with the `/v1` routes, health and the pages about itself."""
    app = FastAPI(
        title="rlvlm judge",
        version=rlvlm.__version__,
        default_response_class=AsciiJSON,
        responses=ERRORS,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
    )

    app.router.route_class = FastRoute
    if handler.names:
        _add_judge_routes(app, handler)

    @app.get("/health")
    async def health() -> wire.HealthAnswer:
        """Whether the gateway listens; with a token also which judges it knows, and whether they answer."""
        first, loaded = handler.names[0] if handler.names else None, await handler.loaded()
        waiting = [name for name in handler.names if name not in loaded]
        return wire.HealthAnswer(status="ok", default_backend=first, loaded_backends=loaded, deploying_backends=waiting)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """The routes on one page that loads nothing from anywhere."""
        return HTMLResponse(
            docs_page(app.openapi()),
            headers={"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"},
        )

    _answer_errors(app)
    return app


def _add_judge_routes(app: FastAPI, handler: RequestHandler) -> None:
    @app.post("/v1/preference")
    async def preference(request: wire.PreferenceRequest) -> wire.PreferenceAnswer:
        """Which of two clips is nearer to the goal."""
        return (await _compare(handler, [request], request.backend))[0]

    @app.post("/v1/preference/batch")
    async def preference_batch(request: wire.PreferenceBatchRequest) -> wire.PreferenceBatchAnswer:
        """Several comparisons at once."""
        return wire.PreferenceBatchAnswer(answers=await _compare(handler, request.queries, request.backend))

    @app.post("/v1/score")
    async def score(request: wire.ScoreRequest) -> wire.ScoreAnswer:
        """How much of the goal is reached at the end of a clip."""
        return (await _score(handler, [request], request.backend))[0]

    @app.post("/v1/score/batch")
    async def score_batch(request: wire.ScoreBatchRequest) -> wire.ScoreBatchAnswer:
        """Several clips at once."""
        return wire.ScoreBatchAnswer(answers=await _score(handler, request.clips, request.backend))


async def _compare(
    handler: RequestHandler, questions: Sequence[wire.PreferenceQuestion], backend: str | None
) -> list[wire.PreferenceAnswer]:
    _, client = handler.client(backend)
    goals = [goal_of(question.goal) for question in questions]
    sides = await handler.run(read_pictures, [group for q in questions for group in (q.left, q.right, _extra(q))])
    queries = [
        Query(goal=goal, left=left, right=right, goal_picture=extra if len(extra) else None)
        for goal, left, right, extra in zip(goals, sides[::3], sides[1::3], sides[2::3], strict=True)
    ]
    return [wire.preference_answer(verdict) for verdict in await client.compare(queries)]


async def _score(
    handler: RequestHandler, questions: Sequence[wire.ScoreQuestion], backend: str | None
) -> list[wire.ScoreAnswer]:
    _, client = handler.client(backend)
    goals = [goal_of(question.goal) for question in questions]
    read = await handler.run(read_pictures, [group for q in questions for group in (q.frames, _extra(q))])
    clips = [
        Clip(goal=goal, frames=frames, goal_picture=extra if len(extra) else None)
        for goal, frames, extra in zip(goals, read[::2], read[1::2], strict=True)
    ]
    return [wire.score_answer(score) for score in await client.score(clips)]


def goal_of(text: str) -> str:
    """The goal, once it is plain words.

    Raises:
        Refusal: it could end a turn of the chat, or is no line of words.
    """
    try:
        return check_goal(text)
    except ValueError as error:
        raise Refusal(422, "goal", str(error), "say the goal in a few plain words") from None


def _extra(question: wire.PreferenceQuestion | wire.ScoreQuestion) -> list[str]:
    return [] if question.goal_picture is None else [question.goal_picture]


def _answer_errors(app: FastAPI) -> None:
    """Gives every error the one form, and lets none say more than the caller may know."""

    @app.exception_handler(Refusal)
    async def refused(_: Request, refusal: Refusal) -> Response:
        return AsciiJSON(refusal.body, refusal.status, refusal.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        is_json = not any(problem["type"] == "json_invalid" for problem in error.errors())
        found = error.errors()[:5]
        places = [".".join(str(part)[:40] for part in problem["loc"][1:]) or "body" for problem in found]
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
        code = {404: "route", 405: "method"}.get(error.status_code, "request")
        refusal = Refusal(error.status_code, code, str(error.detail), "the routes are at /docs")
        return AsciiJSON(refusal.body, refusal.status, dict(error.headers or {}) | refusal.headers)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        logger.error("a request broke the gateway: %s", type(error).__name__)
        refusal = Refusal(500, "internal", "the gateway broke on this request", "please report it with the request")
        return AsciiJSON(refusal.body, refusal.status, refusal.headers)
