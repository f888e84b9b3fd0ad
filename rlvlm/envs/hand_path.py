"""Drawing the path of the hand, its positions in the moments before, onto an image. Used by envs that have a hand."""

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from rlvlm.core.steps import FloatArray

_OLD, _NEW = np.array((120, 20, 160)), np.array((0, 225, 240))  # purple to cyan, colours that scenes hardly ever have
_EDGE = (255, 255, 255)
_SIZE = 1 / 90
"""Width of the line, as a share of the image's height."""


def paint_path(image: NDArray[np.uint8], path: FloatArray) -> NDArray[np.uint8]:
    """Returns a copy of an image with a line along `path`, from purple (old) to cyan (new), and a dot at its end.

    Args:
        image: [H, W, 3].
        path: [N, 2] in order of time, shares of the image's width from the left and of its height from the top; a point
            that is not finite breaks the line.
    """
    height, width = image.shape[:2]
    canvas = Image.fromarray(image)
    pen = ImageDraw.Draw(canvas)
    points = path * np.array([width, height]) - 0.5  # to pixel positions: centres of pixels are integers
    thick = max(1, round(height * _SIZE))
    is_known = np.isfinite(points.sum(axis=1))
    legs = [(n, (*points[n - 1], *points[n])) for n in range(1, len(points)) if is_known[n - 1] and is_known[n]]
    for _, leg in legs:  # all edges first, because the line may cross itself
        pen.line(leg, fill=_EDGE, width=thick + 2)
    for n, leg in legs:
        colour = (_OLD + n / (len(points) - 1) * (_NEW - _OLD)).astype(int).tolist()
        pen.line(leg, fill=tuple(colour), width=thick)
    if len(points) and is_known[-1]:
        x, y = points[-1].tolist()
        radius = 1.5 * thick
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=tuple(_NEW.tolist()), outline=_EDGE)
    return np.asarray(canvas)


def project(
    points: NDArray[np.floating], position: NDArray[np.floating], axes: NDArray[np.floating], fovy_deg: float
) -> FloatArray:
    """Returns [N, 2], `points` as a pinhole camera with a square image sees them, for `paint_path`; NaN behind the
    camera.

    Args:
        points: [N, 3] in the world.
        position: [3] of the camera.
        axes: [3, 3] whose columns are its right, its up, and backwards.
        fovy_deg: its full vertical opening angle, degrees.
    """
    seen = (points - position) @ axes  # the camera looks along -z
    depth = np.where(seen[:, 2] < 0, -seen[:, 2], np.nan)
    half = depth * math.tan(math.radians(fovy_deg) / 2)
    return np.stack([0.5 + seen[:, 0] / half / 2, 0.5 - seen[:, 1] / half / 2], axis=1).astype(np.float32)
