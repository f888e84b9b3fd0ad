"""Fully connected ReLU networks with their backward pass written out. Used by learners whose networks are small.

At the sizes of control (256 rows, 256 units) a matrix product takes 0.4 ms. Autograd's bookkeeping, and the memory that
it takes anew for everything in between, cost a third on top; here each pass is a dozen calls into memory that is kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from rlvlm.policies.squashed_gaussian import SquashedGaussian


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

    Args:
        layers: from first to last, with a ReLU after each but the last.
        rows: largest B.
    """

    def __init__(self, layers: Sequence[Layer], rows: int) -> None:
        self._layers = layers
        self._hidden = [_memory_behind(layer, rows) for layer in layers[:-1]]
        self._slopes = [_memory_behind(layer, rows) for layer in layers[:-1]]
        self._read: list[Tensor] = []

    @classmethod
    def of_policy(cls, policy: SquashedGaussian, rows: int) -> Self:
        """The network of a policy, K = 1."""
        return cls([Layer.linear(layer) for layer in policy.linears], rows)

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs `[K, B, O]` of `inputs` `[B, I]`, the same for all K."""
        self._read = [inputs.expand(len(self._layers[0].weight), -1, -1)]
        for layer, memory in zip(self._layers, self._hidden, strict=False):
            out = memory[:, : len(inputs)]
            self._read.append(torch.baddbmm(layer.bias, self._read[-1], layer.weight, out=out).relu_())
        return _outputs(self._read[-1], self._layers[-1])

    def backward(self, slopes: Tensor, first_row: int = 0) -> None:
        """Writes the gradient of every weight and bias, for a loss with `slopes` `[K, B, O]` at the outputs.

        The parameters must have got their gradients' memory, from a `ParameterBlock`, before the layers were made.

        Args:
            slopes: of the loss, at the outputs of the last `forward`.
            first_row: rows of that pass before it have no part in the loss, and none in `slopes`.
        """
        for layer, read, slope in self._downwards(slopes, first_row):
            assert layer.weight_gradient is not None and layer.bias_gradient is not None, "these layers are not trained"
            _weight_gradient(read, slope, layer.weight_gradient)
            torch.sum(slope, dim=1, keepdim=True, out=layer.bias_gradient)

    def input_slopes(self, slopes: Tensor, chosen: Tensor, first_input: int = 0) -> Tensor:
        """Slopes at the inputs, for a loss that looks at one of the K networks in each row; weights get none.

        Only the chosen network's half (or K-th part) of the way back is gone.

        Args:
            slopes: [B, O] of the loss, at the chosen network's outputs of the last `forward`.
            chosen: [B] integers in [0, K).
            first_input: inputs before it are left out.

        Returns:
            [B, I - first_input].
        """
        into = self._layers[0].weight[:, first_input:].mT
        result = slopes.new_empty(len(slopes), into.shape[2])
        for network in range(len(into)):
            rows = torch.nonzero(chosen == network).squeeze(1)
            slope = slopes.index_select(0, rows)
            for layer, read in zip(self._layers[:0:-1], self._read[:0:-1], strict=True):
                back = layer.weight[network].T
                slope = slope @ back if len(back) > 1 else slope * back
                slope = torch.ops.aten.threshold_backward(slope, read[network].index_select(0, rows), 0)
            result.index_copy_(0, rows, slope @ into[network])
        return result

    def _downwards(self, slope: Tensor, first_row: int) -> Iterator[tuple[Layer, Tensor, Tensor]]:
        """Each layer with what it read and the slopes at what it gave, from last to first."""
        for index in range(len(self._layers) - 1, -1, -1):
            layer, read = self._layers[index], self._read[index][:, first_row:]
            yield layer, read, slope
            if index:
                out = self._slopes[index - 1][:, : slope.shape[1]]
                _product_back(slope, layer.weight, out)
                slope = torch.ops.aten.threshold_backward.grad_input(out, read, 0, grad_input=out)  # where ReLU passed


def _memory_behind(layer: Layer, rows: int) -> Tensor:
    """Room for what `layer` gives for `rows` rows: [K, rows, O]."""
    return layer.weight.new_empty(layer.weight.shape[0], rows, layer.weight.shape[2])


# The library's kernels are slow at products with few columns: those are turned so that they have few rows instead, and
# where there is a single output unit, sums and outer products take their place.


def _outputs(read: Tensor, layer: Layer) -> Tensor:
    """[K, B, O] of `read` [K, B, I]."""
    if layer.weight.shape[2] > 1:
        return torch.baddbmm(layer.bias.mT, layer.weight.mT, read.mT).mT
    return (torch.linalg.vecdot(read, layer.weight.mT) + layer.bias.squeeze(2)).unsqueeze(2)


def _weight_gradient(read: Tensor, slope: Tensor, out: Tensor) -> None:
    """Fills `out` [K, I, O] from `read` [K, B, I] and `slope` [K, B, O]."""
    if slope.shape[2] < read.shape[2]:
        torch.bmm(slope.mT, read, out=out.mT)
    else:
        torch.bmm(read.mT, slope, out=out)


def _product_back(slope: Tensor, weight: Tensor, out: Tensor) -> None:
    """Fills `out` [K, B, I] from `slope` [K, B, O] and `weight` [K, I, O]."""
    if slope.shape[2] > 1:
        torch.bmm(slope, weight.mT, out=out)
    else:
        torch.mul(slope, weight.mT, out=out)
