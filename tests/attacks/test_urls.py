"""Addresses in every field: nothing connects, nothing asks a name server, a listener on loopback hears nothing."""

import itertools
import random
import socket
import sys
import threading

import pytest
from http_edge import Edge, png, text

WATCHED = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request", "socket.sendto")


class Listener:
    """Counts who connects to it."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.num_heard = 0
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.num_heard += 1
            connection.close()


class Watch:
    """Notes every connection and name look-up of this process while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.events: list[str] = []
        sys.addaudithook(self._note)  # cannot be taken away again, only switched off

    def _note(self, event: str, args: tuple) -> None:
        if self.is_on and event in WATCHED:
            self.events.append(f"{event} {args[1:]}")


@pytest.fixture(scope="module")
def watch():
    return Watch()


def urls(port: int, count: int, seed: int) -> list[str]:
    """Addresses of the listener and of places that must never be asked, in the dress of known tricks."""
    rng = random.Random(seed)
    loopback = (
        "127.0.0.1 127.1 2130706433 0x7f000001 017700000001 0 localhost LOCALHOST [::1] [::ffff:127.0.0.1] 0.0.0.0 "
        "127.0.0.1.nip.io example.com@127.0.0.1 user:pass@127.0.0.1 127\u30020\u30020\u30021 \u2460\u2461\u2466.0.0.1 "
        "localhost%00.example.com"
    )
    hosts = [f"{host}:{port}" for host in loopback.split()]
    hosts += [
        f"127.0.0.1:{port}{tail}" for tail in ("#@example.com", "\\@example.com", f"/302?to=http://127.0.0.1:{port}")
    ]
    hosts += "169.254.169.254/latest/meta-data [fd00:ec2::254] metadata.google.internal".split()
    hosts += "10.0.0.1 192.168.0.1 example.com".split()
    schemes = (
        "http:// https:// HTTP:// http: // http:\\\\ ftp:// gopher:// file:/// file:// ws:// rtsp:// rtmp:// tcp:// "
        "udp:// s3:// smb:// dict:// ldap:// jar:http:// view-source:http:// data:text/html,http:// "
        "data:image/svg+xml;base64,http:// data:image/png;base64,http:// data:image/png,http:// data:;base64,http:// "
        "data:http:// hls+http:// concat:http:// cache:http:// crypto:http:// async:http://"
    ).split()
    schemes += [" http://", "\thttp://", "h\nttp://", ""]
    made = [scheme + host + "/a.png" for scheme, host in itertools.product(schemes, hosts)]
    rng.shuffle(made)
    return made[:count]


def requests(url: str) -> list[tuple[str, dict]]:
    """The same address in each place where an image or video may be named."""
    good = text(png())
    image = [{"role": "user", "content": [{"type": "image", "image": url}]}]
    return [
        ("/v1/preference", {"goal": "open it", "left": [url], "right": [good]}),
        ("/v1/preference", {"goal": "open it", "left": [good], "right": [good], "goal_picture": url}),
        ("/v1/score", {"goal": "open it", "frames": [good, url]}),
        ("/generate", {"messages": image}),
        ("/generate", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}),
        ("/score", {"task_text": "open it", "video_path": url}),
        ("/score", {"task_text": "open it", "frames": [url]}),
        ("/score", {"task_text": "open it", "video_url": url}),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("count", [30, pytest.param(300, marks=pytest.mark.full)])
def test_no_address_is_followed(tmp_path, watch, count):
    edge, listener = Edge(tmp_path), Listener()
    playlist = f"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:{listener.port}/a.ts\n"
    (edge.media / "list.mp4").write_text(playlist)
    (edge.media / "sdp.mp4").write_bytes(b"\0\0\0\x18ftypisom\0\0\0\0isomiso2" + playlist.encode())
    watch.events.clear()
    watch.is_on = True
    try:
        statuses = {
            edge.post(path, body).status_code
            for url in urls(listener.port, count, seed=3)
            for path, body in requests(url)
        }
        for name in ("list.mp4", "sdp.mp4"):
            statuses.add(edge.post("/score", {"task_text": "open it", "video_path": name}).status_code)
    finally:
        watch.is_on = False
        listener.socket.close()
    assert statuses <= {400, 422}, statuses
    assert watch.events == [] and listener.num_heard == 0


def test_the_watch_and_the_listener_would_notice(watch):
    listener = Listener()
    watch.events.clear()
    watch.is_on = True
    socket.create_connection(("127.0.0.1", listener.port)).close()
    watch.is_on = False
    assert watch.events
