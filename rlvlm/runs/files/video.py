"""Videos of evaluation episodes: the scene above, a trace of the reward with a moving mark below."""

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from rlvlm.algorithms.evaluation import Draw, PlayedEpisode
from rlvlm.core.disk import replacing
from rlvlm.core.steps import FloatArray, Frames

TRACE_PX = 124
"""Height of the strip with the trace, in pixels."""
MARGIN_PX = 10
HEADER_PX, FOOTER_PX = 42, 22
"""Height of the text above and below the trace, pixels."""
FPS = 30
"""Maximum frames per second; short episodes are slowed down to last `LEAST_S`."""
LEAST_S = 5.0
"""Minimum duration of a video, seconds."""
PAPER, INK, FAINT, ACCENT = (250, 250, 248), (38, 70, 83), (200, 206, 208), (231, 111, 81)
VIDEO_PX = 300
"""Minimum width of the images, pixels, for the text; smaller ones are enlarged by a whole factor."""
_REWARD_PX = 56
"""Width of the present reward, to the right of the title's second line, pixels."""


def write_videos(
    folder: Path, episodes: Sequence[PlayedEpisode], env_steps: int, draw: Draw, has_success: bool = True
) -> list[Path]:
    """Films episodes of the policy after `env_steps` into `folder`, and returns the files; titles give the success if
    the env tests it.
    """
    files = []
    for number, episode in enumerate(episodes, start=1):
        # NaN if no reward was learned, or it is unknown: then the true one is shown
        is_learned = bool(np.isfinite(episode.learned_rewards).all())
        rewards = episode.learned_rewards if is_learned else episode.env_rewards
        lost = "success, undone at the end" if episode.is_success else "no success"
        end = "success" if episode.ends_in_success else lost
        end = f", {end}" if has_success else ""
        title = f"step {env_steps:,}{end}, {episode.reward_name if is_learned else 'true reward'}"
        file = folder / f"step_{env_steps:08d}_episode_{number}.mp4"
        bounds = episode.reward_range if is_learned else None
        # envs in turns draw at a size of their own; integer factors keep its pixels sharp
        frames = draw(episode.snapshots, VIDEO_PX)
        times = -(-VIDEO_PX // frames.shape[2])
        frames = frames.repeat(times, axis=1).repeat(times, axis=2)
        # H.264 halves the resolution of colours, and refuses odd numbers of pixels
        frames = frames[:, : frames.shape[1] // 2 * 2, : frames.shape[2] // 2 * 2]
        files.append(write_mp4(file, compose_frames(frames, rewards, title, episode.progress, bounds)))
    return files


def write_mp4(file: Path, images: Sequence[NDArray[np.uint8]]) -> Path:
    """Encodes images as H.264 and returns the file, which is written atomically.

    Args:
        file: path to write, ending in `.mp4`.
        images: T >= 1 images [H, W, 3], all of one size; H and W even.
    """
    # few images are shown slowly, at least one a second
    fps = max(1, min(FPS, int(len(images) / LEAST_S)))
    held = max(0, math.ceil(LEAST_S * fps) - len(images))  # very short episodes hold the last image
    with replacing(file) as partial, av.open(str(partial), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": "23", "preset": "veryfast"})
        stream.height, stream.width = images[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.time_base = Fraction(1, fps)
        for image in (*images, *[images[-1]] * held):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    return file


def _lines(title: str, small: Any, width: int) -> list[str]:
    """Returns a title on one line, or on two that leave room for the reward; cuts off the rest."""

    def cut(words: str, room: int) -> str:
        if small.getlength(words) <= room:
            return words
        while words and small.getlength(words + "...") > room:
            words = words[:-1]
        return words + "..."

    parts = title.split(", ")
    first = next((n for n in range(len(parts), 0, -1) if small.getlength(", ".join(parts[:n])) <= width), 1)
    lines = [cut(", ".join(parts[:first]), width)]
    return lines + ([cut(", ".join(parts[first:]), width - _REWARD_PX)] if parts[first:] else [])


def compose_frames(
    frames: Frames,
    rewards: FloatArray,
    title: str,
    progress: FloatArray | None = None,
    bounds: tuple[float, float] | None = None,
) -> list[NDArray[np.uint8]]:
    """Returns each image with the strip under it: the whole trace faint, the past dark, the present marked.

    Args:
        frames: [T, H, W, 3] images, one per step.
        rewards: [T] reward that the agent saw at each step.
        title: title of the strip; if it is too long for one line, it is broken at a comma.
        progress: [T] true progress in [0, 1], written if known; None leaves it out.
        bounds: rewards at the bottom and the top of the strip; None: the episode's own.

    Returns:
        T images [H + TRACE_PX, W, 3].
    """
    width = frames.shape[2]
    # a learned reward's range is known; a true one is scaled to the episode
    low, high = bounds or (float(np.min(rewards)), float(np.max(rewards)))
    # pixel positions of the trace: time to the right, rewards upwards
    bottom, height = TRACE_PX - FOOTER_PX, TRACE_PX - FOOTER_PX - HEADER_PX
    across = np.linspace(MARGIN_PX, width - MARGIN_PX, len(rewards)) if len(rewards) > 1 else [MARGIN_PX]
    up = bottom - (np.asarray(rewards, float) - low) / (high - low or 1.0) * height
    points = [(float(x), float(y)) for x, y in zip(across, up, strict=True)]
    line: dict[str, Any] = {"width": 2, "joint": "curve"}
    small = ImageFont.load_default(size=11)
    # draw once what is the same in every image
    base = Image.new("RGB", (width, TRACE_PX), PAPER)
    draw = ImageDraw.Draw(base)
    for row, words in enumerate(_lines(title, small, width - 2 * MARGIN_PX)):
        draw.text((MARGIN_PX, 6 + 16 * row), words, fill=INK, font=small)
    draw.line(points, fill=FAINT, **line)
    if bounds is not None:
        draw.text((MARGIN_PX, TRACE_PX - 4), f"{low:g} to {high:g}", fill=INK, font=small, anchor="ls")
    images = []
    for step, frame in enumerate(frames):
        strip = base.copy()
        draw = ImageDraw.Draw(strip)
        draw.line(points[: step + 1], fill=INK, **line)
        x, y = points[step]
        draw.line([(x, HEADER_PX), (x, TRACE_PX - FOOTER_PX)], fill=FAINT)
        draw.ellipse([x - 4, y - 4, x + 4, y + 4], fill=ACCENT)
        text = f"{rewards[step]:+.2f}"
        draw.text((width - MARGIN_PX, 22), text, fill=ACCENT, font=small, anchor="ra")
        if progress is not None and np.isfinite(progress[step]):
            label = f"true progress {progress[step]:.0%}"
            draw.text((width - MARGIN_PX, TRACE_PX - 4), label, fill=INK, font=small, anchor="rs")
        images.append(np.concatenate([frame, np.asarray(strip)], axis=0))
    return images
