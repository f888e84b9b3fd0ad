"""The replay of an off-policy algorithm: one table, a transition per row, inside the learner."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlvlm.core.steps import FloatArray, Transitions

_TRANSITION_COLUMNS = tuple(field.name for field in fields(Transitions))
_DRAWN = ("obs", "actions", "next_obs", "terminated", "rewards")
"""Columns that an update reads; they are adjacent, so that one gather fetches them."""
_COLUMNS = (*_DRAWN, *(name for name in _TRANSITION_COLUMNS if name not in _DRAWN), "bonuses")


@dataclass(frozen=True, slots=True)
class ReplayBatch:
    """The batch of one SAC update; tensors on the learner's device, views of one block of memory."""

    obs: Tensor
    """[B, D] observations."""
    actions: Tensor
    """[B, A] actions."""
    next_obs: Tensor
    """[B, D] next observations."""
    terminated: Tensor
    """[B] 1 if the episode terminated."""
    rewards: Tensor
    """[B] rewards of the reward source, never the env's own unless that is the source."""
    obs_and_actions: Tensor
    """[B, D + A] observations and actions side by side, as critics read them."""


class Replay:
    """The newest `capacity` transitions, each with the env's reward, the source's reward and a bonus.

    The table has its full size from the first row on, so it is never copied to grow. On a CPU the system allocates
    memory when rows are first written. Once the table is full, the oldest rows are overwritten.

    Args:
        capacity: maximum number of rows, >= 1.
        device: device of the table.
    """

    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        self.capacity = capacity
        self.device = torch.device(device)
        self._table = torch.empty(0, 0, device=self.device)
        self._places: dict[str, slice] = {}  # of each column in a row
        self._vectors: frozenset[str] = frozenset()  # columns with one number per row, without an axis for it
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
        """[N] exploration bonuses without their weight, in row order; 0 if there are none. Writing to it relabels."""
        return self._column(self._table[: self._num_rows], "bonuses")

    @property
    def obs(self) -> Tensor:
        """[N, D] observations in row order."""
        return self._column(self._table[: self._num_rows], "obs")

    @property
    def terminated(self) -> Tensor:
        """[N] 1 if the episode terminated, in row order."""
        return self._column(self._table[: self._num_rows], "terminated")

    def add(self, transitions: Transitions, rewards: FloatArray, bonuses: FloatArray | None = None) -> None:
        """Stores a batch, its rewards `[B]` and its bonuses `[B]` (None: 0); B must not exceed the capacity."""
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
        """Returns the rows `[B]` (integers below `len`) as a batch, with `rewards` `[B]` replacing the stored ones."""
        # one gather of the leading columns; the parts of an update are views of it
        gathered = self._table[:, : self._places["rewards"].stop].index_select(0, rows)
        columns = {name: self._column(gathered, name) for name in _DRAWN}
        if rewards is not None:
            columns["rewards"] = rewards
        return ReplayBatch(**columns, obs_and_actions=gathered[:, : self._places["actions"].stop])

    def transitions(self, rows: Tensor | slice) -> Transitions:
        """Returns the given rows as NumPy arrays, without the source's reward: the input of a reward source."""
        table = self._table[rows].cpu()
        return Transitions(**{name: self._column(table, name).numpy() for name in _TRANSITION_COLUMNS})

    def get_state(self) -> dict[str, Any]:
        """Returns all rows and the position of the next one."""
        table = self._table[: self._num_rows].cpu()
        columns = {name: self._column(table, name).numpy() for name in self._places}
        return {"next_row": self._next_row, "num_rows": self._num_rows, "columns": columns}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; the capacity must be the same."""
        self.__init__(self.capacity, self.device)  # drops rows added meanwhile
        columns = state["columns"]
        if columns:
            self._lay_out({name: columns[name] for name in _COLUMNS})
        self._next_row, self._num_rows = state["next_row"], state["num_rows"]
        for name, values in columns.items():
            self._column(self._table[: self._num_rows], name).copy_(torch.as_tensor(values))

    def _column(self, table: Tensor, name: str) -> Tensor:
        """Returns the view `[N, ...]` of a column in rows `[N, W]` of the table."""
        place = self._places[name]
        return table[:, place.start] if name in self._vectors else table[:, place]

    def _lay_out(self, columns: dict[str, FloatArray]) -> None:
        """Allocates the table and assigns every column, in this order, its place in a row."""
        start = 0
        for name, values in columns.items():
            width = 1 if values.ndim == 1 else values.shape[1]
            self._places[name] = slice(start, start + width)
            start += width
        self._vectors = frozenset(name for name, values in columns.items() if values.ndim == 1)
        self._table = torch.empty(self.capacity, start, device=self.device)
