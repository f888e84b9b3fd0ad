"""What a connection may do before its request is whole, on the HTTP server that Serve's proxy starts."""

import asyncio
import http.client
import socket
import threading
import time
from typing import Any

import pytest
import uvicorn
import uvicorn.config

from rlvlm.serving import proxy


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Says how long the body was."""
    length, more = 0, True
    while more:
        message = await receive()
        length, more = length + len(message["body"]), message["more_body"]
    said = str(length).encode()
    headers = [(b"content-length", str(len(said)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": said})


@pytest.fixture
def port(monkeypatch):
    """Of a server as Serve's proxy makes it, after the callback."""
    monkeypatch.setattr(proxy, "HEADER_S", 0.5)
    monkeypatch.setitem(uvicorn.config.HTTP_PROTOCOLS, "auto", uvicorn.config.HTTP_PROTOCOLS["auto"])
    assert proxy.bound_headers() == []
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="off", log_config=None))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def answered(line: socket.socket) -> tuple[int, bytes]:
    answer = http.client.HTTPResponse(line)
    answer.begin()
    return answer.status, answer.read()


def test_requests_on_one_connection_are_answered(port):
    with connect(port) as line:
        for body in (b"", b"x" * 300_000):
            line.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            assert answered(line) == (200, b"%d" % len(body))


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\nX: ", b"GET /", b"GET / HTTP/1.1\r\n"])
def test_an_endless_header_is_cut_off(port, start):
    sent, piece = 0, b"y" * 65_536
    with connect(port) as line, pytest.raises((ConnectionResetError, BrokenPipeError)):
        line.sendall(start)
        while sent < 64 * 2**20:
            line.sendall(piece)
            sent += len(piece)
    assert sent < 16 * 2**20  # what the kernel takes in before anybody looks is in it


def test_headers_that_do_not_come_close_the_connection_and_a_slow_body_does_not(port):
    with connect(port) as silent, connect(port) as half, connect(port) as slow:
        half.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n")
        slow.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n12")
        assert silent.recv(10) == b"" and half.recv(10) == b""
        time.sleep(0.5)
        slow.sendall(b"34")
        assert answered(slow) == (200, b"4")
