"""The memory of an off-policy algorithm: one contiguous tensor per column. It lives inside the learner."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlvlm.types import FloatArray, Transitions

_FIRST_ROWS = 1024
_TRANSITION_COLUMNS = tuple(field.name for field in fields(Transitions))


@dataclass(frozen=True, slots=True)
class Batch:
    """What one SAC update reads; tensors on the learner's device."""

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


_DRAWN = frozenset(field.name for field in fields(Batch))


class Replay:
    """The newest `capacity` transitions, each with the env's reward and, beside it, the source's.

    Memory is taken as transitions come: the columns double until they reach `capacity`; after that the oldest rows
    are overwritten.

    Args:
        capacity: rows kept at most, >= 1.
        device: where the columns live.
    """

    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        self.capacity = capacity
        self.device = torch.device(device)
        self._columns: dict[str, Tensor] = {}
        self._next_row = 0
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    @property
    def rewards(self) -> Tensor:
        """[N] rewards by the source, in row order; writing to it relabels."""
        return self._columns["rewards"][: self._num_rows]

    def add(self, transitions: Transitions, rewards: FloatArray) -> None:
        """Stores a batch and its rewards `[B]`; B may not exceed the capacity."""
        count = len(rewards)
        assert count == len(transitions.obs) <= self.capacity, "one reward per transition, no more than fit"
        new = {name: getattr(transitions, name) for name in _TRANSITION_COLUMNS} | {"rewards": rewards}
        self._make_room(new, count)
        rows = (self._next_row + np.arange(count)) % self.capacity
        for name, values in new.items():
            self._columns[name][rows] = torch.as_tensor(values, dtype=torch.float32, device=self.device)
        self._next_row = int((self._next_row + count) % self.capacity)
        self._num_rows = min(self._num_rows + count, self.capacity)

    def draw(self, rows: Tensor, rewards: Tensor | None = None) -> Batch:
        """The given rows `[B]` (integers below `len`) as a batch, with `rewards` `[B]` in place of the stored ones."""
        columns = {name: column.index_select(0, rows) for name, column in self._columns.items() if name in _DRAWN}
        if rewards is not None:
            columns["rewards"] = rewards
        return Batch(**columns)

    def transitions(self, rows: Tensor | slice) -> Transitions:
        """The given rows as numpy arrays, without the source's reward: what a reward source may look at."""
        return Transitions(**{name: self._columns[name][rows].cpu().numpy() for name in _TRANSITION_COLUMNS})

    def get_state(self) -> dict[str, Any]:
        """All rows and the position of the next one."""
        rows = {name: column[: self._num_rows].cpu().numpy() for name, column in self._columns.items()}
        return {"next_row": self._next_row, "num_rows": self._num_rows, "columns": rows}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; the capacity must be the same."""
        self._columns = {}
        self._next_row, self._num_rows = state["next_row"], state["num_rows"]
        self._make_room(state["columns"], 0)
        for name, values in state["columns"].items():
            self._columns[name][: self._num_rows] = torch.as_tensor(values, device=self.device)

    def _make_room(self, like: dict[str, FloatArray], count: int) -> None:
        """Grows every column to hold `count` more rows shaped like those of `like`, up to the capacity."""
        needed = min(self._num_rows + count, self.capacity)
        held = len(self._columns["rewards"]) if self._columns else 0
        if needed <= held and self._columns:
            return
        size = max(held, min(_FIRST_ROWS, self.capacity))
        while size < needed:
            size = min(2 * size, self.capacity)
        for name, values in like.items():
            grown = torch.empty((size, *values.shape[1:]), device=self.device)
            if name in self._columns:
                grown[: self._num_rows] = self._columns[name][: self._num_rows]
            self._columns[name] = grown
