"""An array that grows by rows: visited states of novelty, the labels that a reward model is fitted to."""

import numpy as np
from numpy.typing import DTypeLike, NDArray


class GrowingArray:
    """Rows of one shape, appended at amortised constant cost.

    Args:
        row_shape: shape of one row; `()` for numbers.
        dtype: type of the elements.
    """

    def __init__(self, row_shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> None:
        self._memory: NDArray = np.empty((1024, *row_shape), dtype)
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    @property
    def rows(self) -> NDArray:
        """All rows so far, [N, *row_shape]: a view that the next `append` may outdate."""
        return self._memory[: self._num_rows]

    def append(self, rows: NDArray) -> None:
        """Appends rows [M, *row_shape].

        Raises:
            ValueError: the rows have another shape.
        """
        if rows.shape[1:] != self._memory.shape[1:]:
            raise ValueError(f"rows must have shape {self._memory.shape[1:]}, got {rows.shape[1:]}")
        needed = self._num_rows + len(rows)
        if needed > len(self._memory):
            # doubled, so that n appends copy O(n) rows in all
            larger = np.empty((max(needed, 2 * len(self._memory)), *self._memory.shape[1:]), self._memory.dtype)
            larger[: self._num_rows] = self.rows
            self._memory = larger
        self._memory[self._num_rows : needed] = rows
        self._num_rows = needed
