"""Probabilities of action tokens: exactly 256 of them, the alias merged, one temperature."""

import math

import pytest
import torch

from rlvlm.policies.vla.tokens import draw_bins, entropy, likeliest_bins, log_distribution, log_probs_of


def test_by_hand():
    logits = torch.full((256,), -1e9)
    logits[3], logits[254], logits[255] = math.log(2.0), 0.0, 0.0  # 1/2, 1/4 and 1/4, the last two one action
    found = log_distribution(logits, 1.0).exp()
    assert found[3] == pytest.approx(0.5) and found[254] == pytest.approx(0.5) and found.shape == (255,)
    assert entropy(logits.clamp(min=-50), 1.0) == pytest.approx(math.log(2), abs=1e-5)


def test_a_temperature_of_two_takes_the_square_root():
    logits = torch.full((256,), -1e9)
    logits[0], logits[1] = math.log(9.0), 0.0
    assert log_probs_of(logits, torch.tensor(0), 2.0).exp() == pytest.approx(3 / 4)
    assert log_probs_of(logits.bfloat16(), torch.tensor(0), 1.0).dtype == torch.float32


def test_log_probs_of_picks_from_the_distribution_and_the_alias_is_the_top_bin():
    logits = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)) * 3
    table = log_distribution(logits, 1.6)
    assert torch.allclose(table.exp().sum(-1), torch.ones(5), atol=1e-6)
    for bin_ in range(255):
        assert torch.allclose(log_probs_of(logits, torch.full((5,), bin_), 1.6), table[:, bin_], atol=1e-5)
    top, alias = (log_probs_of(logits, torch.full((5,), bin_), 1.6) for bin_ in (254, 255))
    assert torch.equal(top, alias)


def test_drawing_follows_the_probabilities_and_repeats_with_its_seed():
    logits = torch.full((20_000, 256), -30.0)
    logits[:, 7], logits[:, 254], logits[:, 255] = math.log(0.5), math.log(0.2), math.log(0.3)
    bins, log_probs = draw_bins(logits, 1.0, torch.Generator().manual_seed(3))
    again, _ = draw_bins(logits, 1.0, torch.Generator().manual_seed(3))
    assert torch.equal(bins, again) and set(bins.unique().tolist()) == {7, 254}
    assert (bins == 7).float().mean().item() == pytest.approx(0.5, abs=0.015)  # four standard errors
    assert torch.allclose(log_probs, log_probs_of(logits, bins, 1.0), atol=1e-5)


def test_the_likeliest_action_may_be_the_top_bin_by_its_two_names():
    logits = torch.full((1, 256), -30.0)
    logits[0, 5], logits[0, 254], logits[0, 255] = math.log(0.4), math.log(0.3), math.log(0.3)
    assert likeliest_bins(logits).tolist() == [254]


def test_tokens_that_are_not_explored_are_the_likeliest():
    logits = torch.randn(500, 6, 256, generator=torch.Generator().manual_seed(2))
    explored = torch.tensor([True, False, True] * 2)
    bins, log_probs = draw_bins(logits, 1.0, torch.Generator().manual_seed(3), explored=explored)
    every, their_log_probs = draw_bins(logits, 1.0, torch.Generator().manual_seed(3))
    assert torch.equal(bins[:, explored], every[:, explored])  # the same numbers are drawn
    assert torch.equal(log_probs[:, explored], their_log_probs[:, explored])
    assert torch.equal(bins[:, ~explored], likeliest_bins(logits)[:, ~explored])
    assert not torch.equal(bins, every) and (log_probs[:, ~explored] == 0).all()
    sure = torch.zeros(1, 6, 256)
    sure[..., 9] = 1_000.0  # certain, and drawn all the same: only what was taken has a log-probability of 0
    bins, log_probs = draw_bins(sure, 1.0, torch.Generator().manual_seed(3), explored=explored)
    assert (bins == 9).all() and torch.equal(log_probs[0] < 0, explored) and log_probs.min() > -1e-30
