"""What stands before every route: who calls, under which name, how much and how slowly. Pure ASGI, knows no judge."""

import asyncio
import hashlib
import hmac
import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlvlm.gateway.config import HttpConfig
from rlvlm.serving.refusal import Refusal, overloaded, send_json, send_refusal

MAX_DEPTH = 32
"""Deepest nesting of a JSON body."""
MAX_MARKS = 20_000
"""Most brackets, quotes or commas in a JSON body: what they make costs far more memory than their byte."""
OPEN_PATH = "/health"
"""Answered without a token, and then says only that somebody listens."""
_HOST = re.compile(rb"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::\d{1,5})?")
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]', re.DOTALL)


class Guard:
    """Lets a request through to `app` once its token, host and body are in order.

    The token is compared in constant time before a byte of the body is asked for. The body is then read whole, within
    a length and a deadline, so the app behind never waits for a caller.
    """

    def __init__(self, app: ASGIApp, token: bytes, config: HttpConfig) -> None:
        """Stores the app and the limits; of the token only its digest is kept."""
        self._app = app
        self._digest = hashlib.sha256(token).digest()
        self._config = config
        self._hosts = frozenset(host.lower() for host in config.hosts)
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection of the ASGI protocol; a websocket is closed."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(self)
        try:
            is_known = self._has_token(scope)
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if not is_known and not (path == OPEN_PATH and scope["method"] in ("GET", "HEAD")):
                raise Refusal(
                    401,
                    "token",
                    "this server answers callers with its bearer token only",
                    "send the header `Authorization: Bearer TOKEN`; the server printed where its token is",
                )
            self._check_host(scope)
            if not is_known:
                await send_json(send, 200, {"status": "ok"})
                return
            await self._read(scope, receive, body)
            body.close()
            check_shape(body.data)
        except Refusal as refusal:
            body.release()
            await send_refusal(send, refusal)
            return
        except _Gone:
            body.release()
            return
        try:
            await self._app(scope, body.replay(receive), send)
        finally:
            body.release()

    def _has_token(self, scope: Scope) -> bool:
        given = _header(scope, b"authorization")
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        matches = hmac.compare_digest(hashlib.sha256(token.strip()).digest(), self._digest)
        return scheme.lower() == b"bearer" and matches

    def _check_host(self, scope: Scope) -> None:
        """Refuses a name, compared without port and in lower case, that the server does not go by."""
        given = _header(scope, b"host")
        found = _HOST.fullmatch(given[0].strip().lower()) if len(given) == 1 else None
        if not found or (found[1] or found[2]).decode() not in self._hosts:
            raise Refusal(
                400,
                "host",
                "the Host header is missing or names no host that this server goes by",
                "call it by the address it printed, or add the name with --allowed-hosts",
            )

    async def _read(self, scope: Scope, receive: Receive, body: "_Body") -> None:
        """Reads the whole body into `body`.

        Raises:
            Refusal: too long, too slow, encoded, of another type than JSON, or all bodies together are too much.
            _Gone: the caller left.
        """
        self._check_promises(scope)
        try:
            async with asyncio.timeout(self._config.body_deadline_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    body.add(message.get("body", b""))
                    if not message.get("more_body", False):
                        return
        except TimeoutError:
            raise Refusal(
                408,
                "slow_body",
                f"the body did not arrive within {self._config.body_deadline_s:g} s",
                "send it in one piece, or fewer images at once",
            ) from None

    def _check_promises(self, scope: Scope) -> None:
        """Refuses by the headers alone what would be refused later anyway."""
        for encoding in _header(scope, b"content-encoding"):
            if encoding.strip().lower() != b"identity":
                raise Refusal(415, "encoding", "compressed bodies are not read", "send the JSON as it is")
        lengths = _header(scope, b"content-length")
        if any(not length.isdigit() for length in lengths) or len(set(lengths)) > 1:
            raise Refusal(400, "length", "the Content-Length header is no number", "let your HTTP client set it")
        if lengths and int(lengths[0][:20]) > self._config.body_bytes:
            raise self.too_long()
        has_body = lengths not in ([], [b"0"]) or bool(_header(scope, b"transfer-encoding"))
        kinds = [kind.partition(b";")[0].strip().lower() for kind in _header(scope, b"content-type")]
        if has_body and kinds != [b"application/json"]:
            raise Refusal(
                415, "content_type", "only JSON bodies are read", "send the header `Content-Type: application/json`"
            )

    def too_long(self) -> Refusal:
        """413, whether promised or found out."""
        return Refusal(
            413,
            "body",
            f"a body has at most {self._config.body_bytes:,} bytes",
            "send fewer or smaller images, or split the batch",
        )

    def hold(self, num_bytes: int) -> None:
        """Counts bytes that a request holds (negative: no longer).

        Raises:
            Refusal: all requests together would hold too much.
        """
        if num_bytes > 0 and self._held_bytes + num_bytes > self._config.held_bytes:
            raise overloaded("too many large requests at once")
        self._held_bytes += num_bytes

    @property
    def body_bytes(self) -> int:
        """Longest body, in bytes."""
        return self._config.body_bytes


class _Gone(Exception):  # noqa: N818 - not an error
    """The caller left before the body was there."""


class _Body:
    """One request's body, counted against its guard while it is held."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self.data = b""

    def add(self, piece: bytes) -> None:
        """Takes in a piece, if there is room for it."""
        if self._num_bytes + len(piece) > self._guard.body_bytes:
            raise self._guard.too_long()
        self._guard.hold(len(piece))
        self._num_bytes += len(piece)
        self._pieces.append(piece)

    def close(self) -> None:
        """Joins the pieces: the body is there."""
        self.data = b"".join(self._pieces)
        self._pieces = []

    def replay(self, receive: Receive) -> Receive:
        """A `receive` that gives the whole body at once, then whatever the caller does next."""
        pending: list[Message] = [{"type": "http.request", "body": self.data, "more_body": False}]

        async def next_message() -> Message:
            return pending.pop() if pending else await receive()

        return next_message

    def release(self) -> None:
        """Gives the room back."""
        self._guard.hold(-self._num_bytes)
        self._num_bytes, self._pieces, self.data = 0, [], b""


def check_shape(body: bytes) -> None:
    """Refuses JSON that is nested too deep or made of marks, before a parser sees it.

    Raises:
        Refusal: 422.
    """
    counts = {mark: _count(body, mark) for mark in (b"[", b"{", b'"', b",")}
    if max(counts.values()) > MAX_MARKS:
        raise Refusal(
            422, "shape", f"a body has at most {MAX_MARKS:,} brackets, quotes or commas", "send fewer items at once"
        )
    if counts[b"["] + counts[b"{"] <= MAX_DEPTH:
        return
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(body):
        first = match[0][:1]
        depth += (first in b"[{") - (first in b"]}")
        if depth > MAX_DEPTH:
            raise Refusal(422, "shape", f"a body is nested at most {MAX_DEPTH} deep", "flatten it")


def _count(body: bytes, mark: bytes) -> int:
    """How often `mark` occurs, at most one more than allowed; over images in base64 five times as fast as `count`."""
    at = body.find(mark)
    number = 0
    while at >= 0 and number <= MAX_MARKS:
        number += 1
        at = body.find(mark, at + 1)
    return number


def _header(scope: Scope, name: bytes) -> list[bytes]:
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    return [value for key, value in headers if key.lower() == name]
