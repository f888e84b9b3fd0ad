"""Converts networks and optimisers to trees of arrays, for checkpoints."""

from typing import Any

import numpy as np
import torch


def network_state(network: torch.nn.Module) -> dict[str, Any]:
    """Returns copies of the weights and buffers by name, as float32 if numpy lacks their type."""
    return {name: _array(value) for name, value in network.state_dict().items()}


def load_network(network: torch.nn.Module, state: dict[str, Any]) -> None:
    """Restores what `network_state` returned."""
    network.load_state_dict({name: torch.tensor(np.asarray(value)) for name, value in state.items()})


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the optimiser's state of each parameter, by the parameter's number; step sizes come from the config."""
    slots = optimizer.state_dict()["state"]
    return {str(index): {name: _array(value) for name, value in slot.items()} for index, slot in slots.items()}


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restores what `optimizer_state` returned; copied, since the optimiser writes in place."""
    # the groups with their step sizes stay those of the optimiser as built, which may have been given others
    slots = {
        int(index): {name: torch.tensor(np.asarray(value)) for name, value in slot.items()}
        for index, slot in state.items()
    }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": slots})


def _array(value: torch.Tensor) -> np.ndarray:
    value = value.detach().cpu()
    # np.array copies: the tensor keeps changing while the state waits to be written
    return np.array(value.float() if value.dtype == torch.bfloat16 else value)
