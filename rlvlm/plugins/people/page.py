"""The page on which people answer a label store's questions: for `rlvlm labels ask`, and to benchmark a person.

One server per store, in a thread. The HTTP server's `Guard` checks callers, host names and limits; the code before it
turns a browser's cookie into the bearer token that the guard expects, and refuses other sites. All state is on disk,
except which page shows which question at the moment.
"""

import asyncio
import contextlib
import math
import random
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlvlm.core.disk import held
from rlvlm.core.errors import MachineError
from rlvlm.core.foreign import parse_json
from rlvlm.judges.config import JudgeConfig
from rlvlm.labels.images import MissingImage
from rlvlm.labels.store import LabelStore
from rlvlm.plugins.people.config import PageConfig
from rlvlm.plugins.people.judge import HumanJudge
from rlvlm.plugins.people.queue import (
    UNDO_S,
    Asked,
    PeopleQueue,
    Said,
    check_name,
    is_given,
    is_swapped,
    new_ticket,
    swap_choice,
)
from rlvlm.serving.config import LOOPBACK_NAMES, HttpConfig
from rlvlm.serving.guard import Guard, make_token, read_token
from rlvlm.templates import render
from rlvlm.vlms.stills import to_png

LEASE_S = 30.0
"""Time for which a question stays reserved for a page that was last heard of, seconds."""
KEEP_EVERY_S = 0.5
LAST_UNDO_S = 3.0
"""Time for which an answer can be taken back if no other question waits, seconds."""
REPEATS = (0.05, 0.1)
"""Minimum and maximum share of a person's pairs that are shown again, swapped."""
REPEAT_AFTER = 8
"""Minimum number of pairs between a pair and its repeat: nearer ones are remembered."""
_FOLDER = Path(__file__).parent
_MAX_BODY_BYTES = 16 * 2**10
_MAX_SECONDS = 10**9  # a page may stay open for years
_COOKIE_S = 30 * 24 * 3_600
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


@dataclass(kw_only=True, slots=True)
class _Lease:
    """A question that one page shows."""

    client: str
    name: str
    until: float
    """End of the lease on the monotonic clock."""


class Desk:
    """Hands questions to people: each question to one person at a time, unless several must answer it.

    Args:
        queue: queue of the store.
        undo_s: how long an answer can be taken back, seconds.
        rng: draws sides and repeats.
        key: signs the tickets of showings, so that an answer to what was not shown is refused.
    """

    def __init__(
        self,
        queue: PeopleQueue,
        undo_s: float = UNDO_S,
        rng: random.Random | None = None,
        key: bytes | None = None,
    ) -> None:
        self.queue = queue
        self._undo_s = undo_s
        self._rng = rng or random.Random()
        self._key = key or secrets.token_bytes(32)
        self._leases: dict[str, list[_Lease]] = {}
        self._lost: set[str] = set()  # questions with missing images

    def keep(self) -> None:
        """Moves answers that can no longer be taken back into the store."""
        self.queue.refresh()
        # a run that waits only for the last answer is not held up for long
        self.queue.keep(self._undo_s if self.queue.waiting() else min(self._undo_s, LAST_UNDO_S))

    def next(self, name: str, client: str) -> dict[str, Any] | None:
        """Returns the next question for the page, as JSON; None if nothing waits for this person."""
        self.queue.refresh()
        now = time.monotonic()
        for key, leases in list(self._leases.items()):
            self._leases[key] = [lease for lease in leases if lease.until > now]
        # after a reload the page shows the same question again
        mine = [key for key, leases in self._leases.items() if any(lease.client == client for lease in leases)]
        candidates = (*(self.queue.asked[key] for key in mine), *self.queue.asked.values())
        free = next((asked for asked in candidates if self._is_free(asked, name, client)), None)
        if repeated := self._repeat(name, is_last=free is None):
            first = repeated.answers[name]
            return self._show(repeated, name, client, is_repeat=True, swapped=not is_swapped(first.ticket))
        return None if free is None else self._show(free, name, client)

    def answer(self, name: str, client: str, said: dict[str, Any]) -> bool:
        """Records an answer from the page and returns whether it counts.

        Raises:
            ValueError: its ticket was not given to this person for this question, or a number is none.
            KeyError, OSError: see `PeopleQueue.add`.
        """
        ticket, seconds, choice = str(said["ticket"]), said["seconds"], said["choice"]
        if not isinstance(seconds, int | float) or abs(seconds) > _MAX_SECONDS:
            raise ValueError(f"seconds is a number up to {_MAX_SECONDS:,}")
        if not is_given(ticket, self._key, str(said["question"]), name):
            raise ValueError("this question was not shown to you under this ticket")
        self.queue.refresh()
        counts = self.queue.add(
            Said(
                question=str(said["question"]),
                ticket=ticket,
                name=name,
                client=client,
                choice=swap_choice(choice) if is_swapped(ticket) else choice,
                seconds=min(max(float(seconds), 0.0), 3_600.0) if math.isfinite(seconds) else 0.0,
                when=time.time(),
            )
        )
        self._release(client)
        return counts

    def undo(self, name: str, client: str) -> dict[str, Any] | None:
        """Takes back the page's last answer and returns its question as shown; None if it is too late."""
        self.queue.refresh()
        said = self.queue.undo(client)
        if said is None:
            return None
        self._release(client)
        asked = self.queue.asked[said.question]
        return self._show(asked, name, client, is_repeat=said.is_repeat, swapped=is_swapped(said.ticket))

    def state(self, name: str, client: str) -> dict[str, Any]:
        """Returns the progress, as JSON. The request also shows that the page is still open."""
        self.queue.refresh()
        for leases in self._leases.values():
            for lease in leases:
                if lease.client == client:
                    lease.until = time.monotonic() + LEASE_S
        figures = self.queue.figures(name)
        return {
            "name": name,
            "answered": figures.answers,
            "waiting": self.queue.waiting(),
            "median_s": None if math.isnan(figures.median_s) else round(figures.median_s, 1),
            "repeats": figures.repeats,
            "different": figures.different,
            "teaches_little": figures.teaches_little,
            "run": self.queue.askers(),
            "lost": len(self._lost),
        }

    def _repeat(self, name: str, *, is_last: bool) -> Asked | None:
        """Returns a pair that the person answered a while ago, if one is due; `is_last`: nothing else waits."""
        pairs = [
            asked
            for asked in self.queue.asked.values()
            if asked.question.is_pair and not asked.each_order and name in asked.answers
        ]
        pairs.sort(key=lambda asked: asked.answers[name].when)
        again = {id(asked) for asked in pairs if any(s.is_repeat and s.name == name for s in asked.said.values())}
        fresh = [asked for asked in pairs[:-REPEAT_AFTER] if id(asked) not in again]
        low, high = (share * (len(pairs) + len(again)) for share in REPEATS)
        # at random between the two bounds, so that nobody can predict a repeat
        is_drawn = not is_last and len(again) + 1 <= high and self._rng.random() < sum(REPEATS) / 2
        is_due = len(again) < low or is_drawn
        fresh = [asked for asked in fresh if self.queue.store.has_images(asked.question)]
        return self._rng.choice(fresh) if fresh and is_due else None

    def _is_free(self, asked: Asked, name: str, client: str) -> bool:
        if not asked.is_open or name in asked.answers:
            return False
        others = [lease for lease in self._leases.get(asked.question.id, []) if lease.client != client]
        if len(asked.answers) + len(others) >= asked.agreement or any(lease.name == name for lease in others):
            return False
        has_images = self.queue.store.has_images(asked.question)
        (self._lost.discard if has_images else self._lost.add)(asked.question.id)
        return has_images

    def _show(
        self, asked: Asked, name: str, client: str, *, is_repeat: bool = False, swapped: bool | None = None
    ) -> dict[str, Any]:
        self._release(client)
        question = asked.question
        ticket = new_ticket(self._key, question.id, name, is_repeat=is_repeat, swapped=swapped)
        lease = _Lease(client=client, name=name, until=time.monotonic() + LEASE_S)
        self._leases.setdefault(question.id, []).append(lease)
        sides = [question.left, question.right] if question.is_pair else [question.left]
        return {
            "question": question.id,
            "ticket": ticket,
            "kind": question.kind,
            "goal": question.goal,
            "action": question.action,
            "sides": sides[::-1] if is_swapped(ticket) else sides,
            "goal_image": question.goal_picture,
        }

    def _release(self, client: str) -> None:
        for key, leases in self._leases.items():
            self._leases[key] = [lease for lease in leases if lease.client != client]


class Door:
    """Admits browsers to `app`: refuses other sites, and turns a link's token or a cookie into a bearer token.

    All other checks are done by the `Guard` behind it; its refusal of a missing token becomes a page with
    instructions.
    """

    def __init__(self, app: ASGIApp, token: bytes, hosts: tuple[str, ...]) -> None:
        limits = HttpConfig(hosts=hosts, body_bytes=_MAX_BODY_BYTES, held_bytes=64 * _MAX_BODY_BYTES)
        self._guard = Guard(app, token, limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._guard(scope, receive, send)
            return
        request = Request(scope)
        if _is_cross_site(request):
            await _denied("another site sent this request")(scope, receive, send)
            return
        token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0] if scope["path"] == "/" else ""
        token = token or request.cookies.get(_cookie(scope), "")
        if token:  # the guard treats two headers as none
            kept = [(key, value) for key, value in scope["headers"] if key != b"authorization"]
            scope = {**scope, "headers": [*kept, (b"authorization", b"Bearer " + token.encode("latin-1", "replace"))]}
        is_denied = False

        async def explain(message: Message) -> None:
            nonlocal is_denied
            if message["type"] == "http.response.start" and message["status"] == 401:
                is_denied = True
                await _denied("it was opened without its link")(scope, receive, send)
            elif not is_denied:
                await send(message)

        await self._guard(scope, receive, explain)


def _is_cross_site(request: Request) -> bool:
    """Returns whether a request comes from a page of another origin: browsers send headers for it, scripts do not.

    The scheme of the origin is not compared: behind a proxy that ends TLS it is the proxy's.
    """
    if site := request.headers.get(
        "sec-fetch-site"
    ):  # by browsers to encrypted and local addresses; no page can set it
        return site not in ("none", "same-origin")
    origin = request.headers.get("origin")
    return origin is not None and origin.partition("://")[2].lower() != request.headers.get("host", "").lower()


def _denied(reason: str) -> Response:
    return HTMLResponse(
        render(_FOLDER / "label_denied.html.j2", reason=reason), 403, {**_HEADERS, "connection": "close"}
    )


def _cookie(scope: Scope, name: str = "token") -> str:
    """Returns a cookie's name, made unique because browsers share cookies between all ports of a machine."""
    return f"rlvlm_ask_{name}_{(scope.get('server') or ('', 0))[1]}"


class _Routes:
    """The endpoints, one per method. They share one event loop and never await midway, so none interrupts another."""

    def __init__(self, desk: Desk, people: tuple[str, ...]) -> None:
        self._desk = desk
        self._people = people

    async def page(self, request: Request) -> Response:
        """Returns the page; a link with a token becomes cookies and an address without the token."""
        if "token" in request.query_params:
            response: Response = RedirectResponse("/", 303, _HEADERS)
            safe: dict[str, Any] = {"max_age": _COOKIE_S, "httponly": True, "samesite": "strict"}
            response.set_cookie(_cookie(request.scope), request.query_params["token"], **safe)
            name = request.query_params.get("name", self._people[0])
            try:
                response.set_cookie(_cookie(request.scope, "name"), check_name(name), **safe)
            except ValueError as error:
                return _denied(str(error))
            return response
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src 'self'; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        body = render(_FOLDER / "label_page.html.j2", nonce=nonce, person=self._name(request))
        return HTMLResponse(body, headers={**_HEADERS, "content-security-policy": policy})

    async def next(self, request: Request) -> Response:
        name, client, _ = await self._read(request)
        return self._reply(self._desk.next(name, client), name, client)

    async def answer(self, request: Request) -> Response:
        """Records an answer, on disk before the next question is shown."""
        name, client, body = await self._read(request)
        try:
            counts = self._desk.answer(name, client, body)
        except (KeyError, TypeError, ValueError) as error:
            return JSONResponse({"error": f"{type(error).__name__}: {error}"[:300]}, 422, _HEADERS)
        return self._reply(self._desk.next(name, client), name, client, counts=counts)

    async def undo(self, request: Request) -> Response:
        name, client, _ = await self._read(request)
        shown = self._desk.undo(name, client)
        undone = shown is not None
        return self._reply(shown or self._desk.next(name, client), name, client, undone=undone)

    async def state(self, request: Request) -> Response:
        name, client, _ = await self._read(request)
        return JSONResponse(self._desk.state(name, client), headers=_HEADERS)

    async def image(self, request: Request) -> Response:
        try:
            data = to_png(self._desk.queue.store.image(request.path_params["digest"]))
        except MissingImage:
            return Response("there is no such image", 404, _HEADERS)
        # named by its content, so it never changes
        return Response(data, 200, {**_HEADERS, "cache-control": "private, max-age=86400, immutable"}, "image/png")

    def _reply(self, shown: dict[str, Any] | None, name: str, client: str, **facts: bool) -> Response:
        return JSONResponse({"shown": shown, "state": self._desk.state(name, client), **facts}, headers=_HEADERS)

    def _name(self, request: Request) -> str:
        name = request.cookies.get(_cookie(request.scope, "name"), self._people[0])
        try:
            return check_name(name)
        except ValueError:
            return self._people[0]

    async def _read(self, request: Request) -> tuple[str, str, dict[str, Any]]:
        """Returns name, page and JSON body of a request."""
        try:
            body = parse_json(await request.body())
        except ValueError:
            body = {}
        body = body if isinstance(body, dict) else {}
        return self._name(request), str(body.get("client", ""))[:64], body


def make_app(desk: Desk, token: bytes, config: PageConfig) -> ASGIApp:
    """Returns the page as an ASGI app with all its checks."""

    async def keep_answers() -> None:
        while True:
            await asyncio.sleep(KEEP_EVERY_S)
            with contextlib.suppress(OSError):  # with a full disk the answers are still safe, and it is tried again
                desk.keep()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(keep_answers())
        try:
            yield
        finally:
            task.cancel()

    routes = _Routes(desk, config.people)
    app = Starlette(
        routes=[
            Route("/", routes.page),
            Route("/next", routes.next, methods=["POST"]),
            Route("/answer", routes.answer, methods=["POST"]),
            Route("/undo", routes.undo, methods=["POST"]),
            Route("/state", routes.state, methods=["POST"]),
            Route("/image/{digest}", routes.image),
        ],
        lifespan=lifespan,
    )
    return Door(app, token, (*LOOPBACK_NAMES, *config.allowed_hosts))


@contextmanager
def label_page(
    store: LabelStore, config: PageConfig, log: Callable[[str], None], undo_s: float = UNDO_S
) -> Iterator[None]:
    """Serves the page of a store in a thread while the context is open.

    Args:
        store: store of questions and answers.
        config: address, and people.
        log: receives a line with the link of each person.
        undo_s: how long an answer can be taken back, seconds.

    Raises:
        UsageError: another page of this store is open.
        MachineError: no port is free, or the token's file cannot be used.
    """
    # tickets are signed by another secret, as people have the token
    token, key = (
        _secret(path) for path in (config.token_path, config.token_path.with_name(f"{config.token_path.name}_key"))
    )
    store.mark()
    queue = PeopleQueue(store)
    queue.folder.mkdir(parents=True, exist_ok=True)
    what = f"a page of {store.folder} is open already"
    with (
        held(queue.folder / "page.lock", what, "answer there; it prints a link for each of --people"),
        _listen(config) as listener,
    ):
        queue.refresh()
        queue.keep(undo_s=0)  # left by a page that was killed
        desk = Desk(queue, undo_s, key=key)
        server = uvicorn.Server(
            uvicorn.Config(
                make_app(desk, token, config),
                log_level="error",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="label-page", daemon=True)
        thread.start()
        while not server.started and thread.is_alive():  # a printed link must work at once
            time.sleep(0.01)
        host, port = (config.allowed_hosts or (config.host,))[0], listener.getsockname()[1]
        for name in config.people:
            query = urlencode({"token": token.decode(), "name": name})
            log(f"{name} answers at http://{f'[{host}]' if ':' in host else host}:{port}/?{query}")
        try:
            yield
        finally:
            server.should_exit = True
            thread.join(timeout=5)
            queue.refresh()
            queue.keep(undo_s=0)


def _secret(path: Path) -> bytes:
    """Returns the secret in a file, which is made if it is missing; raises as `read_token` does."""
    make_token(path)
    return read_token(path)


@contextmanager
def person_judge(
    config: JudgeConfig,
    store: LabelStore,
    is_stopped: Callable[[], bool],
    log: Callable[[str], None],
    *,
    each_order: bool = False,
    page: PageConfig | None = None,
) -> Iterator[HumanJudge]:
    """Yields a person as a judge, with the page in this process, for commands that wait for the answers.

    Args:
        config: settings of the judge.
        store: store of questions and answers.
        is_stopped: polled while waiting, see `HumanJudge`.
        log: receives lines for the user.
        each_order: see `HumanJudge`.
        page: address of the page, and people.

    Raises:
        UsageError, MachineError: see `label_page`.
    """
    with label_page(store, page or PageConfig(), log):
        log("it waits for answers; Ctrl-C stops, and the same command goes on from there")
        yield HumanJudge(config, store, each_order=each_order, is_stopped=is_stopped)


def _listen(config: PageConfig) -> socket.socket:
    """Returns a socket on the configured port, or on the next free one.

    Raises:
        MachineError: none of twenty ports is free, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    reason = ""
    for port in range(config.port, config.port + 20) if config.port else (0,):
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host, port))
            return listener
        except OSError as error:
            listener.close()
            reason = error.strerror or str(error)
    raise MachineError(f"the page cannot listen at {config.host}:{config.port}: {reason}", "name another: --port PORT")
