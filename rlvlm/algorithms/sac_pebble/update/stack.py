"""Fully connected ReLU networks with their backward pass written out. Used by learners whose networks are small.

At the sizes of control (256 rows, 256 units) a matrix product takes 0.4 ms. Autograd's bookkeeping, and the memory that
it takes anew for everything in between, cost a third on top; here each pass is a dozen calls into memory that is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of K networks: windows into its parameters and into their gradients, if they have any yet."""

    weight: Tensor
    """[K, I, O]."""
    bias: Tensor
    """[K, 1, O]."""
    weight_gradient: Tensor | None
    """[K, I, O]."""
    bias_gradient: Tensor | None
    """[K, 1, O]."""

    @classmethod
    def batched(cls, weight: nn.Parameter, bias: nn.Parameter) -> Self:
        """Of parameters `[K, I, O]` and `[K, 1, O]`."""
        return cls(weight.detach(), bias.detach(), weight.grad, bias.grad)

    @classmethod
    def linear(cls, layer: nn.Linear) -> Self:
        """Of one ordinary layer, K = 1; torch keeps its weight as `[O, I]`."""
        weight, bias = layer.weight, layer.bias
        return cls(
            weight.detach().T[None],
            bias.detach()[None, None],
            None if weight.grad is None else weight.grad.T[None],
            None if bias.grad is None else bias.grad[None, None],
        )


class DenseStack:
    """K networks of one shape, run side by side: each layer is one batched matrix product.

    A stack keeps what its last `forward` computed, for the passes back from it. Shapes: B rows, I inputs, O outputs.

    Matrix products with few columns are slow in torch's kernels: here they are turned so that they have few rows
    instead, and where there is a single output unit, sums and outer products take their place. So are products that
    would be written by columns, for which oneDNN has no fast kernel.

    Args:
        layers: from first to last, with a ReLU after each but the last.
        rows: largest B.
    """

    def __init__(self, layers: Sequence[Layer], rows: int) -> None:
        self._layers = layers
        self._hidden, self._gradients = (
            [layer.weight.new_empty(layer.weight.shape[0], rows, layer.weight.shape[2]) for layer in layers[:-1]]
            for _ in range(2)
        )
        self._read: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs `[K, B, O]` of `inputs` `[B, I]`, the same for all K."""
        *inner, last = self._layers
        read = inputs.expand(len(last.weight), -1, -1)
        self._read = [read]
        for layer, memory in zip(inner, self._hidden, strict=True):
            read = torch.baddbmm(layer.bias, read, layer.weight, out=memory[:, : len(inputs)]).relu_()
            self._read.append(read)
        if last.weight.shape[2] > 1:
            return torch.baddbmm(last.bias.mT, last.weight.mT, read.mT).mT
        return (torch.linalg.vecdot(read, last.weight.mT) + last.bias.squeeze(2)).unsqueeze(2)

    def backward(self, gradient: Tensor, first_row: int = 0) -> None:
        """Writes the gradient of every weight and bias, for a loss with `gradient` `[K, B, O]` at the outputs.

        The parameters must have got their gradients' memory, from a `ParameterBlock`, before the layers were made.

        Args:
            gradient: of the loss, at the outputs of the last `forward`.
            first_row: rows of that pass before it have no part in the loss, and none in `gradient`.
        """
        for index in range(len(self._layers) - 1, -1, -1):
            layer, read = self._layers[index], self._read[index][:, first_row:]
            assert layer.weight_gradient is not None and layer.bias_gradient is not None, "these layers are not trained"
            if gradient.shape[2] < read.shape[2] or not layer.weight_gradient.is_contiguous():
                torch.bmm(gradient.mT, read, out=layer.weight_gradient.mT)
            else:
                torch.bmm(read.mT, gradient, out=layer.weight_gradient)
            torch.sum(gradient, dim=1, keepdim=True, out=layer.bias_gradient)
            if index == 0:
                return
            below = self._gradients[index - 1][:, : gradient.shape[1]]
            product = torch.bmm if gradient.shape[2] > 1 else torch.mul
            product(gradient, layer.weight.mT, out=below)
            # `read` is what a ReLU gave: its derivative is 1 where that is above 0, else 0.
            gradient = torch.ops.aten.threshold_backward.grad_input(below, read, 0, grad_input=below)

    def input_gradient(self, gradient: Tensor, chosen: Tensor, first_input: int = 0) -> Tensor:
        """The gradient at the inputs, for a loss that looks at one of the K networks in each row; weights get none.

        Each row goes back through its chosen network alone, which is a K-th of the work.

        Args:
            gradient: [B, O] of the loss, at the chosen network's outputs of the last `forward`.
            chosen: [B] integers in [0, K).
            first_input: inputs before it are left out.

        Returns:
            [B, I - first_input].
        """
        into = self._layers[0].weight[:, first_input:].mT
        result = gradient.new_empty(len(gradient), into.shape[2])
        for network in range(len(into)):
            rows = torch.nonzero(chosen == network).squeeze(1)
            here = gradient.index_select(0, rows)
            for layer, read in zip(self._layers[:0:-1], self._read[:0:-1], strict=True):
                back = layer.weight[network].T
                here = here @ back if len(back) > 1 else here * back
                here = torch.ops.aten.threshold_backward(here, read[network].index_select(0, rows), 0)
            result.index_copy_(0, rows, here @ into[network])
        return result
