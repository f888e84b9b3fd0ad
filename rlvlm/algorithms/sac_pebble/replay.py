"""The memory of an off-policy algorithm: one table, a transition per row. It lives inside the learner."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlvlm.core.steps import FloatArray, Transitions

_TRANSITION_COLUMNS = tuple(field.name for field in fields(Transitions))
_DRAWN = ("obs", "actions", "next_obs", "terminated", "rewards")
"""Columns that an update reads; they lie side by side, so that one gather brings them."""
_COLUMNS = (*_DRAWN, *(name for name in _TRANSITION_COLUMNS if name not in _DRAWN), "bonuses")


@dataclass(frozen=True, slots=True)
class ReplayBatch:
    """The batch of one SAC update; tensors on the learner's device, windows into one block of memory."""

    obs: Tensor
    """[B, D]."""
    actions: Tensor
    """[B, A]."""
    next_obs: Tensor
    """[B, D]."""
    terminated: Tensor
    """[B]."""
    rewards: Tensor
    """[B] from the reward source, never the env's own unless that is the source."""
    obs_and_actions: Tensor
    """[B, D + A] side by side, as critics read them."""


class Replay:
    """The newest `capacity` transitions, each with the env's reward and, beside it, the source's and a bonus.

    The table has its full size from the first row on, so it is never copied to grow. On a CPU the system gives memory
    to rows as they are first written; until then they take none. Once the table is full, the oldest are overwritten.

    Args:
        capacity: rows kept at most, >= 1.
        device: where the table lives.
    """

    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        self.capacity = capacity
        self.device = torch.device(device)
        self._table = torch.empty(0, 0, device=self.device)
        self._places: dict[str, slice] = {}  # of each column in a row
        self._vectors: frozenset[str] = frozenset()  # columns with one number per row, and no axis for it
        self._next_row = 0
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    @property
    def rewards(self) -> Tensor:
        """[N] rewards by the source, in row order; writing to it relabels."""
        return self._column(self._table[: self._num_rows], "rewards")

    @property
    def bonuses(self) -> Tensor:
        """[N] for exploring, without their weight, in row order; 0 where there are none. Writing to it relabels."""
        return self._column(self._table[: self._num_rows], "bonuses")

    @property
    def obs(self) -> Tensor:
        """[N, D] in row order."""
        return self._column(self._table[: self._num_rows], "obs")

    @property
    def terminated(self) -> Tensor:
        """[N] 1 where the episode ended for good, in row order."""
        return self._column(self._table[: self._num_rows], "terminated")

    def add(self, transitions: Transitions, rewards: FloatArray, bonuses: FloatArray | None = None) -> None:
        """Stores a batch, its rewards `[B]` and its bonuses `[B]` (None: 0); B may not exceed the capacity."""
        count = len(rewards)
        assert count == len(transitions.obs) <= self.capacity, "one reward per transition, no more than fit"
        given = {"rewards": rewards, "bonuses": np.zeros(count, np.float32) if bonuses is None else bonuses}
        new = {name: given[name] if name in given else getattr(transitions, name) for name in _COLUMNS}
        if not self._places:
            self._lay_out(new)
        rows = np.concatenate([values.reshape(count, -1) for values in new.values()], axis=1, dtype=np.float32)
        indices = (self._next_row + np.arange(count)) % self.capacity  # a ring: the oldest rows are overwritten
        self._table[torch.from_numpy(indices)] = torch.as_tensor(rows, device=self.device)
        self._next_row = int((self._next_row + count) % self.capacity)
        self._num_rows = min(self._num_rows + count, self.capacity)

    def draw(self, rows: Tensor, rewards: Tensor | None = None) -> ReplayBatch:
        """The given rows `[B]` (integers below `len`) as a batch, with `rewards` `[B]` in place of the stored ones."""
        # one gather of the leading columns; what an update reads are windows into it
        gathered = self._table[:, : self._places["rewards"].stop].index_select(0, rows)
        columns = {name: self._column(gathered, name) for name in _DRAWN}
        if rewards is not None:
            columns["rewards"] = rewards
        return ReplayBatch(**columns, obs_and_actions=gathered[:, : self._places["actions"].stop])

    def transitions(self, rows: Tensor | slice) -> Transitions:
        """The given rows as numpy arrays, without the source's reward: what a reward source may look at."""
        table = self._table[rows].cpu()
        return Transitions(**{name: self._column(table, name).numpy() for name in _TRANSITION_COLUMNS})

    def get_state(self) -> dict[str, Any]:
        """All rows and the position of the next one."""
        table = self._table[: self._num_rows].cpu()
        columns = {name: self._column(table, name).numpy() for name in self._places}
        return {"next_row": self._next_row, "num_rows": self._num_rows, "columns": columns}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; the capacity must be the same."""
        self.__init__(self.capacity, self.device)  # rows that came meanwhile have never been
        columns = state["columns"]
        if columns:
            self._lay_out({name: columns[name] for name in _COLUMNS})
        self._next_row, self._num_rows = state["next_row"], state["num_rows"]
        for name, values in columns.items():
            self._column(self._table[: self._num_rows], name).copy_(torch.as_tensor(values))

    def _column(self, table: Tensor, name: str) -> Tensor:
        """The window `[N, ...]` of a column into rows `[N, W]` of the table."""
        place = self._places[name]
        return table[:, place.start] if name in self._vectors else table[:, place]

    def _lay_out(self, columns: dict[str, FloatArray]) -> None:
        """Makes the table; every column has, in this order, its place in a row."""
        start = 0
        for name, values in columns.items():
            width = 1 if values.ndim == 1 else values.shape[1]
            self._places[name] = slice(start, start + width)
            start += width
        self._vectors = frozenset(name for name, values in columns.items() if values.ndim == 1)
        self._table = torch.empty(self.capacity, start, device=self.device)
