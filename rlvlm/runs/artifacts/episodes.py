"""Episodes of a policy that thinks and acts in words or chunks: `episodes.html`, a strip of frames per episode, and a
video with the caption below the image. Pipelines call it with what they played; nothing here knows a task.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from rlvlm.core.steps import Frames
from rlvlm.runs.artifacts.video import ACCENT, FAINT, INK, MARGIN_PX, PAPER, write_mp4
from rlvlm.templates import inline, render

MAX_EPISODES = 60
"""Shown on a page."""
MAX_FRAMES = 24
"""Shown of an episode on a page, evenly spread over it, the first and the last among them."""
MAX_TEXT = 2_000
"""Characters kept of a thought or an action."""
PAGE_PX = 256
"""Longer side of a frame on the page, at most."""
VIDEO_PX = 384
"""Width of a video, at least; smaller frames are enlarged by a whole number."""
THOUGHT_LINES = 5
"""Lines of a thought in a video."""
FPS = 2
SUCCESS, FAILURE = "success", "failure"
COLOURS = {SUCCESS: "#2a9d8f", FAILURE: "#e76f51"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Caption:
    """What stands below a frame: what the policy did there and what came of it. Empty texts and None are left out."""

    thought: str = ""
    """Untrusted text of a model."""
    action: str = ""
    """Likewise, or the action in words."""
    reward: float | None = None
    value: float | None = None
    """What the policy expected from here on, in reward units."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownEpisode:
    """One episode, by T of its frames, for people to look at."""

    title: str
    """Of the task or the instruction; untrusted too."""
    frames: Frames
    """[T, H, W, 3], T >= 1."""
    captions: Sequence[Caption]
    """T captions, each of the frame that the policy saw when it acted."""
    is_success: bool
    episode_return: float
    steps: int
    """Turns, or env steps: no frame is kept of those inside a chunk."""
    seed: int

    def __post_init__(self) -> None:
        if len(self.frames) != len(self.captions) or not len(self.frames):
            raise ValueError(
                f"an episode needs one caption per frame and at least one frame, got {len(self.captions)} captions "
                f"for {len(self.frames)} frames"
            )

    @property
    def outcome(self) -> str:
        """`SUCCESS` or `FAILURE`."""
        return SUCCESS if self.is_success else FAILURE


def episodes_page(
    episodes: Sequence[ShownEpisode], heading: str, note: str = "", by_instruction: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The page's HTML: how the episodes ended, then a strip of captioned frames of each.

    Args:
        episodes: in the order of the page; beyond `MAX_EPISODES` they are thinned out evenly.
        heading: e.g. the task and the step of the checkpoint.
        note: one sentence below it.
        by_instruction: rows of a table that stands above the episodes, each of the same columns.
    """
    shown = episodes[:: -(-len(episodes) // MAX_EPISODES) or 1]
    counts = {name: sum(episode.outcome == name for episode in shown) for name in COLOURS}
    tiles = {"episodes": len(episodes)}
    if episodes:
        tiles |= {
            "success": f"{np.mean([episode.is_success for episode in episodes]):.0%}",
            "mean return": f"{np.mean([episode.episode_return for episode in episodes]):.3g}",
            "mean length": f"{np.mean([episode.steps for episode in episodes]):.3g}",
        }
    return render(
        "episodes.html.j2",
        title=heading,
        note=note,
        tiles=tiles,
        shown_counts=counts,
        colours=COLOURS,
        columns=list(by_instruction[0]) if by_instruction else [],
        rows=[list(row.values()) for row in by_instruction],
        num_hidden=len(episodes) - len(shown),
        episodes=[{"about": episode, "moments": _moments(episode)} for episode in shown],
    )


def write_captioned_video(file: Path, episode: ShownEpisode, fps: int = FPS) -> Path:
    """Writes an episode as H.264, each frame with its caption below, and returns the file; it appears whole or not."""
    return write_mp4(file, compose_captioned(episode), fps)


def compose_captioned(episode: ShownEpisode) -> list[Frames]:
    """T images [H', W', 3], H' and W' even: a frame, and below it its caption, never over it.

    The strip of the captions is as high as the longest of them needs, with a thought cut to `THOUGHT_LINES` lines.
    """
    height, width = episode.frames.shape[1:3]
    scale = max(1, -(-VIDEO_PX // width))
    wide, high = (scale * side + scale * side % 2 for side in (width, height))
    plain, bold = (_font(name) for name in ("DejaVuSans", "DejaVuSans-Bold"))
    columns = int((wide - 2 * MARGIN_PX) / plain.getlength("n"))
    thoughts = [_wrapped(caption.thought, columns) for caption in episode.captions]
    line_px = 19
    strip_px = 2 * MARGIN_PX + line_px * (2 + max(map(len, thoughts)))
    strip_px += strip_px % 2
    images = []
    for step, (frame, caption, thought) in enumerate(zip(episode.frames, episode.captions, thoughts, strict=True)):
        page = Image.new("RGB", (wide, high + strip_px), PAPER)
        enlarged = Image.fromarray(np.ascontiguousarray(frame)).resize(
            (scale * width, scale * height), Image.Resampling.NEAREST
        )
        page.paste(enlarged, (0, 0))
        draw = ImageDraw.Draw(page)
        top = high + MARGIN_PX
        draw.line([(0, high), (wide * (step + 1) // len(episode.frames), high)], fill=ACCENT, width=3)
        facts = [f"{step + 1} of {len(episode.frames)}"]
        facts += [f"reward {caption.reward:+.2f}"] if caption.reward is not None else []
        facts += [f"value {caption.value:.2f}"] if caption.value is not None else []
        draw.text((MARGIN_PX, top), ",  ".join(facts), fill=_GREY, font=plain)
        draw.text(
            (wide - MARGIN_PX, top), f"seed {episode.seed}, {episode.outcome}", fill=_GREY, font=plain, anchor="ra"
        )
        action = _wrapped(caption.action, int(0.85 * columns), lines=1)
        draw.text((MARGIN_PX, top + line_px), action[0] if action else "", fill=INK, font=bold)
        for line, text in enumerate(thought):
            draw.text((MARGIN_PX, top + (2 + line) * line_px), text, fill=INK, font=plain)
        images.append(np.asarray(page))
    return images


_GREY = tuple(int(0.55 * dark + 0.45 * light) for dark, light in zip(INK, FAINT, strict=True))


def _font(name: str) -> ImageFont.FreeTypeFont:
    """A font with most scripts' letters; matplotlib brings it."""
    return ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts", "ttf", f"{name}.ttf"), 13)


def _wrapped(text: str, columns: int, lines: int = THOUGHT_LINES) -> list[str]:
    """Lines of a text, the last one with dots where more was cut off; breaks and control characters are spaces."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text[:MAX_TEXT])
    return textwrap.wrap(plain, max(columns, 8), max_lines=lines, placeholder=" …")


def _moments(episode: ShownEpisode) -> list[dict[str, Any]]:
    """The frames of an episode that are shown, each with its number, its image and its caption."""
    places = sorted(set(np.linspace(0, len(episode.frames) - 1, MAX_FRAMES).astype(int).tolist()))
    moments = []
    for place in places:
        image, data = Image.fromarray(np.ascontiguousarray(episode.frames[place])), BytesIO()
        image.thumbnail((PAGE_PX, PAGE_PX * max(1, image.height // image.width)))
        image.save(data, format="webp", lossless=max(image.size) < 128, quality=85)
        caption = episode.captions[place]
        moments.append(
            {
                "number": place + 1,
                "picture": inline(data.getvalue(), "webp"),
                "thought": caption.thought[:MAX_TEXT],
                "action": caption.action[:MAX_TEXT],
                "reward": caption.reward,
                "value": caption.value,
            }
        )
    return moments
