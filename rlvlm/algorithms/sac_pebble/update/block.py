"""Parameters in one contiguous vector, and Adam on it: one call per step, whatever the number of layers."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_BETAS, _EPS = (0.9, 0.999), 1e-8


def flatten(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Moves parameters, all on one device, into one vector `[P]`, which is returned: they become windows into it."""
    listed = list(parameters)
    vector = listed[0].new_empty(sum(parameter.numel() for parameter in listed))
    for parameter, window in zip(listed, _windows(vector, listed), strict=True):
        parameter.data = window.copy_(parameter.detach())
    return vector


class ParameterBlock:
    """What one learning rate trains: parameters, their gradients and Adam's moments, each one vector `[P]`.

    Every parameter's `grad` is a window into `gradients`, for whoever computes them to write to.

    Source: Kingma, Ba 2015, arXiv:1412.6980; the defaults of its section 2, as in `torch.optim.Adam`.

    Args:
        parameters: moved into the block, all on one device.
        lr: step size, > 0.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        listed = list(parameters)
        self.values = flatten(listed)
        self.gradients = torch.zeros_like(self.values)
        for parameter, window in zip(listed, _windows(self.gradients, listed), strict=True):
            parameter.grad = window
        self._lr = lr
        self._mean = torch.zeros_like(self.values)
        self._square = torch.zeros_like(self.values)
        self._steps = torch.zeros((), device=self.values.device)

    def step(self) -> None:
        """Descends the gradients by one step of Adam."""
        self._steps += 1
        torch._fused_adam_(  # pyright: ignore[reportPrivateImportUsage] what torch.optim.Adam calls for each list
            [self.values],
            [self.gradients],
            [self._mean],
            [self._square],
            [],
            [self._steps],
            lr=self._lr,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            eps=_EPS,
            weight_decay=0.0,
            amsgrad=False,
            maximize=False,
        )

    def forget(self) -> None:
        """Sets the moments back to the start; the parameters stay."""
        for vector in (self._mean, self._square, self._steps):
            vector.zero_()

    def get_state(self) -> dict[str, Any]:
        """The moments; the parameters belong to their networks."""
        return {"mean": self._mean.cpu().numpy(), "square": self._square.cpu().numpy(), "steps": self._steps.item()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; the learning rate stays."""
        self._mean.copy_(torch.as_tensor(state["mean"]))
        self._square.copy_(torch.as_tensor(state["square"]))
        self._steps.fill_(state["steps"])


def _windows(vector: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Parts of `vector` with the parameters' shapes, in their order.

    Matrices lie in memory with their longer side innermost, whichever comes first in their shape: with few rows and
    long ones, products run at two to five times the speed that they have with many short ones.
    """
    parts = vector.split([parameter.numel() for parameter in parameters])
    return [
        part.view(parameter.shape[::-1]).T
        if parameter.ndim == 2 and parameter.shape[0] > parameter.shape[1]
        else part.view(parameter.shape)
        for part, parameter in zip(parts, parameters, strict=True)
    ]
