"""State for an exact continuation, as a tree of numbers, texts and arrays: a class names its attributes."""

from collections import deque
from collections.abc import Iterator
from copy import copy
from typing import Any, ClassVar

import numpy as np


class Stateful:
    """Returns and restores the attributes that `STATE` names.

    An attribute is a number, a text, None, an array, a list, deque or dict of these, a generator of NumPy or torch, a
    network, an optimiser, or an object with its own `get_state` and `set_state`. A subclass extends both methods if a
    checkpoint holds something in another form than memory.
    """

    STATE: ClassVar[tuple[str, ...]] = ()
    """The attributes. In the tree, which checkpoints hold, each has its name without underscores in front; an entry
    `tally=_counts` gives another, which earlier checkpoints have.
    """

    def get_state(self) -> dict[str, Any]:
        """Returns a copy of everything that `STATE` names."""
        return {name: _taken(getattr(self, attribute)) for name, attribute in self._named()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned, here or in an object that was built in the same way.

        Raises:
            KeyError: the state lacks a name.
        """
        for name, attribute in self._named():
            own = getattr(self, attribute)
            if not _restored(own, state[name]):
                setattr(self, attribute, _like(own, state[name]))

    def _named(self) -> Iterator[tuple[str, str]]:
        """Yields the name in the tree and the attribute of each entry of `STATE`."""
        for entry in self.STATE:
            name, _, attribute = entry.rpartition("=")
            yield name or attribute.lstrip("_"), attribute


def _taken(value: Any) -> Any:
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if hasattr(value, "state_dict"):
        from rlvlm.core.torch_state import network_state, optimizer_state  # torch is slow to import

        return optimizer_state(value) if hasattr(value, "param_groups") else network_state(value)
    if hasattr(value, "get_state"):
        state = value.get_state()
        return state.numpy() if hasattr(state, "numpy") else state  # a generator of torch gives a tensor
    return list(value) if isinstance(value, deque) else copy(value)


def _restored(own: Any, value: Any) -> bool:
    """Restores the state of `own` if it is such an object, and returns whether it is."""
    if isinstance(own, np.random.Generator):
        own.bit_generator.state = value
    elif hasattr(own, "state_dict"):
        from rlvlm.core.torch_state import load_network, load_optimizer

        (load_optimizer if hasattr(own, "param_groups") else load_network)(own, value)
    elif hasattr(own, "set_state"):
        if isinstance(value, np.ndarray):  # a generator of torch needs a tensor
            import torch

            value = torch.tensor(value)
        own.set_state(value)
    else:
        return False
    return True


def _like(own: Any, value: Any) -> Any:
    """Returns a copy of `value` in the attribute's type: files may hold NumPy numbers and plain lists."""
    if isinstance(own, deque):
        return deque(value, own.maxlen)
    is_plain = isinstance(own, bool | int | float | str | list | dict)
    return type(own)(value) if is_plain and value is not None else copy(value)
