"""A real HTTP server on the loopback address that speaks OpenAI's chat completions, well or badly, as it is scripted.

It looks: of the last two images it is sent the brighter is nearer to the goal, of one the brightness is the score.
"""

import base64
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

Turn = Callable[["Call"], "Response"]
CUT = -1
"""As a status: the connection ends without an answer."""


@dataclass
class Response:
    """What goes back."""

    body: Any = None
    """Text as it is, anything else as JSON."""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    content_type: str = "application/json"


@dataclass
class Call:
    """A request as it came."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    at: float
    """`time.monotonic` of its arrival."""

    @property
    def text(self) -> str:
        """All texts of the chat."""
        return "\n".join(part["text"] for part in self._parts() if part.get("text"))

    @property
    def images(self) -> list[np.ndarray]:
        """Every image [H, W, 3], decoded from what was sent."""
        found = []
        for part in self._parts():
            if "image_url" in part:
                head, data = part["image_url"]["url"].split(",", 1)
                assert head == "data:image/png;base64"
                found.append(np.asarray(Image.open(BytesIO(base64.b64decode(data)))))
        return found

    def _parts(self) -> Iterator[dict[str, Any]]:
        for turn in self.body.get("messages", []):
            yield from [{"text": turn["content"]}] if isinstance(turn["content"], str) else turn["content"]


def completion(
    text: str | None,
    *,
    finish: str = "stop",
    refusal: str | None = None,
    odds: dict[str, float] | None = None,
    usage: tuple[int, int] | None = (100, 5),
) -> dict[str, Any]:
    """A chat completion."""
    top = [{"token": token, "logprob": math.log(p), "bytes": None} for token, p in (odds or {}).items()]
    logprobs = {"content": [{**top[0], "top_logprobs": top}], "refusal": None} if top else None
    message = {"role": "assistant", "content": text, "refusal": refusal}
    body = {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": logprobs}],
    }
    if usage:
        body["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
    return body


def error(status: int, message: str, *, headers: dict[str, str] | None = None, **extra: Any) -> Response:
    """An error in the words of the format."""
    return Response({"error": {"message": message, **extra}}, status=status, headers=headers or {})


class ApiServer:
    """Answers truthfully after the scripted responses are used up."""

    def __init__(self, *script: Response | Turn) -> None:
        self.script = list(script)
        self.calls: list[Call] = []
        self.max_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()

    def say(self, text: str | None, **extra: Any) -> Response:
        """A reply."""
        return Response(completion(text, **extra))

    def respond(self, call: Call) -> Response:
        """The next scripted response, else the truth."""
        with self._lock:
            self.calls.append(call)
            turn = self.script.pop(0) if self.script else self.truth
        return turn if isinstance(turn, Response) else turn(call)

    def truth(self, call: Call) -> Response:
        """What the images show, in the form that was asked for."""
        shades = [float(image.mean()) for image in call.images]
        if "label" in call.text and len(shades) >= 2:
            first, second = shades[0], shades[-1]
            label = "-1" if first == second else "1" if second > first else "0"
            odds = {label[0]: 0.9, "0" if label != "0" else "1": 0.06, "The": 0.04} if self._wants_odds(call) else None
            return self.say(label, odds=odds)
        if "Report:" in call.text:
            return self.say("1" if "second is brighter" in call.text else "0")
        if len(shades) >= 2 and "What does the first show" in call.text:
            return self.say("The second is brighter." if shades[-1] > shades[0] else "The first is brighter.")
        shade = shades[-1] / 255 if shades else 0.0
        if "yes or no" in call.text:
            odds = {"Yes": max(shade, 1e-6), "No": max(1 - shade, 1e-6)} if self._wants_odds(call) else None
            return self.say("Yes" if shade > 0.5 else "No", odds=odds)
        if "from 1 to 5" in call.text or "Rate" in call.text:
            return self.say(str(1 + round(4 * shade)))
        if "percent" in call.text:
            return self.say(f"<think>looks like it</think><answer>{round(100 * shade)}</answer>")
        return self.say(str(round(100 * shade)))

    @contextmanager
    def running(self) -> Iterator[str]:
        """The server's root address, while it answers."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                outer._serve(self)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        root = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield root + "/v1"
        finally:
            server.shutdown()
            server.server_close()

    def _wants_odds(self, call: Call) -> bool:
        return bool(call.body.get("logprobs"))

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        with self._lock:
            self._at_once += 1
            self.max_at_once = max(self.max_at_once, self._at_once)
        try:
            length = int(handler.headers.get("Content-Length", 0))
            body = json.loads(handler.rfile.read(length))
            response = self.respond(
                Call(handler.path, {k.lower(): v for k, v in handler.headers.items()}, body, time.monotonic())
            )
            time.sleep(response.delay_s)
            self._send(handler, response)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client gave up
        finally:
            with self._lock:
                self._at_once -= 1

    @staticmethod
    def _send(handler: BaseHTTPRequestHandler, response: Response) -> None:
        if response.status == CUT:
            handler.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"cho')
            handler.wfile.flush()
            handler.close_connection = True
            handler.connection.close()
            return
        data = response.body.encode() if isinstance(response.body, str) else json.dumps(response.body).encode()
        handler.send_response(response.status)
        handler.send_header("Content-Type", response.content_type)
        handler.send_header("Content-Length", str(len(data)))
        for name, value in response.headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)
