"""Images of whole grids from their encodings, many at once, identical to MiniGrid's own to the pixel."""

from functools import lru_cache

import numpy as np
from minigrid.core.constants import OBJECT_TO_IDX
from minigrid.core.grid import Grid
from minigrid.core.world_object import WorldObj
from numpy.typing import NDArray

from rlvlm.core.steps import Frames

TILE_PX = 32
"""Side of a cell in pixels, as in MiniGrid."""
_DIRECTIONS = np.array([(1, 0), (0, 1), (-1, 0), (0, -1)])
_OPEN = 0
_CODE = 16  # more than the number of object kinds, of colours or of states
_WALL, _DOOR = OBJECT_TO_IDX["wall"], OBJECT_TO_IDX["door"]


def paint(grids: NDArray[np.int64], agents: NDArray[np.int64], view_size: int, sees_through: bool) -> Frames:
    """Returns images [N, H * 32, W * 32, 3].

    Args:
        grids: [N, W, H, 3] kind, colour and state of each cell, as MiniGrid encodes them.
        agents: [N, 3] column, row and direction of the agent.
        view_size: side of the agent's view, in cells; the view is drawn lighter.
        sees_through: whether the agent sees through walls.
    """
    count, width, height = grids.shape[:3]
    is_lit = visible(grids, agents, view_size, sees_through)
    heading = np.zeros((count, width, height), np.int64)
    heading[np.arange(count), agents[:, 0], agents[:, 1]] = 1 + agents[:, 2]
    # encode each cell as one number, so that each distinct cell is drawn once
    codes = ((grids[..., 0] * _CODE + grids[..., 1]) * _CODE + grids[..., 2]) * _CODE + heading * 2 + is_lit
    distinct, indices = np.unique(codes, return_inverse=True)
    tiles = np.stack([_tile(int(code)) for code in distinct])
    frames = np.empty((count, height, TILE_PX, width, TILE_PX, 3), np.uint8)
    for frame, place in zip(frames, indices.reshape(codes.shape), strict=True):
        for row in range(height):  # a row at a time stays in the processor's cache
            frame[row] = tiles[place[:, row]].transpose(1, 0, 2, 3)
    return frames.reshape(count, height * TILE_PX, width * TILE_PX, 3)


def visible(
    grids: NDArray[np.int64], agents: NDArray[np.int64], view_size: int, sees_through: bool
) -> NDArray[np.bool_]:
    """Returns [N, W, H], the cells that each agent sees, by MiniGrid's own rule, for all grids at once."""
    count, width, height = grids.shape[:3]
    forward = _DIRECTIONS[agents[:, 2]]
    right = np.stack([-forward[:, 1], forward[:, 0]], axis=1)
    across, ahead = np.arange(view_size) - view_size // 2, view_size - 1 - np.arange(view_size)
    cells = (
        agents[:, None, None, :2]
        + right[:, None, None] * across[None, :, None, None]
        + forward[:, None, None] * ahead[None, None, :, None]
    )  # [N, view, view, 2]; the agent stands in the middle of the last row of its view
    inside = ((cells >= 0) & (cells < (width, height))).all(-1)
    rows = np.arange(count)[:, None, None]
    column, row = np.where(inside, cells[..., 0], 0), np.where(inside, cells[..., 1], 0)
    seen = inside
    if not sees_through:  # a wall or a door that is not open hides the cells behind it
        kinds, states = grids[rows, column, row][..., 0], grids[rows, column, row][..., 2]
        blocked = (kinds == _WALL) | ((kinds == _DOOR) & (states != _OPEN)) | ~inside
        seen = inside & _lit(blocked)
    mask = np.zeros((count, width, height), bool)
    np.logical_or.at(mask, (rows, column, row), seen)
    return mask


def _lit(blocked: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Returns [N, view, view], the cells reached by light that starts at the agent and is stopped by `blocked`."""
    size = blocked.shape[1]
    lit = np.zeros_like(blocked)
    lit[:, size // 2, size - 1] = True
    # row by row away from the agent, each first to the right and then to the left, as MiniGrid spreads light
    for row in reversed(range(size)):
        for columns, step in ((range(size - 1), 1), (range(size - 1, 0, -1), -1)):
            for column in columns:
                passes = lit[:, column, row] & ~blocked[:, column, row]
                lit[:, column + step, row] |= passes
                if row > 0:
                    lit[:, column + step, row - 1] |= passes
                    lit[:, column, row - 1] |= passes
    return lit


@lru_cache(maxsize=4_096)
def _tile(code: int) -> Frames:
    """Returns one cell [32, 32, 3], drawn by MiniGrid; must not be written to."""
    rest, flags = divmod(code, _CODE)
    rest, state = divmod(rest, _CODE)
    kind, colour = divmod(rest, _CODE)
    heading, is_lit = divmod(flags, 2)
    thing = WorldObj.decode(kind, colour, state)
    return Grid.render_tile(thing, heading - 1 if heading else None, bool(is_lit), TILE_PX).astype(np.uint8)
