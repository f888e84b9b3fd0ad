"""Judges that measure a property of the image and ignore the goal, so that a policy can fool them.

`--judge.backend rlvlm.testing.fooled:motion` tries one. Bench, preflight and monitor must not let any of them pass.
"""

from collections.abc import Callable, Sequence

import numpy as np

from rlvlm.core.judging import Clip, Label, Query, Score, Stamp, Status, Verdict
from rlvlm.core.steps import Frames
from rlvlm.judges.config import JudgeConfig

_DARK = 70
"""Grey level below which a pixel counts as hand or arm: the darkest thing on the table of `push_block`."""


class MeasuringJudge:
    """Scores a clip by one number in [0, 1], whatever the goal, and prefers the side with the larger one.

    Args:
        name: name of the measured property.
        measure: function of images [N, H, W, 3], N >= 1, in order of time.
    """

    def __init__(self, name: str, measure: Callable[[Frames], float]) -> None:
        self._measure = measure
        self.stamp = Stamp(judge=name, revision="1", prompt="measure/1", decoding="")

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """Returns one verdict per query, in order."""
        labels = [Label.of(self._measure(query.left), self._measure(query.right)) for query in queries]
        return [Verdict(status=Status.of(label), label=label, stamp=self.stamp) for label in labels]

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """Returns one score per clip, in order."""
        values = [min(max(self._measure(clip.frames), 0.0), 1.0) for clip in clips]
        return [Score(status=Status.OK, value=value, stamp=self.stamp) for value in values]


def motion(_: JudgeConfig) -> MeasuringJudge:
    """Returns a judge of the change from one image to the next."""

    def measure(frames: Frames) -> float:
        # a change of half of the pixels by half of the scale is 1
        return 4 * float(np.abs(np.diff(frames.astype(np.float32), axis=0)).mean()) / 255 if len(frames) > 1 else 0.0

    return MeasuringJudge("motion", measure)


def brightness(_: JudgeConfig) -> MeasuringJudge:
    """Returns a judge of the last image's brightness."""
    return MeasuringJudge("brightness", lambda frames: float(frames[-1].mean()) / 255)


def redness(_: JudgeConfig) -> MeasuringJudge:
    """Returns a judge of the last image's redness, against its green and blue."""

    def measure(frames: Frames) -> float:
        red, green, blue = frames[-1].mean((0, 1)) / 255
        return 0.5 + red - (green + blue) / 2

    return MeasuringJudge("redness", measure)


def contrast(_: JudgeConfig) -> MeasuringJudge:
    """Returns a judge of the spread of the last image's grey levels."""
    return MeasuringJudge("contrast", lambda frames: float(frames[-1].astype(np.float32).std()) / 128)


def hand_distance(_: JudgeConfig) -> MeasuringJudge:
    """Returns a judge of the distance of the dark pixels, the hand, from their start, in image sides."""

    def measure(frames: Frames) -> float:
        is_dark = [frame.max(-1) < _DARK for frame in (frames[0], frames[-1])]
        if not all(dark.any() for dark in is_dark):  # no hand
            return 0.0
        first, last = (np.argwhere(dark).mean(0) / len(dark) for dark in is_dark)
        return float(np.linalg.norm(last - first))

    return MeasuringJudge("hand distance", measure)


def arm_in_view(_: JudgeConfig) -> MeasuringJudge:
    """Returns a judge of the dark share, the arm, of the last image, times ten."""
    return MeasuringJudge("arm in view", lambda frames: 10 * float((frames[-1].max(-1) < _DARK).mean()))


def long_episodes(_: JudgeConfig) -> MeasuringJudge:
    """Returns a judge of the number of different images, out of eight."""
    return MeasuringJudge("long episodes", lambda frames: len({frame.tobytes() for frame in frames}) / 8)
