"""Episodes of `push_block` of all sorts, and what can be read in its images: what the scorer learns clips from.

A script pushes one of the two blocks, towards the pad or beside it, with more or less noise, and may stop half way. So
there are successes, near misses, and wrong blocks brought to the pad.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray
from rlvlm.envs.push_block import table
from rlvlm.envs.push_block.env import instruction_of
from rlvlm.pocket.scenes.pairs import Split

EPISODE_STEPS = 32
"""As the task has it."""
_P_OTHER_BLOCK = 0.25
_P_BESIDE = 0.5
_BESIDE = 0.16
"""Standard deviation of where a push beside the pad ends, per axis: around the largest distance that succeeds."""
_P_STOP = 0.4
_MAX_NOISE = 0.5
_BINS, _REACH = 31, 0.62
"""Offsets from the pad are read in so many bins between plus and minus this."""
_HELD_OUT_SEED = 50_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Push:
    """One episode."""

    snapshots: FloatArray
    """[T + 1, 10] before the first step and after each; it ends with success or the time limit."""

    @property
    def is_success(self) -> bool:
        """Whether the block asked for lies on the pad at the end."""
        return bool(table.is_solved(self.snapshots[-1:])[0])

    @property
    def instruction(self) -> str:
        """What was asked."""
        return instruction_of(self.snapshots[0])

    def thinned(self, most: int) -> "Push":
        """The same episode in at most `most` moments, evenly spread, the first and the last among them."""
        count = min(most, len(self.snapshots))
        return Push(snapshots=self.snapshots[np.linspace(0, len(self.snapshots) - 1, count).round().astype(int)])

    @property
    def other_instructions(self) -> list[str]:
        """The same for every other colour, of a block on the table or not."""
        asked = int(self.snapshots[0, table.COLOURS])
        words = table.COLOUR_NAMES[asked]
        return [self.instruction.replace(words, name) for name in table.COLOUR_NAMES if name != words]

    def is_reached(self, instruction: str, snapshot: FloatArray) -> bool:
        """Whether `instruction` would be fulfilled at `snapshot` [10]."""
        seen = snapshot[None].copy()
        if instruction == instruction_of(snapshot):
            return bool(table.is_solved(seen)[0])
        seen[:, [*range(table.ASKED.start, table.OTHER.stop)]] = snapshot[[4, 5, 2, 3]]
        seen[:, table.COLOURS : table.COLOURS + 2] = snapshot[[table.COLOURS + 1, table.COLOURS]]
        return instruction == instruction_of(seen[0]) and bool(table.is_solved(seen)[0])


def collect_pushes(count: int, split: Split, seed: int) -> list[Push]:
    """`count` episodes, the splits' from different seeds."""
    rng = np.random.default_rng(seed + (_HELD_OUT_SEED if split == "held_out" else 0))
    states = np.stack([table.random_tables(rng) for _ in range(count)])
    pushes_other = rng.random(count) < _P_OTHER_BLOCK
    beside = np.where(rng.random((count, 1)) < _P_BESIDE, rng.normal(0, _BESIDE, (count, 2)), 0.0)
    noise = rng.uniform(0, _MAX_NOISE, (count, 1))
    stops = np.where(rng.random(count) < _P_STOP, rng.integers(1, EPISODE_STEPS, count), EPISODE_STEPS)
    trail, ends = [states], np.full(count, EPISODE_STEPS)
    for step in range(EPISODE_STEPS):
        seen = states.copy()
        seen[pushes_other, table.ASKED], seen[pushes_other, table.OTHER] = (
            states[pushes_other, table.OTHER], states[pushes_other, table.ASKED],
        )  # fmt: skip
        seen[:, table.PAD] += beside.astype(np.float32)
        moves = table.scripted_moves(seen) + noise * rng.standard_normal((count, 2))
        moves[stops <= step] = 0.0
        states = table.moved(states, (np.clip(moves, -1, 1) * table.MAX_STEP).astype(np.float32))
        trail.append(states)
        ends = np.where(table.is_solved(states), np.minimum(ends, step + 1), ends)
    told = np.stack(trail, axis=1)
    return [Push(snapshots=told[row, : end + 1]) for row, end in enumerate(ends.tolist())]


def readable(snapshots: FloatArray) -> NDArray[np.int64]:
    """[N, 12] what there is to read in images of `snapshots` [N, 10], for each colour in turn.

    Offset of its block from the pad in x and in y, as a bin (0: there is no such block), and whether it lies on the pad
    (0: no such block, 1: no, 2: yes).
    """
    told = np.zeros((len(snapshots), len(table.COLOUR_NAMES), 3), np.int64)
    rows = np.arange(len(snapshots))
    for place, block in enumerate((table.ASKED, table.OTHER)):
        colour = np.rint(snapshots[:, table.COLOURS + place]).astype(int)
        offset = snapshots[:, block] - snapshots[:, table.PAD]
        told[rows, colour, :2] = 1 + np.clip((offset + _REACH) / (2 * _REACH) * _BINS, 0, _BINS - 1).astype(int)
        told[rows, colour, 2] = 1 + (np.abs(offset).max(axis=1) < table.PAD_TOLERANCE)
    return told.reshape(len(snapshots), -1)


READABLE_SIZES = (_BINS + 1, _BINS + 1, 3) * len(table.COLOUR_NAMES)
"""How many values each column of `readable` may take."""
