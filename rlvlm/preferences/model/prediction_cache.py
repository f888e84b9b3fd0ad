"""How networks read rows: in passes that suit the machine, and each image but once. Used by the reward model."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlvlm.core.steps import FloatArray


@torch.no_grad()
def read_in_passes(
    read: Callable[[Tensor], Tensor], rows_of: Callable[[slice], Tensor], num: int, per_pass: int
) -> Tensor:
    """What a network makes of rows, in passes of one size whatever their number: the last one is filled up.

    Matrix products choose their kernel by the number of rows, and kernels round differently. With one size, a row comes
    out the same in whatever company it is read.

    Args:
        read: what the network makes of `[per_pass, ...]`.
        rows_of: the rows in a part of 0 to `num`.
        num: of rows, >= 1.
        per_pass: rows read at once.

    Returns:
        [num, ...].
    """
    made = []
    for first in range(0, num, per_pass):
        rows = rows_of(slice(first, min(first + per_pass, num)))
        filling = rows[-1:].expand(per_pass - len(rows), *rows.shape[1:])
        made.append(read(torch.cat([rows, filling]))[: len(rows)])
    return torch.cat(made)


class PredictionCache:
    """The readings of everything that has a name, until they are forgotten because the ensemble has changed.

    A reading depends on its image alone, not on when or in what company it was read. So this only saves work: it is
    no part of a run's state, and whoever looks in between changes nothing.

    Args:
        num_members: K.
        capacity: readings kept, >= 1; when there are more, all are forgotten. With names of 32 bytes one takes some
            250 bytes, Python's own included.
    """

    def __init__(self, num_members: int, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._values = np.empty((capacity, num_members), np.float32)
        self._places: dict[bytes, int] = {}

    def forget(self) -> None:
        """Everything is to be read anew."""
        self._places.clear()

    def of(self, names: Sequence[bytes], read: Callable[[NDArray[np.int64]], FloatArray]) -> FloatArray:
        """The readings of what `names` name.

        Args:
            names: U of them, no two alike.
            read: gives `[M, K]` readings for places `[M]` in `names`; asked only for those that are not known.

        Returns:
            [U, K].
        """
        places = np.array([self._places.get(name, -1) for name in names], np.int64)
        unknown = np.flatnonzero(places < 0)
        values = self._values[places]  # the rows of the unknown are overwritten
        if len(unknown):
            values[unknown] = read(unknown)
            if len(self._places) + len(unknown) > self._capacity:
                self._places.clear()
            first, kept = len(self._places), unknown[: self._capacity]
            self._places.update((names[place], first + at) for at, place in enumerate(kept.tolist()))
            self._values[first : first + len(kept)] = values[kept]
        return values
