"""What stands before every route: who calls, under which name, how much and how slowly. Pure ASGI, knows no judge.

FastAPI and Serve read a body before anything of ours runs, of any length and for any time; `tests/attacks` and
`tests/serving/test_guard.py` fail without this. The bearer token lies in a file that only its owner can read.
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
"""Most brackets, quotes or commas in a JSON body: what they make costs far more memory than their byte."""
MIN_TOKEN_CHARS = 32
_QUICK = 0.25
"""Share of its deadline within which a body comes to a server that is not busy."""
_STOOD_STILL = 1.25
"""A deadline that fires after this many times its length says that the event loop itself was held up."""
_MANY = 16
"""More bodies than this under way are a crowd."""
_HEALTH, _DOCS = "/health", "/docs"
"""Answered without a token: the first says only that a server listens, the second shows no more than these files."""
_TOKEN = re.compile(rb"[A-Za-z0-9._~+/=-]+")
_HOST = re.compile(rb"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::\d{1,5})?")


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
        self._num_reading = 0
        self._last_quick = self._last_slow = -math.inf
        """When a body was last read at once, and when one last took long, on the clock of the event loop."""

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
            # the body may be unread: a connection that was kept would take it for the next request
            await send_json(send, refusal.status, refusal.body, {"connection": "close", **refusal.headers})
            return
        except ClientDisconnect:
            return
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        try:
            await self._app(scope, replay, send)
        finally:  # held until the answer is out: the app keeps the decoded images as long
            self._held_bytes -= len(body)

    def _has_token(self, scope: Scope) -> bool:
        # two headers are none: proxies differ in which of them counts
        given = _header(scope, b"authorization")
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        # digests have one length and are compared in constant time, so neither length nor prefix leaks
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

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body, counted among the held bytes.

        Raises:
            Refusal: too long, too slow, encoded, of another type than JSON, or all bodies together are too much.
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
                    # counted while they arrive: many large bodies at once would take the
                    # machine's memory long before their ends
                    if self._held_bytes + len(piece) > self._config.held_bytes:
                        raise overloaded("too many large requests at once")
                    self._held_bytes += len(piece)
                    num_bytes += len(piece)
                    pieces.append(piece)
                    is_whole = not message.get("more_body", False)
            now = asyncio.get_running_loop().time()
            if now - begun >= self._config.body_deadline_s * _QUICK:
                self._last_slow = now
            elif num_bytes:  # a request without a body is read at once however busy the proxy in front is
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
        """Whose fault a late body is: the server's where others take long too, where many wait and none is read, or
        where this very deadline comes late.
        """
        now, deadline_s = asyncio.get_running_loop().time(), self._config.body_deadline_s
        is_crowded = self._num_reading > _MANY and self._last_quick < begun
        if self._last_slow > begun or is_crowded or now - begun > deadline_s * _STOOD_STILL:
            self._last_slow = now  # a crowd runs out of time one by one, and its last few are no slower
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
        # two lengths that differ are how requests are smuggled past a proxy
        if any(not length.isdigit() for length in lengths) or len(set(lengths)) > 1:
            raise Refusal(400, "length", "the Content-Length header is no number", "let your HTTP client set it")
        is_chunked = bool(_header(scope, b"transfer-encoding"))
        if lengths and is_chunked:  # a proxy before us may go by the one where we go by the other
            raise Refusal(400, "length", "a body has a Content-Length or comes in chunks, not both", "send one of them")
        # cut first: Python takes seconds to read a number of a million digits
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
    """Refuses JSON that is made of marks, before a parser sees it; how deep they nest, the parser bounds.

    Raises:
        Refusal: 422.
    """
    for mark in (b"[", b"{", b'"', b","):
        at = body.find(mark)
        number = 0
        while at >= 0:  # over images in base64 five times as fast as `count`
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
    """Writes a random token to `path`, mode 0600, unless the file is there; returns whether it was made now.

    Raises:
        MachineError: the file cannot be written.
    """
    if os.path.lexists(path):
        return False
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # written under another name and linked, so that no reader ever meets half a token
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as stream:
            stream.write(secrets.token_urlsafe(32) + "\n")
        try:
            os.link(draft, path)  # fails where another process was faster: its token counts
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
    """The token in `path`, without its line end.

    Raises:
        MachineError: the file is missing or no regular file, another user could read or write it, or what it holds is
            no token. The message never quotes what it holds.
    """
    another = "name another: --token-file FILE"
    try:
        # not through a link, and not waiting for who writes into a pipe
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise MachineError(f"the token file {path} cannot be read: {error.strerror}", another) from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise MachineError(f"the token file {path} is no regular file", another)
        # asked of the open file, not of its name, which may lead elsewhere by now
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
