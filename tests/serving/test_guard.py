import asyncio
import json
import os
import time

import pytest
from http_edge import JSON, Edge, FakeClient, png, text

from rlvlm.core.errors import MachineError
from rlvlm.serving.config import HttpConfig
from rlvlm.serving.guard import MAX_MARKS, MIN_TOKEN_CHARS, Guard, check_marks, make_token, read_token
from rlvlm.serving.refusal import Refusal

TOKEN = b"t" * 40


@pytest.fixture(scope="module")
def edge(tmp_path_factory):
    return Edge(tmp_path_factory.mktemp("edge"))


async def echo(scope, receive, send):
    """An app that answers with the length of the body it gets, in one message."""
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(len(message["body"])).encode()})


def ask(
    guard: Guard,
    messages: list,
    *headers: tuple[bytes, bytes],
    method: str = "POST",
    path: str = "/v1/score",
    pause_s: float = 0.0,
):
    """Status, body and headers of one request whose body comes in `messages`, and how many of them were read."""
    given = [(b"host", b"127.0.0.1:8123"), (b"authorization", b"Bearer " + TOKEN), *headers]
    kept = {key: value for key, value in given}  # the last of a name counts
    scope = {"type": "http", "method": method, "path": path, "headers": list(kept.items())}
    sent, num_read = [], 0

    async def receive():
        nonlocal num_read
        num_read += 1
        await asyncio.sleep(pause_s)
        if not messages:
            await asyncio.sleep(60)
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    asyncio.run(guard(scope, receive, send))
    if not sent:
        return None, b"", {}, num_read
    return sent[0]["status"], sent[1]["body"], dict(sent[0]["headers"]), num_read


def parts(*pieces: bytes) -> list[dict]:
    return [
        {"type": "http.request", "body": piece, "more_body": number < len(pieces)}
        for number, piece in enumerate(pieces, start=1)
    ]


def guard(**config) -> Guard:
    return Guard(echo, TOKEN, HttpConfig(**config))


def test_a_whole_body_reaches_the_app_in_one_piece():
    # by hand: three pieces of 2, 3 and 4 bytes are 9
    status, body, _, num_read = ask(guard(), parts(b"[1", b",2,", b"345]"), (b"content-type", b"application/json"))
    assert (status, body, num_read) == (200, b"9", 3)


def test_only_known_hosts_are_served():
    odd = b"evil.example 127.0.0.1.evil.example 127.0.0.1@evil 127.0.0.1:8123:1 \xff".split()
    statuses = dict.fromkeys(b"127.0.0.1 localhost:8123 LOCALHOST [::1]:80".split(), 200) | dict.fromkeys(odd, 400)
    for host, status in (statuses | {b"": 400}).items():
        assert ask(guard(), parts(b""), (b"host", host))[0] == status
        asked = ask(guard(), parts(b""), (b"host", host), (b"authorization", b""), method="GET", path="/health")
        assert asked[0] == status


def test_health_is_open_and_says_nothing():
    status, body, _, num_read = ask(guard(), [], (b"authorization", b""), method="GET", path="/health")
    assert (status, body, num_read) == (200, b'{"status":"ok"}', 0)
    assert ask(guard(), [], (b"authorization", b""), method="POST", path="/health")[0] == 401
    assert ask(guard(), [], (b"authorization", b""), method="GET", path="/health/")[0] == 401


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({b"content-length": b"9000000"}, 413, "body"),
        ({b"content-length": b"9" * 5_000}, 413, "body"),
        ({b"content-length": b"-1"}, 400, "length"),
        ({b"content-length": b"1e3"}, 400, "length"),
        ({b"content-length": b"5", b"transfer-encoding": b"chunked"}, 400, "length"),
        ({b"content-length": b"5", b"content-encoding": b"gzip"}, 415, "encoding"),
        ({b"content-length": b"5", b"content-type": b"text/plain"}, 415, "content_type"),
        ({b"content-length": b"5"}, 415, "content_type"),
        ({b"transfer-encoding": b"chunked", b"content-type": b"multipart/form-data"}, 415, "content_type"),
    ],
)
def test_a_body_that_is_too_long_by_its_header_is_refused_unread(headers, status, code):
    got, body, _, num_read = ask(guard(), parts(b"{}"), *headers.items())
    assert (got, json.loads(body)["error"]["code"], num_read) == (status, code, 0)


def test_a_body_that_grows_past_the_cap_is_cut_off():
    chunks = [b"x" * 60] * 5
    got, body, _, num_read = ask(guard(body_bytes=100), parts(*chunks))
    assert (got, num_read) == (413, 2) and b"100 bytes" in body


def test_a_slow_body_ends_at_the_deadline_whatever_trickles():
    got, body, _, _ = ask(guard(body_deadline_s=0.5), parts(*[b"x"] * 100), pause_s=0.02)
    assert got == 408 and json.loads(body)["error"]["code"] == "slow_body"
    assert ask(guard(body_deadline_s=0.5), [])[0] == 408


POST = {
    "type": "http",
    "method": "POST",
    "path": "/v1/score",
    "headers": [(b"host", b"127.0.0.1"), (b"authorization", b"Bearer " + TOKEN)],
}


async def statuses(busy: Guard, *delays_s: float, stands_still_s: float = 0.0) -> list[int]:
    """The statuses of requests sent at once, whose bodies come after these delays, in the order of the answers."""
    sent = []

    async def ask_after(delay_s: float) -> None:
        async def receive():
            if stands_still_s:  # as a decoder that holds the interpreter does
                asyncio.get_running_loop().call_soon(time.sleep, stands_still_s)
            await asyncio.sleep(delay_s)
            return parts(b"1")[0]

        async def send(message):
            sent.append(message)

        await busy(POST, receive, send)

    await asyncio.gather(*map(ask_after, delays_s))
    assert all((b"retry-after", b"2") in message["headers"] for message in sent if message.get("status") == 429)
    return [message["status"] for message in sent if "status" in message]


def test_a_late_body_is_the_servers_fault_where_it_is_busy_and_the_callers_where_it_is_not():
    async def test():
        # long enough that a busy machine's own delays do not look like a server that stood still
        assert await statuses(guard(body_deadline_s=0.6), 0.3, 5.0) == [200, 429], "others are read slowly too"
        assert await statuses(guard(body_deadline_s=0.6), 0.0, 5.0) == [200, 408], "the caller's alone"
        assert await statuses(guard(body_deadline_s=0.2), 0.1, stands_still_s=0.6) == [429], "the server stood still"
        # a crowd runs out of time one by one: the last ones are few by then, and no less honest
        crowded = guard(body_deadline_s=0.6)
        assert await statuses(crowded, *[60.0] * 40) == [429] * 40
        assert await statuses(crowded, 60.0) == [408], "who comes later, alone, is slow"

    asyncio.run(test())


def test_a_disconnected_caller_holds_nothing():
    watched = guard()
    assert ask(watched, [*parts(b"x", b"y")[:1], {"type": "http.disconnect"}])[0] is None
    assert watched._held_bytes == 0


def test_all_bodies_together_are_bounded_and_the_room_comes_back():
    watched = guard(body_bytes=100, held_bytes=150)
    watched._held_bytes = 100
    got, _, headers, _ = ask(watched, parts(b"1" * 60))
    assert (got, headers[b"retry-after"]) == (429, b"2")
    watched._held_bytes = 0
    assert ask(watched, parts(b"1" * 60))[0] == 200 and watched._held_bytes == 0


@pytest.mark.parametrize("body", [b"[" * 100_000, b'"' * 30_000, b"[" + b"0," * 30_000, b"[]," * 15_000 + b"[" * 6_000])
def test_crowded_json_is_refused(body):
    with pytest.raises(Refusal):
        check_marks(body)
    check_marks(b'[""]' * (MAX_MARKS // 2))


def test_a_websocket_is_closed():
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(guard()({"type": "websocket", "path": "/"}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.parametrize(
    ("goal", "statuses"),
    [
        (b"[" * 30 + b"]" * 30, {422}),
        (b"[" * (MAX_MARKS - 1), {400}),
        (b'{"a":' * 9_000, {400}),
        (b"9" * 10_000, {400}),
        (b'"\xff"', {400}),
        (b"tru", {400}),
    ],
)
def test_malformed_and_deep_json_break_no_parser(edge, goal, statuses):
    answer = edge.client.post("/v1/score", content=b'{"goal":' + goal + b"}", headers=JSON)
    assert answer.status_code in statuses
    assert answer.json()["error"]["code"] == ("json" if answer.status_code == 400 else "field")


def test_an_internal_error_is_reported_without_its_cause(tmp_path):
    class Broken(FakeClient):
        async def compare(self, queries):
            raise RuntimeError("the key is hunter2")

    answer = Edge(tmp_path, judge=Broken()).post(
        "/v1/preference", {"goal": "open it", "left": [text(png())], "right": [text(png())]}
    )
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal" and "hunter2" not in answer.text


def test_a_token_is_made_once_for_its_owner_alone(tmp_path):
    path = tmp_path / "new" / "token"
    assert make_token(path) and not make_token(path)
    token = read_token(path)
    assert len(token) == 43 and read_token(path) == token  # 32 random bytes in base64
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(path.parent) == ["token"]


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        ("x" * 40, 0o644, "yours alone, its mode is 644"),
        ("x" * 40, 0o620, "yours alone"),
        ("x" * (MIN_TOKEN_CHARS - 1), 0o600, "at least 32"),
        ("two words that are long enough to be a token", 0o600, "one line"),
        ("", 0o600, "one line"),
    ],
)
def test_a_token_file_that_is_not_fit_is_refused_without_quoting_it(tmp_path, content, mode, reason):
    path = tmp_path / "token"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(MachineError, match=reason) as caught:
        read_token(path)
    assert not content or content not in str(caught.value) + caught.value.fix


def test_a_link_a_folder_and_nothing_are_refused(tmp_path):
    (tmp_path / "real").write_text("x" * 40)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("link", ".", "gone", "pipe"):
        with pytest.raises(MachineError):
            read_token(tmp_path / name)
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot be written"):
        make_token(tmp_path / "file" / "token")
