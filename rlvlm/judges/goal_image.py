"""Adds one image of the goal to every question to a judge: `--goal-image FILE` of a run or a bench."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from rlvlm.core.errors import UsageError
from rlvlm.core.foreign import read_bytes
from rlvlm.core.judging import Clip, Query, Score, Stamp, Verdict
from rlvlm.core.steps import Frames
from rlvlm.judges.judge import Judge, questions_at_once
from rlvlm.labels.images import MAX_FILE_BYTES, MAX_PIXELS
from rlvlm.vlms.stills import read_rgb

FORMATS = ("PNG", "JPEG", "WEBP")


@dataclass(frozen=True)
class GoalImageJudge:
    """Judge that is shown the same image of the goal with every question.

    It is the outermost wrapper, so that caches and label stores tell answers with the image from those without it.
    """

    judge: Judge
    image: Frames
    """[1, H, W, 3] uint8."""

    @property
    def stamp(self) -> Stamp:
        """Stamp of the judge inside: the image is part of the question."""
        return self.judge.stamp

    @property
    def at_once(self) -> int:
        """See `judge.questions_at_once`."""
        return questions_at_once(self.judge)

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        return self.judge.compare([replace(query, goal_picture=self.image) for query in queries])

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        return self.judge.score([replace(clip, goal_picture=self.image) for clip in clips])


def with_goal_image(judge: Judge, image: Frames | None) -> Judge:
    """Returns the judge with an image of the goal beside each question, or the judge itself if `image` is None."""
    return judge if image is None else GoalImageJudge(judge, image)


def read_goal_image(file: Path, size_px: int) -> Frames:
    """Reads an image file as [1, H, W, 3] uint8, upright, its longer side at most `size_px`.

    Raises:
        UsageError: the file cannot be read as an image.
    """
    try:
        pixels = read_rgb(BytesIO(read_bytes(file.expanduser(), MAX_FILE_BYTES)), FORMATS, MAX_PIXELS)
    except Exception as error:  # the decoders raise a dozen kinds of error for a damaged file
        fix = f"name a PNG, JPEG or WebP file of at most {MAX_PIXELS:,} pixels"
        raise UsageError(f"goal_image {file} cannot be read as an image: {error}", fix) from error
    image = Image.fromarray(pixels)
    image.thumbnail((size_px, size_px), Image.Resampling.BICUBIC)
    return np.asarray(image)[None]
