import pytest
import torch
from torch import nn

from rlvlm.algorithms.sac_pebble.update.block import ParameterBlock, flatten


def test_the_first_step_of_adam_by_hand():
    # Bias-corrected moments of the first step are g and g^2, so it goes lr * g / |g| against the gradient.
    parameter = nn.Parameter(torch.tensor([1.0, 1.0, 1.0]))
    block = ParameterBlock([parameter], lr=0.1)
    parameter.grad.copy_(torch.tensor([5.0, -0.2, 0.0]))
    block.step()
    assert parameter.tolist() == pytest.approx([0.9, 1.1, 1.0])


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


@pytest.mark.parametrize("first", [0, 5])
def test_a_restored_block_goes_on_bit_for_bit(first):
    straight, restored = networks(3), networks(3)
    block, other = ParameterBlock(straight.parameters(), 1e-2), ParameterBlock(restored.parameters(), 1e-2)
    descend(straight, block.step, first)
    other.set_state(block.get_state())
    other.values.copy_(block.values)
    for network, own in ((straight, block), (restored, other)):
        descend(network, own.step, 5, seed=9)
    assert torch.equal(block.values, other.values)


def test_forgetting_is_starting_anew():
    network = networks(4)
    block = ParameterBlock(network.parameters(), 1e-2)
    fresh = {name: value.copy() if hasattr(value, "copy") else value for name, value in block.get_state().items()}
    descend(network, block.step, 3)
    assert block.get_state()["steps"] == 3
    block.forget()
    now = block.get_state()
    assert now["steps"] == 0 and (now["mean"] == fresh["mean"]).all() and (now["square"] == fresh["square"]).all()
