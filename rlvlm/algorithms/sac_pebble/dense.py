"""Small fully connected networks, fast on a CPU: hand-written passes, parameters in one vector, fast products.

At the sizes of control (256 rows, 256 units) a matrix product takes 0.4 ms. Autograd's bookkeeping, and its fresh
memory for intermediate results, cost a third on top; here each pass is a dozen calls into memory that is kept.
benchmarks/sac_update.py and benchmarks/sac_peers.py measure the benefit of this hand-written code.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn

_BETAS, _EPS = (0.9, 0.999), 1e-8


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of K networks: views of its parameters and of their gradients, if there are any yet."""

    weight: Tensor
    """[K, I, O] weights."""
    bias: Tensor
    """[K, 1, O] biases."""
    weight_gradient: Tensor | None
    """[K, I, O] gradient of the weights."""
    bias_gradient: Tensor | None
    """[K, 1, O] gradient of the biases."""

    @classmethod
    def batched(cls, weight: nn.Parameter, bias: nn.Parameter) -> Self:
        """Makes a layer from parameters `[K, I, O]` and `[K, 1, O]`."""
        return cls(weight.detach(), bias.detach(), weight.grad, bias.grad)

    @classmethod
    def linear(cls, layer: nn.Linear) -> Self:
        """Makes a layer from an ordinary `nn.Linear`, K = 1; torch stores its weight as `[O, I]`."""
        weight, bias = layer.weight, layer.bias
        return cls(
            weight.detach().T[None],
            bias.detach()[None, None],
            None if weight.grad is None else weight.grad.T[None],
            None if bias.grad is None else bias.grad[None, None],
        )


class DenseStack:
    """K networks of the same shape, computed together: each layer is one batched matrix product.

    A stack keeps the results of its last `forward` for the backward passes. Shapes: B rows, I inputs, O outputs.

    Matrix products with few columns are slow in torch's kernels: here they are transposed to have few rows instead, and
    with a single output unit they are replaced by sums and outer products. So are products that would be written by
    columns, for which oneDNN has no fast kernel.

    Args:
        layers: from first to last, with a ReLU after each but the last.
        rows: maximum B.
    """

    def __init__(self, layers: Sequence[Layer], rows: int) -> None:
        self._layers = layers
        self._hidden, self._gradients = (
            [layer.weight.new_empty(layer.weight.shape[0], rows, layer.weight.shape[2]) for layer in layers[:-1]]
            for _ in range(2)
        )
        self._read: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns outputs `[K, B, O]` for `inputs` `[B, I]`, the same for all K."""
        *inner, last = self._layers
        read = inputs.expand(len(last.weight), -1, -1)
        self._read = [read]
        for layer, memory in zip(inner, self._hidden, strict=True):
            read = torch.baddbmm(layer.bias, read, layer.weight, out=memory[:, : len(inputs)]).relu_()
            self._read.append(read)
        # few outputs: O^T = W^T H^T + b^T has few rows instead of few columns; with one it is a product of vectors
        if last.weight.shape[2] > 1:
            return torch.baddbmm(last.bias.mT, last.weight.mT, read.mT).mT
        return (torch.linalg.vecdot(read, last.weight.mT) + last.bias.squeeze(2)).unsqueeze(2)

    def backward(self, gradient: Tensor, first_row: int = 0) -> None:
        """Writes the gradient of every weight and bias, for a loss with `gradient` `[K, B, O]` at the outputs.

        A `ParameterBlock` must have allocated the parameters' gradients before the layers were made.

        Args:
            gradient: gradient of the loss at the outputs of the last `forward`.
            first_row: rows of that pass before it are not part of the loss or of `gradient`.
        """
        for index in range(len(self._layers) - 1, -1, -1):
            layer, read = self._layers[index], self._read[index][:, first_row:]
            assert layer.weight_gradient is not None and layer.bias_gradient is not None, "these layers are not trained"
            # dW = H^T G, transposed if that leaves fewer rows; db = sum of G over rows
            if gradient.shape[2] < read.shape[2] or not layer.weight_gradient.is_contiguous():
                torch.bmm(gradient.mT, read, out=layer.weight_gradient.mT)
            else:
                torch.bmm(read.mT, gradient, out=layer.weight_gradient)
            torch.sum(gradient, dim=1, keepdim=True, out=layer.bias_gradient)
            if index == 0:
                return
            # dH = G W^T, into memory that is kept between passes
            below = self._gradients[index - 1][:, : gradient.shape[1]]
            product = torch.bmm if gradient.shape[2] > 1 else torch.mul
            product(gradient, layer.weight.mT, out=below)
            # `read` is the output of a ReLU, whose derivative is 1 where it is above 0, else 0
            gradient = torch.ops.aten.threshold_backward.grad_input(below, read, 0, grad_input=below)

    def input_gradient(self, gradient: Tensor, chosen: Tensor, first_input: int = 0) -> Tensor:
        """Returns the gradient at the inputs, for a loss of one of the K networks in each row; weights get none.

        Each row is propagated through its chosen network only, a K-th of the work.

        Args:
            gradient: [B, O] gradient of the loss at the chosen network's outputs of the last `forward`.
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
            # from the last layer down to the second; the first, which has no ReLU before it, follows after the loop
            for layer, read in zip(self._layers[:0:-1], self._read[:0:-1], strict=True):
                back = layer.weight[network].T
                here = here @ back if len(back) > 1 else here * back
                here = torch.ops.aten.threshold_backward(here, read[network].index_select(0, rows), 0)
            result.index_copy_(0, rows, here @ into[network])
        return result


def flatten(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Moves parameters, all on one device, into one vector `[P]`, of which they become views, and returns it."""
    listed = list(parameters)
    vector = listed[0].new_empty(sum(parameter.numel() for parameter in listed))
    for parameter, window in zip(listed, _windows(vector, listed), strict=True):
        parameter.data = window.copy_(parameter.detach())
    return vector


class ParameterBlock:
    """The parameters of one learning rate: values, gradients and Adam's moments, each as one vector `[P]`.

    Every parameter's `grad` is a view of `gradients`, to which the backward pass writes.

    Source: Kingma, Ba 2015, arXiv:1412.6980; the defaults of its section 2, as in `torch.optim.Adam`.

    Args:
        parameters: parameters to move into the block, all on one device.
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
        """Makes one step of Adam along the gradients."""
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
        """Resets the moments; the parameters stay."""
        for vector in (self._mean, self._square, self._steps):
            vector.zero_()

    def get_state(self) -> dict[str, Any]:
        """Returns the moments; the parameters belong to their networks."""
        return {"mean": self._mean.cpu().numpy(), "square": self._square.cpu().numpy(), "steps": self._steps.item()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned; the learning rate stays."""
        self._mean.copy_(torch.as_tensor(state["mean"]))
        self._square.copy_(torch.as_tensor(state["square"]))
        self._steps.fill_(state["steps"])


def _windows(vector: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Returns views of `vector` with the parameters' shapes, in order.

    Matrices are stored with their longer side innermost, whichever comes first in their shape: products with few long
    rows are two to five times as fast as with many short ones.
    """
    parts = vector.split([parameter.numel() for parameter in parameters])
    return [
        part.view(parameter.shape[::-1]).T
        if parameter.ndim == 2 and parameter.shape[0] > parameter.shape[1]
        else part.view(parameter.shape)
        for part, parameter in zip(parts, parameters, strict=True)
    ]


@contextmanager
def fast_products() -> Iterator[None]:
    """Computes float32 products in oneDNN, while open, on CPUs where MKL uses only half of a core.

    AMD's cores are 512 bits wide from Zen 5 on, but MKL uses 256 on AMD. At 256 x 256 oneDNN is 2.1 times as fast
    there; products of a few rows are slower, so this is for updates, not for acting.

    torch only uses oneDNN for products if it may round their inputs to bfloat16. oneDNN only does so on CPUs with AMX,
    which are excluded here: the results are float32's.
    """
    if not _mkl_is_half_as_wide():
        yield
        return
    products = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = products.fp32_precision
    products.fp32_precision = "bf16"
    try:
        yield
    finally:
        products.fp32_precision = before


@cache
def _mkl_is_half_as_wide() -> bool:
    cpu = torch.cpu.get_capabilities()
    is_zen5 = cpu.get("cpu_name", "").startswith("AMD") and cpu.get("avx512_vp2intersect", False)  # Zen 4 lacks it
    return is_zen5 and not cpu.get("amx_tile", False)
