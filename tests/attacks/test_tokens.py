"""No, short or wrong token, on every route and method: 401, and not one byte of the body is asked for."""

import asyncio
import itertools

import pytest
from http_edge import Edge

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW")


@pytest.fixture(scope="module")
def edge(tmp_path_factory):
    return Edge(tmp_path_factory.mktemp("edge"))


def wrong_headers(token: str) -> list[list[tuple[bytes, bytes]]]:
    """What callers without the token send."""
    good = token.encode()
    wrong = [
        b"",
        b"null",
        b"undefined",
        b"\0",
        b"\xff\xfe",
        good[:-1],
        good[1:],
        good[:8],
        good + b"x",
        good.swapcase(),
    ]
    wrong += [good[::-1], b"A" * len(good), b"Bearer " + good, b"x" * 65_536, b'"' + good + b'"', good + b"," + good]
    values = [b"Bearer " + value for value in wrong]
    values += [b"", b"Bearer", b"bearer\t" + good, b"Basic " + good, b"Token " + good, good]
    return [
        [],
        *[[(b"authorization", value)] for value in values],
        [(b"authorization", b"Bearer " + good), (b"authorization", b"Bearer x")],
        [(b"x-api-key", good)],
        [(b"cookie", b"token=" + good)],
        [(b"proxy-authorization", b"Bearer " + good)],
    ]


def ask(app, method: str, path: str, headers: list[tuple[bytes, bytes]]) -> tuple[int, int]:
    """Status, and how often the body was asked for."""
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"token=x",
        "root_path": "",
        "headers": [(b"host", b"127.0.0.1"), (b"content-length", b"5"), *headers],
    }
    statuses, asked = [], 0

    async def receive():
        nonlocal asked
        asked += 1
        return {"type": "http.request", "body": b"12345", "more_body": False}

    async def send(message):
        statuses.append(message.get("status"))

    asyncio.run(app(scope, receive, send))
    return statuses[0], asked


@pytest.mark.slow
def test_without_the_token_nothing_is_read_on_any_route(edge):
    paths = [*edge.client.get("/openapi.json").json()["paths"], "/docs", "/openapi.json", "/", "/nowhere"]
    paths += ["//score", "/score/", "/health/../score", "/-/routes"]
    wrong = wrong_headers(edge.token)
    outcomes = {}
    for method, path, headers in itertools.product(METHODS, paths, wrong):
        if path in ("/health", "/docs") and method in ("GET", "HEAD"):
            continue  # open on purpose: say only that somebody listens, and what these files say
        outcomes[method, path, str(headers)] = ask(edge.app, method, path, headers)
    assert set(outcomes.values()) == {(401, 0)}, {key: got for key, got in outcomes.items() if got != (401, 0)}
    assert len(outcomes) >= 3_000


def test_with_the_token_the_same_routes_answer(edge):
    header = [(b"authorization", b"Bearer " + edge.token.encode()), (b"content-type", b"application/json")]
    assert ask(edge.app, "GET", "/docs", header)[0] == 200
    assert ask(edge.app, "GET", "/nowhere", header)[0] == 404
