"""The routes that the reference systems call, `/generate` and `/score`, without what made them unsafe.

Departures: a score that could not be read is null with its status, never a made-up 0; `video_path` names files below
one folder only; nothing is fetched from an address; `nframes` above 64 counts as 64.

Source: the LIBERO-10 reward server of the RLinf fork (`POST /score`); Qwen's chat message format (`POST /generate`).
"""

import time
from typing import Any

import numpy as np
from fastapi import FastAPI

from rlvlm.core.judging import Clip
from rlvlm.core.steps import Frames
from rlvlm.gateway import messages as wire
from rlvlm.gateway.media.files import MediaRoot
from rlvlm.gateway.media.images import read_pictures
from rlvlm.gateway.media.mp4 import MAX_VIDEO_FRAMES
from rlvlm.gateway.media.video import read_video
from rlvlm.gateway.routes import RequestHandler, goal_of
from rlvlm.serving.refusal import Refusal
from rlvlm.vlms.chats import Chat


def add_reference_routes(app: FastAPI, handler: RequestHandler, media: MediaRoot, max_tokens: int) -> None:
    """Adds both routes to `app`; `max_tokens` is the longest reply a caller may ask for."""

    @app.post("/generate")
    async def generate(request: wire.GenerateRequest) -> wire.GenerateAnswer:
        """The reply of a chat model to a chat with images."""
        name, client = handler.client(request.backend)
        if request.max_tokens > max_tokens:
            raise Refusal(
                422,
                "max_tokens",
                f"max_tokens is at most {max_tokens} here, got {request.max_tokens}",
                "ask for a shorter reply",
            )
        chat = await handler.run(read_chat, request.messages)
        start = time.perf_counter()
        text = await client.generate(chat, request.max_tokens, request.temperature)
        return wire.GenerateAnswer(text=text, backend=name, latency_s=time.perf_counter() - start)

    @app.post("/score")
    async def score(request: wire.VideoScoreRequest) -> wire.VideoScoreAnswer:
        """How much of its task a video shows done."""
        name, client = handler.client(request.backend)
        goal = goal_of(request.task_text)
        frames = await handler.run(read_clip, request, media)
        [answer] = await client.score([Clip(goal=goal, frames=frames)])
        return wire.VideoScoreAnswer(
            score=answer.value,
            model_output=answer.text,
            backend=name,
            status=answer.status,
            frames_used=len(frames),
            latency_s=answer.latency_s,
        )


def read_chat(turns: list[wire.Turn]) -> Chat:
    """The chat in the form that judges read, its images decoded.

    Raises:
        Refusal: an image breaks a rule.
    """
    parts = [
        [wire.TextPart(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
        for turn in turns
    ]
    texts = [part.image for turn in parts for part in turn if isinstance(part, wire.ImagePart)]
    pictures = iter(read_pictures([[text] for text in texts]))

    def as_part(part: wire.TextPart | wire.ImagePart) -> dict[str, Any]:
        if isinstance(part, wire.TextPart):
            return {"type": "text", "text": part.text}
        return {"type": "image", "image": next(pictures)[0]}

    return [
        {"role": turn.role, "content": [as_part(part) for part in content]}
        for turn, content in zip(turns, parts, strict=True)
    ]


def read_clip(request: wire.VideoScoreRequest, media: MediaRoot) -> Frames:
    """The frames that a request names or carries, `[L, H, W, 3]`, evenly thinned to `nframes`.

    Raises:
        Refusal: the video may not be read, or it or a frame breaks a rule.
    """
    wanted = min(request.nframes, MAX_VIDEO_FRAMES)
    if request.video_path is not None:
        return read_video(media.read(request.video_path), wanted, request.max_pixels)
    [frames] = read_pictures([request.frames or []], request.max_pixels)
    if len(frames) <= wanted:
        return frames
    return frames[np.linspace(0, len(frames) - 1, wanted).round().astype(int)]
