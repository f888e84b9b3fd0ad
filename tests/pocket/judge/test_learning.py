import pytest
import torch
from torch import nn

from rlvlm.pocket.judge.learning import along_cosine, hold_then_fall, muon_and_adamw, optimise


def test_step_sizes_worked_by_hand():
    assert [hold_then_fall(step, 100) for step in (0, 9, 70, 85, 99)] == pytest.approx([0.1, 1, 1, 0.5, 1 / 30])
    assert [along_cosine(step, 100) for step in (0, 50)] == pytest.approx([0.1, 0.5])
    assert hold_then_fall(24, 1_000) == 0.5  # 50 steps at most to warm up


def test_muon_takes_the_matrices_of_the_layers_and_adamw_everything_else():
    layers, head = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.Linear(4, 2)
    muon, adamw = muon_and_adamw(layers, [*layers.parameters(), *head.parameters()], lr=0.1)
    assert [group["params"] for group in muon.param_groups] == [[layers[0].weight]]
    assert [id(one) for one in adamw.param_groups[0]["params"]] == [
        id(one) for one in (layers[0].bias, layers[1].weight, layers[1].bias, head.weight, head.bias)
    ]
    assert (muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"]) == (0.2, 0.1)


def test_every_optimizer_moves_and_follows_the_ramp():
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    before = [each.detach().clone() for each in (layer.weight, layer.bias)]
    optimizers = muon_and_adamw(layer, layer.parameters(), lr=0.1)
    facts = {}

    def loss_of_step():
        loss = layer(torch.ones(2, 3)).square().mean()
        return loss, {"loss": float(loss.detach())}

    steps = optimise("test", 4, optimizers, loss_of_step, ramp=lambda step, _: 0.5**step, facts=facts)
    assert list(steps) == [1, 2, 3, 4]
    assert all(not torch.equal(old, new) for old, new in zip(before, (layer.weight, layer.bias), strict=True))
    assert [group["lr"] for one in optimizers for group in one.param_groups] == [0.2 / 8, 0.1 / 8]
    assert facts["loss"] > 0
