"""Checks before every route: token, host name, size and speed of requests. Pure ASGI, independent of judges.

FastAPI and Serve read bodies of any length for any time before our code runs; `tests/attacks` and
`tests/serving/test_guard.py` fail without this. The bearer token is in a file that only its owner can read.
"""

import asyncio
import hashlib
import hmac
import math
import os
import re
import secrets
import stat
from pathlib import Path

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlvlm.core.errors import MachineError
from rlvlm.serving.config import HttpConfig
from rlvlm.serving.refusal import Refusal, overloaded, send_json

MAX_MARKS = 20_000
"""Maximum number of brackets, quotes or commas in a JSON body: they cost far more memory than their byte."""
MIN_TOKEN_CHARS = 32
_QUICK = 0.25
"""Share of the deadline within which a body normally arrives at an idle server."""
_STOOD_STILL = 1.25
"""Ratio to its nominal time at which a late deadline shows that the event loop itself was blocked."""
_MANY = 16
"""Number of concurrent bodies above which the server counts as crowded."""
_HEALTH, _DOCS = "/health", "/docs"
"""Routes without a token: the first only says that a server listens, the second shows no more than these files."""
_TOKEN = re.compile(rb"[A-Za-z0-9._~+/=-]+")
_HOST = re.compile(rb"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::\d{1,5})?")


class Guard:
    """Passes a request on to `app` once its token, host and body are valid.

    The token is compared in constant time before a byte of the body is read. The body is then read whole, within a
    length and a deadline, so the app behind never waits for a caller.
    """

    def __init__(self, app: ASGIApp, token: bytes, config: HttpConfig) -> None:
        """Stores the app and the limits; keeps only a digest of the token."""
        self._app = app
        self._digest = hashlib.sha256(token).digest()
        self._config = config
        self._hosts = frozenset(host.lower() for host in config.hosts)
        self._held_bytes = 0
        self._num_reading = 0
        self._last_quick = self._last_slow = -math.inf
        """Times at which a body last arrived fast, and slowly, on the clock of the event loop."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection of the ASGI protocol; a websocket is closed."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            is_known, is_read_only = self._has_token(scope), scope["method"] in ("GET", "HEAD")
            if not is_known and not (is_read_only and path in (_HEALTH, _DOCS)):
                raise Refusal(
                    401,
                    "token",
                    "this server answers callers with its bearer token only",
                    "send the header `Authorization: Bearer TOKEN`; the server printed where its token is",
                )
            self._check_host(scope)
            if not is_known and path == _HEALTH:
                await send_json(send, 200, {"status": "ok"})
                return
            body = await self._read(scope, receive) if is_known else b""
        except Refusal as refusal:
            # the body may be unread, and a kept connection would parse it as the next request
            await send_json(send, refusal.status, refusal.body, {"connection": "close", **refusal.headers})
            return
        except ClientDisconnect:
            return
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        try:
            await self._app(scope, replay, send)
        finally:  # counted until the answer is sent: the app keeps the decoded images as long
            self._held_bytes -= len(body)

    def _has_token(self, scope: Scope) -> bool:
        # two headers count as none, because proxies differ in which one they use
        given = _header(scope, b"authorization")
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        # digests have equal length and are compared in constant time, so neither length nor prefix leaks
        matches = hmac.compare_digest(hashlib.sha256(token.strip()).digest(), self._digest)
        return scheme.lower() == b"bearer" and matches

    def _check_host(self, scope: Scope) -> None:
        """Refuses a host, compared without port and in lower case, that is not one of the server's."""
        given = _header(scope, b"host")
        found = _HOST.fullmatch(given[0].strip().lower()) if len(given) == 1 else None
        if not found or (found[1] or found[2]).decode() not in self._hosts:
            raise Refusal(
                400,
                "host",
                "the Host header is missing or names no host that this server goes by",
                "call it by the address it printed, or add the name with --allowed-hosts",
            )

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """Reads the whole body and counts it among the held bytes.

        Raises:
            Refusal: too long, too slow, encoded, not JSON, or all held bodies together are too large.
            ClientDisconnect: the caller left.
        """
        self._check_headers(scope)
        pieces: list[bytes] = []
        num_bytes = 0
        begun = asyncio.get_running_loop().time()
        self._num_reading += 1
        try:
            async with asyncio.timeout(self._config.body_deadline_s):
                is_whole = False
                while not is_whole:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    piece = message.get("body", b"")
                    if num_bytes + len(piece) > self._config.body_bytes:
                        raise self._too_long()
                    # counted while they arrive: many large bodies at once would exhaust the machine's memory long
                    # before their ends
                    if self._held_bytes + len(piece) > self._config.held_bytes:
                        raise overloaded("too many large requests at once")
                    self._held_bytes += len(piece)
                    num_bytes += len(piece)
                    pieces.append(piece)
                    is_whole = not message.get("more_body", False)
            now = asyncio.get_running_loop().time()
            if now - begun >= self._config.body_deadline_s * _QUICK:
                self._last_slow = now
            elif num_bytes:  # a request without a body is fast even through a busy proxy
                self._last_quick = now
            body = b"".join(pieces)
            check_marks(body)
        except TimeoutError:
            self._held_bytes -= num_bytes
            raise self._too_late(begun) from None
        except BaseException:
            self._held_bytes -= num_bytes
            raise
        finally:
            self._num_reading -= 1
        return body

    def _too_late(self, begun: float) -> Refusal:
        """Returns the refusal of a late body: the server is to blame if others are slow too, if many wait and none is
        read, or if this deadline itself fires late.
        """
        now, deadline_s = asyncio.get_running_loop().time(), self._config.body_deadline_s
        is_crowded = self._num_reading > _MANY and self._last_quick < begun
        if self._last_slow > begun or is_crowded or now - begun > deadline_s * _STOOD_STILL:
            self._last_slow = now  # crowded requests time out one by one, and the last few are no slower
            return overloaded("this server is too busy to read bodies in time")
        return Refusal(
            408,
            "slow_body",
            f"the body did not arrive within {self._config.body_deadline_s:g} s",
            "send it in one piece, or fewer images at once",
        )

    def _check_headers(self, scope: Scope) -> None:
        """Refuses by the headers alone what would be refused later anyway."""
        for encoding in _header(scope, b"content-encoding"):
            if encoding.strip().lower() != b"identity":
                raise Refusal(415, "encoding", "compressed bodies are not read", "send the JSON as it is")
        lengths = _header(scope, b"content-length")
        # two different lengths are used to smuggle requests past a proxy
        if any(not length.isdigit() for length in lengths) or len(set(lengths)) > 1:
            raise Refusal(400, "length", "the Content-Length header is no number", "let your HTTP client set it")
        is_chunked = bool(_header(scope, b"transfer-encoding"))
        if lengths and is_chunked:  # a proxy before us may use one while we use the other
            raise Refusal(400, "length", "a body has a Content-Length or comes in chunks, not both", "send one of them")
        # cut first: Python takes seconds to parse a number of a million digits
        if lengths and int(lengths[0][:20]) > self._config.body_bytes:
            raise self._too_long()
        has_body = lengths not in ([], [b"0"]) or is_chunked
        kinds = [kind.partition(b";")[0].strip().lower() for kind in _header(scope, b"content-type")]
        if has_body and kinds != [b"application/json"]:
            raise Refusal(
                415, "content_type", "only JSON bodies are read", "send the header `Content-Type: application/json`"
            )

    def _too_long(self) -> Refusal:
        return Refusal(
            413,
            "body",
            f"a body has at most {self._config.body_bytes:,} bytes",
            "send fewer or smaller images, or split the batch",
        )


def check_marks(body: bytes) -> None:
    """Refuses JSON with too many structural characters, before parsing; the parser bounds the nesting.

    Raises:
        Refusal: 422.
    """
    for mark in (b"[", b"{", b'"', b","):
        at = body.find(mark)
        number = 0
        while at >= 0:  # five times as fast as `count` on base64 images
            number += 1
            if number > MAX_MARKS:
                raise Refusal(
                    422,
                    "shape",
                    f"a body has at most {MAX_MARKS:,} brackets, quotes or commas",
                    "send fewer items at once",
                )
            at = body.find(mark, at + 1)


def make_token(path: Path) -> bool:
    """Writes a random token to `path`, mode 0600, unless the file exists; returns whether it was made now.

    Raises:
        MachineError: the file cannot be written.
    """
    if os.path.lexists(path):
        return False
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # written under another name and linked, so that no reader ever sees half a token
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as stream:
            stream.write(secrets.token_urlsafe(32) + "\n")
        try:
            os.link(draft, path)  # fails if another process was faster: then its token counts
        except FileExistsError:
            return False
        finally:
            draft.unlink()
    except OSError as error:
        raise MachineError(
            f"the token file {path} cannot be written: {error.strerror}", "name another place: --token-file FILE"
        ) from error
    return True


def read_token(path: Path) -> bytes:
    """Reads the token in `path`, without its line end.

    Raises:
        MachineError: the file is missing or not a regular file, another user could read or write it, or its content is
            no token. The message never quotes the content.
    """
    another = "name another: --token-file FILE"
    try:
        # does not follow links, and does not wait for a pipe's writer
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise MachineError(f"the token file {path} cannot be read: {error.strerror}", another) from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise MachineError(f"the token file {path} is no regular file", another)
        # checked on the open file, not its name, which may refer to another file by now
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise MachineError(
                f"the token file {path} must be yours alone, its mode is {found.st_mode & 0o777:03o}",
                f"chmod 600 {path}",
            )
        token = os.read(descriptor, 4_097).strip()
    finally:
        os.close(descriptor)
    if not MIN_TOKEN_CHARS <= len(token) <= 4_096 or not _TOKEN.fullmatch(token):
        raise MachineError(
            f"the token file {path} must hold one line of at least {MIN_TOKEN_CHARS} letters and digits",
            f"delete it, and a new one is made: rm {path}",
        )
    return token


def _header(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key.lower() == name]
