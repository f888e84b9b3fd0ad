"""Dense networks by hand: passes, parameter blocks, and products that keep float32's precision."""

import pytest
import torch
from torch import nn

from rlvlm.algorithms.sac_pebble import dense
from rlvlm.algorithms.sac_pebble.dense import DenseStack, Layer, ParameterBlock, fast_products, flatten
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


def networks(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3))


def descend(network, step, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        loss = network(torch.randn(8, 4, generator=generator)).square().sum()
        for parameter, gradient in zip(
            network.parameters(), torch.autograd.grad(loss, list(network.parameters())), strict=True
        ):
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.copy_(gradient)
        step()


def test_steps_are_those_of_torchs_adam():
    ours, theirs = networks(0), networks(0)
    block = ParameterBlock(ours.parameters(), lr=1e-2)
    optimizer = torch.optim.Adam(theirs.parameters(), lr=1e-2)
    descend(ours, block.step, 20), descend(theirs, optimizer.step, 20)
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)


def test_parameters_are_windows_into_the_vector():
    network = networks(1)
    before = [parameter.clone() for parameter in network.parameters()]
    vector = flatten(network.parameters())
    assert len(vector) == sum(map(torch.numel, before))
    assert all(map(torch.equal, before, network.parameters()))
    vector.zero_()
    assert not any(parameter.any() for parameter in network.parameters())
    network.load_state_dict(networks(2).state_dict())  # copies, so the windows stay
    loaded = torch.cat([parameter.flatten() for parameter in network.parameters()])
    assert torch.equal(vector.sort()[0], loaded.sort()[0])
    assert network[0].weight.T.is_contiguous() and network[2].weight.is_contiguous()  # the longer side innermost


def test_forgetting_is_starting_anew():
    network = networks(4)
    block = ParameterBlock(network.parameters(), 1e-2)
    fresh = {name: value.copy() if hasattr(value, "copy") else value for name, value in block.get_state().items()}
    descend(network, block.step, 3)
    assert block.get_state()["steps"] == 3
    block.forget()
    now = block.get_state()
    assert now["steps"] == 0 and (now["mean"] == fresh["mean"]).all() and (now["square"] == fresh["square"]).all()


def test_products_are_float32s():
    rows, columns = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0))
    with fast_products():
        product = rows @ columns
    torch.testing.assert_close(product.double(), rows.double() @ columns.double(), rtol=1e-5, atol=1e-4)


CPUS = {
    "Zen 5": ({"cpu_name": "AMD EPYC 9755", "avx512_vp2intersect": True, "amx_tile": False}, "bf16"),
    "Zen 4": ({"cpu_name": "AMD EPYC 9654", "avx512_vp2intersect": False, "amx_tile": False}, "none"),
    "rounds inputs": ({"cpu_name": "AMD of a later day", "avx512_vp2intersect": True, "amx_tile": True}, "none"),
    "Intel": ({"cpu_name": "Intel(R) Xeon(R)", "avx512_vp2intersect": True, "amx_tile": False}, "none"),
    "ARM": ({"architecture": "aarch64"}, "none"),
}


@pytest.mark.parametrize("cpu", CPUS)
def test_only_cpus_that_gain_change_and_only_inside(cpu, monkeypatch):
    capabilities, inside = CPUS[cpu]
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    dense._mkl_is_half_as_wide.cache_clear()
    try:
        with pytest.raises(ZeroDivisionError), fast_products():
            assert torch.backends.mkldnn.matmul.fp32_precision == inside
            raise ZeroDivisionError
        assert torch.backends.mkldnn.matmul.fp32_precision == "none"
    finally:
        dense._mkl_is_half_as_wide.cache_clear()
