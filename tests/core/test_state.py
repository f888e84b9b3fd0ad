"""The mixin of state: every kind of attribute is taken, comes back, and goes on as it would have."""

from collections import Counter, deque
from typing import Any

import numpy as np
import pytest
import torch

from rlvlm.core.state import Stateful


class Part(Stateful):
    STATE = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Whole(Stateful):
    STATE = (
        *("number", "text", "none", "array", "recent", "counts", "noise", "draws", "part"),
        *("_network", "optimizer=_adam"),
    )

    def __init__(self) -> None:
        self.number, self.text, self.none = 0.0, "", None
        self.array = np.zeros(2, np.float32)
        self.recent: deque[int] = deque(maxlen=2)
        self.counts: Counter[str] = Counter()
        self.noise, self.draws = np.random.default_rng(0), torch.Generator().manual_seed(0)
        self.part = Part()
        self._network = torch.nn.Linear(2, 1)
        self._adam = torch.optim.Adam(self._network.parameters())

    def go_on(self) -> list[Any]:
        """Moves everything, and returns what was drawn."""
        self.number, self.text = self.number + 1, self.text + "a"
        self.array += 1
        self.recent.append(int(self.number))
        self.counts["a"] += 1
        self.part.count += 1
        self._adam.zero_grad()
        self._network(torch.ones(2)).sum().backward()
        self._adam.step()
        drawn = [self.noise.random(), torch.rand(1, generator=self.draws).item()]
        weights = [value.tolist() for value in self._network.state_dict().values()]
        return [
            *drawn,
            *weights,
            self.number,
            self.text,
            self.array.tolist(),
            self.recent,
            self.counts,
            self.part.count,
        ]


def test_an_object_goes_on_from_its_state_as_it_would_have():
    whole, again = Whole(), Whole()
    for _ in range(3):
        whole.go_on()
    state = whole.get_state()
    assert {"network", "optimizer"} <= state.keys(), "names of checkpoints, not of attributes"
    wanted = whole.go_on()  # the state is a copy: what comes after does not move it
    state["number"], state["counts"] = np.float64(state["number"]), dict(state["counts"])  # as files give them
    again.go_on()
    again.set_state(state)
    assert again.go_on() == wanted
    assert again.recent.maxlen == 2 and again.none is None and type(again.number) is float


def test_a_state_that_lacks_a_name_is_refused():
    with pytest.raises(KeyError, match="count"):
        Part().set_state({})
