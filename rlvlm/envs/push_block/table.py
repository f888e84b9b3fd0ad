"""The table of `push_block` as pure functions of its states: moving, drawing, and what a script would do.

Everything works on N tables at once: a state is a row of 10 numbers, `[N, 10]` float32, which is the snapshot too.
Units: half the table's width, so that the table spans [-1, 1] in x (to the right) and y (away from the viewer).
"""

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray, Frames

STATE_SIZE = 10
HAND, ASKED, OTHER, PAD = slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)
COLOURS = 8
"""Where in a state the hand, the block asked for, the other block and the pad are; then both blocks' colours."""
COLOUR_NAMES = ("red", "green", "blue", "yellow")
MAX_STEP = 0.09
"""How far the hand moves at action 1, per axis."""
HAND_RADIUS, BLOCK_HALF, PAD_HALF = 0.08, 0.14, 0.2
PAD_TOLERANCE = 0.12
"""Largest distance per axis, at success, between the middles of block and pad."""

_TABLE, _PAD, _HAND = (218, 208, 190), (250, 250, 250), (45, 45, 50)
_PALETTE = np.array([(204, 45, 40), (52, 150, 70), (48, 90, 200), (228, 186, 40)], np.float32)
_GRAIN = 1e-3
"""Of image keys: 0.1 of a pixel at 200 pixels."""


def random_tables(rng: np.random.Generator) -> FloatArray:
    """One start `[10]`: hand on the left, two blocks of different colours in the middle, pad on the right."""
    rows = rng.permutation(2) * 2 - 1
    hand = (rng.uniform(-0.8, -0.7), rng.uniform(-0.2, 0.2))
    blocks = [(rng.uniform(-0.2, 0.0), row * rng.uniform(0.28, 0.45)) for row in rows]
    pad = (rng.uniform(0.45, 0.65), rng.uniform(-0.45, 0.45))
    colours = rng.permutation(len(COLOUR_NAMES))[:2]
    return np.array([*hand, *blocks[0], *blocks[1], *pad, *colours], np.float32)


def moved(states: FloatArray, moves: FloatArray) -> FloatArray:
    """States `[N, 10]` after the hand moved by `moves` `[N, 2]`; a block it runs into goes along, without slipping."""
    after = states.copy()
    after[:, HAND] = np.clip(states[:, HAND] + moves, -1.0, 1.0)
    step = after[:, HAND] - states[:, HAND]
    reach = HAND_RADIUS + BLOCK_HALF
    rows = np.arange(len(states))
    for block in (ASKED, OTHER):
        gap = states[:, block] - after[:, HAND]
        axis = np.abs(gap).argmax(axis=1)  # of the side that is touched
        depth = reach - np.abs(gap[rows, axis])
        is_pushed = (depth > 0) & (step[rows, axis] * gap[rows, axis] > 0)
        share = np.minimum(depth / np.maximum(np.abs(step[rows, axis]), 1e-6), 1.0)  # of the step spent in contact
        limit = 1.0 - BLOCK_HALF
        after[:, block] = np.clip(after[:, block] + np.where(is_pushed, share, 0.0)[:, None] * step, -limit, limit)
    return after


def is_solved(states: FloatArray) -> NDArray[np.bool_]:
    """`[N]` whether the asked block lies on the pad."""
    return np.abs(states[:, ASKED] - states[:, PAD]).max(axis=1) < PAD_TOLERANCE


def distance(states: FloatArray) -> FloatArray:
    """`[N]` from the asked block to the pad."""
    return np.hypot(*(states[:, ASKED] - states[:, PAD]).T)


def scripted_moves(states: FloatArray) -> FloatArray:
    """`[N, 2]` in [-1, 1]: to the middle of the asked block's left side, then straight to the pad."""
    to_block = states[:, ASKED] - states[:, HAND]
    reach = HAND_RADIUS + BLOCK_HALF
    is_level = np.abs(to_block[:, 1]) < 0.06
    to_touch = to_block.copy()
    to_touch[:, 0] -= np.where(is_level, reach - 0.02, reach + 0.08)
    is_there = (np.abs(to_block[:, 1]) < 0.1) & (to_block[:, 0] < reach + 0.02)
    goal = np.where(is_there[:, None], states[:, PAD] - states[:, ASKED], to_touch) / MAX_STEP
    longest = np.maximum(np.abs(goal).max(axis=1, keepdims=True), 1.0)
    return (goal / longest).astype(np.float32)


def draw(states: FloatArray, size_px: int) -> Frames:
    """Images `[N, size_px, size_px, 3]` from above, with smooth edges; which block is asked for cannot be seen."""
    states = np.rint(states / _GRAIN).astype(np.float32) * np.float32(_GRAIN)
    across = (np.arange(size_px, dtype=np.float32) + 0.5) * np.float32(2 / size_px) - 1
    up = across[::-1, None]
    channels = np.empty((3, len(states), size_px, size_px), np.float32)
    channels[:] = np.reshape(_TABLE, (3, 1, 1, 1))

    def paint(outside: FloatArray, colours: NDArray[np.floating]) -> None:
        """Covers what is less than half a pixel outside [N, H, W] with `colours` [3, N or 1]."""
        cover = np.clip(0.5 - outside * np.float32(size_px / 2), 0.0, 1.0)
        for channel, colour in zip(channels, colours.astype(np.float32), strict=True):
            channel += cover * (colour[:, None, None] - channel)

    def square(middle: FloatArray, half: float) -> FloatArray:
        beside = np.abs(across - middle[:, 0, None, None]) - np.float32(half)
        above = np.abs(up - middle[:, 1, None, None]) - np.float32(half)
        return np.maximum(beside, above)

    paint(square(states[:, PAD], PAD_HALF), np.reshape(_PAD, (3, 1)))
    blocks = np.stack([states[:, ASKED], states[:, OTHER]])
    colours = np.rint(states[:, COLOURS : COLOURS + 2]).astype(np.int64)
    order, rows = np.argsort(colours, axis=1), np.arange(len(states))
    for place in (0, 1):
        chosen = order[:, place]
        paint(square(blocks[chosen, rows], BLOCK_HALF), _PALETTE[colours[rows, chosen]].T)
    hand = states[:, HAND]
    paint(
        np.hypot(across - hand[:, 0, None, None], up - hand[:, 1, None, None]) - np.float32(HAND_RADIUS),
        np.reshape(_HAND, (3, 1)),
    )
    return np.rint(channels).astype(np.uint8).transpose(1, 2, 3, 0).copy()


def image_key(states: FloatArray) -> NDArray[np.int64]:
    """`[N, 10]`: equal keys look the same."""
    return np.rint(states / _GRAIN).astype(np.int64)
