"""What tests of the HTTP edge share: a gateway in this process with a judge of known answers, and things to send."""

import base64
import io
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import numpy as np
import uvicorn
from PIL import Image
from starlette.testclient import TestClient

from rlvlm.serving.config import HttpConfig
from rlvlm.serving.ingress import build_app
from rlvlm.testing import FakeJudge

JSON = {"content-type": "application/json"}


class FakeClient:
    """A judge whose truth is brightness; it writes back what it was sent."""

    def __init__(self) -> None:
        self.judge = FakeJudge()

    async def stamp(self):
        return self.judge.stamp

    async def compare(self, queries):
        return self.judge.compare(queries)

    async def score(self, clips):
        self.clips = clips
        return self.judge.score(clips)

    async def generate(self, chat, max_new_tokens, temperature):
        self.chat = chat
        return f"{len(chat)} turns, {max_new_tokens} tokens, temperature {temperature:g}"


class Edge:
    """A gateway, its token and a client that knows it."""

    def __init__(self, folder: Path, judge: Any = None, ready: Any = None, **config: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.judge = judge or FakeClient()
        self.media = folder / "media"
        self.media.mkdir(exist_ok=True)
        settings: dict[str, Any] = {
            "judges": ("fake",),
            "token_file": str(folder / "keys" / "token"),
            "media_root": str(self.media),
        }
        self.config = HttpConfig(**(settings | config))

        async def all_of_them():
            return self.config.judges

        self.app = build_app(self.config, dict.fromkeys(self.config.judges, self.judge), {}, ready or all_of_them)
        self.token = self.config.token_path.read_text().strip()
        self.headers = {"authorization": f"Bearer {self.token}"}
        self.client = TestClient(self.app, "http://127.0.0.1", raise_server_exceptions=False, headers=self.headers)

    def post(self, path: str, body: Any):
        return self.client.post(path, json=body)

    @contextmanager
    def listening(self) -> Iterator[str]:
        """The same over a real port; yields its address."""
        with socket.socket() as port:
            port.bind(("127.0.0.1", 0))
            port.listen()  # whoever connects before the server runs waits for it
            server = uvicorn.Server(uvicorn.Config(self.app, log_config=None, lifespan="off"))
            thread = threading.Thread(target=server.run, args=([port],), daemon=True)
            thread.start()
            try:
                yield f"http://127.0.0.1:{port.getsockname()[1]}"
            finally:
                server.should_exit = True
                thread.join(10)


def png(level: int = 128, size: tuple[int, int] = (32, 32), kind: str = "PNG", **options: Any) -> bytes:
    """A square of one brightness."""
    stream = io.BytesIO()
    Image.new("RGB", size, (level,) * 3).save(stream, kind, **options)
    return stream.getvalue()


def noise(rng: np.random.Generator, side: int) -> bytes:
    """A PNG as large as one of that side can be."""
    stream = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (side, side, 3), np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def text(data: bytes) -> str:
    """As it goes into JSON."""
    return base64.b64encode(data).decode()


def movie(levels: list[int], size: tuple[int, int] = (64, 48), codec: str = "libx264") -> bytes:
    """An MP4 whose frames have these brightnesses."""
    stream = io.BytesIO()
    with av.open(stream, "w", format="mp4") as container:
        video: Any = container.add_stream(codec, rate=4)
        video.width, video.height, video.pix_fmt = *size, "yuv420p"
        for level in levels:
            frame = np.full((size[1], size[0], 3), level, np.uint8)
            container.mux(video.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(video.encode())
    return stream.getvalue()


def png_chunk(name: bytes, content: bytes) -> bytes:
    """A chunk with a right checksum."""
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png_saying(width: int, height: int, *chunks: bytes, colour: int = 2) -> bytes:
    """A PNG that claims a size, with chunks before its end."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + png_chunk(b"IEND", b"")


def patched(data: bytes, box: bytes, change: Callable[[bytearray, int], None]) -> bytes:
    """An MP4 with the content of its last box of that name changed in place."""
    copy = bytearray(data)
    at = data.rindex(box) + 4
    change(copy, at)
    return bytes(copy)


def turned(data: bytes) -> bytes:
    """An MP4 whose track's matrix turns what is shown by a quarter, clockwise (ISO/IEC 14496-12, section 8.3.2)."""
    matrix = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    # version 0 of the header has 40 bytes before it
    return patched(data, b"tkhd", lambda copy, at: copy.__setitem__(slice(at + 40, at + 76), matrix))
