import pytest
import torch
from torch import nn

from rlvlm.algorithms.sac_pebble.update.block import ParameterBlock
from rlvlm.algorithms.sac_pebble.update.stack import DenseStack, Layer
from rlvlm.policies.squashed_gaussian import SquashedGaussian


def batched(generator, networks, *sizes):
    """Layers of `networks` networks, their parameters, and the same function for autograd to differentiate."""
    weights = [
        nn.Parameter(torch.randn(networks, *pair, generator=generator, dtype=torch.float64) / pair[0] ** 0.5)
        for pair in zip(sizes, sizes[1:], strict=False)
    ]
    biases = [
        nn.Parameter(torch.randn(networks, 1, size, generator=generator, dtype=torch.float64)) for size in sizes[1:]
    ]

    def reference(inputs):
        hidden = inputs.expand(networks, -1, -1)
        for depth, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            hidden = hidden @ weight + bias
            if depth < len(weights) - 1:
                hidden = torch.relu(hidden)
        return hidden

    ParameterBlock([*weights, *biases], lr=1e-3)
    return [Layer.batched(*pair) for pair in zip(weights, biases, strict=True)], [*weights, *biases], reference


def test_two_units_by_hand():
    # Hidden: relu(1 * 2 + 1) = 3 and relu(1 * -2 + 1) = 0; output: 3 * 4 + 0 * 5 + 6 = 18.
    values = [[[[2.0, -2.0]]], [[[4.0], [5.0]]], [[[1.0, 1.0]]], [[[6.0]]]]
    parameters = [nn.Parameter(torch.tensor(value)) for value in values]
    ParameterBlock(parameters, lr=1e-3)
    stack = DenseStack([Layer.batched(parameters[0], parameters[2]), Layer.batched(parameters[1], parameters[3])], 1)
    assert stack.forward(torch.ones(1, 1)).item() == 18
    stack.backward(torch.full((1, 1, 1), 10.0))
    gradients = [parameter.grad.flatten().tolist() for parameter in parameters]
    assert gradients == [[40, 0], [30, 0], [40, 0], [10]]  # nothing passes through the unit that is off
    assert stack.input_gradient(torch.full((1, 1), 10.0), torch.tensor([0])).item() == 80


@pytest.mark.parametrize(("networks", "outputs"), [(1, 1), (1, 6), (2, 1), (3, 4)])
@pytest.mark.parametrize("hidden", [(7,), (8, 5), (4, 6, 5)])
def test_gradients_are_those_of_autograd(networks, outputs, hidden):
    generator = torch.Generator().manual_seed(0)
    layers, parameters, reference = batched(generator, networks, 3, *hidden, outputs)
    stack = DenseStack(layers, rows=20)
    for rows in (20, 11):  # fewer rows than there is room for
        inputs = torch.randn(rows, 3, generator=generator, dtype=torch.float64, requires_grad=True)
        at_outputs = torch.randn(networks, rows, outputs, generator=generator, dtype=torch.float64)
        expected = reference(inputs)
        torch.testing.assert_close(stack.forward(inputs.detach()), expected.detach(), rtol=0, atol=1e-12)
        wanted = torch.autograd.grad((expected * at_outputs).sum(), parameters)
        stack.backward(at_outputs)
        for parameter, gradient in zip(parameters, wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12)
        chosen = torch.randint(networks, (rows,), generator=generator)
        seen = reference(inputs)[chosen, torch.arange(rows)]
        (wanted_gradient,) = torch.autograd.grad((seen * at_outputs[0]).sum(), inputs)
        got = stack.input_gradient(at_outputs[0], chosen)
        torch.testing.assert_close(got, wanted_gradient, rtol=0, atol=1e-12)
        torch.testing.assert_close(stack.input_gradient(at_outputs[0], chosen, 2), got[:, 2:], rtol=0, atol=1e-12)


def test_rows_without_a_part_in_the_loss_are_left_out():
    generator = torch.Generator().manual_seed(1)
    policy = SquashedGaussian(5, 2, (8, 6), generator)
    parameters = list(policy.parameters())
    inputs, at_outputs = torch.randn(10, 5, generator=generator), torch.randn(1, 4, 4, generator=generator)
    ParameterBlock(parameters, lr=1e-3)
    stack = DenseStack([Layer.linear(layer) for layer in policy.linears], rows=10)
    outputs = stack.forward(inputs)
    mean, _ = policy(inputs)
    torch.testing.assert_close(outputs[0, :, :2], mean.detach())
    stack.backward(at_outputs, first_row=6)
    got = [parameter.grad.clone() for parameter in parameters]
    stack.forward(inputs[6:])
    stack.backward(at_outputs)
    for left, parameter in zip(got, parameters, strict=True):
        torch.testing.assert_close(left, parameter.grad)
    assert all(gradient.abs().sum() > 0 for gradient in got)


def test_layers_without_gradients_serve_forward_only():
    layer = Layer.linear(nn.Linear(3, 2))
    stack = DenseStack([layer], rows=4)
    assert stack.forward(torch.ones(4, 3)).shape == (1, 4, 2)
    with pytest.raises(AssertionError, match="not trained"):
        stack.backward(torch.ones(1, 4, 2))
