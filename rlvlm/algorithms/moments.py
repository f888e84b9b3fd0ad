"""What an Adam remembers of each parameter, as a state tree and back."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn


def moments_of(optimizer: torch.optim.Optimizer, network: nn.Module) -> dict[str, dict[str, np.ndarray]]:
    """By the parameters' names in `network`; empty for one that has not been stepped."""
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in network.named_parameters()}
    return {name: {key: value.cpu().numpy() for key, value in state.items()} for name, state in states.items()}


def take_moments(optimizer: torch.optim.Optimizer, network: nn.Module, tree: Mapping[str, Mapping[str, Any]]) -> None:
    """Restores what `moments_of` returned, into an optimiser that has not been stepped."""
    for name, parameter in network.named_parameters():
        if tree[name]:
            optimizer.state[parameter] = {
                # copied: the tree may lie in memory that other learners read too, and Adam writes in place
                key: torch.as_tensor(value).clone().to(parameter.device if np.ndim(value) else "cpu")
                for key, value in tree[name].items()
            }
