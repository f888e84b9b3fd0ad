"""Gradient checkpointing: what stays in memory for a backward pass by hand, and gradients that do not notice."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.update_memory import WIDTHS, bytes_per_token_and_layer, saved_bytes
from rlvlm.algorithms.policy_gradient.batch import pack
from rlvlm.policies.protocol import Reading
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.policies.vlm import backbone
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.vlms.blocks import blocks_of, recompute_blocks
from tests.tiny_policy import FAMILIES, requests, show_images, tiny_policy


def test_a_block_keeps_its_input_alone_by_hand():
    values = torch.ones(5, requires_grad=True)
    network = torch.nn.Module()
    network.layers = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Sigmoid(), torch.nn.Sigmoid())])
    recompute_blocks(network, wanted=True)
    recomputed = network.layers[0]
    assert saved_bytes(lambda: values.exp().exp()) == 2 * 5 * 4  # exp keeps what it gave, twice here
    assert saved_bytes(lambda: (values + 1.0).sum()) == 0
    assert saved_bytes(lambda: recomputed(values)) == 5 * 4  # what it was given, and nothing between


def test_rows_are_packed_by_the_longest_by_hand():
    assert pack([5, 2, 9, 3, 2], max_tokens=10) == [[2], [0, 3], [1, 4]]
    assert pack([20, 1], max_tokens=10) == [[0], [1]] and pack([], max_tokens=10) == []


def gradients(policy: Any, asked: Any, **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    policy.zero_grad()
    read = policy.read(*asked, Reading(with_entropies=True, with_token_values=True, **settings))
    (read.log_probs.sum() + 0.1 * read.entropies.sum() + read.token_values.sum() + read.values.sum()).div(80).backward()
    return read, {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("learns", ["all", "lora"])
def test_every_family_has_the_same_loss_and_gradient(tmp_path, family, learns):
    targets = {} if learns == "all" else {"lora_rank": 4, "lora_targets": r".*(_proj|attn\.qkv|fc1)"}
    config = PolicyConfig(learns=learns, train_vision=True, recompute=False, **targets)  # pyright: ignore[reportArgumentType]
    plain = tiny_policy(tmp_path, family, config)
    with torch.no_grad():  # a fresh adapter's second matrices are zero, and so are gradients of the first
        for number, (name, weight) in enumerate(plain.trained_state().items()):
            if "lora_B" in name:
                weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    saving = tiny_policy(tmp_path, family, dataclasses.replace(config, recompute=True))
    saving.load_trained_state(plain.trained_state())
    for policy in (plain, saving):
        policy.images.clear()
        show_images(policy)
    replies = PolicyEngine(saving).reply(*requests(8), ReplySampling(max_new_tokens=10, temperature=1.0))
    sampled = PolicyEngine(plain).reply(*requests(8), ReplySampling(max_new_tokens=10, temperature=1.0))
    asked = requests(8)[0], [reply.ids for reply in replies]
    for one, other in zip(replies, sampled, strict=True):
        assert np.array_equal(one.ids, other.ids), "sampling is left as it was"
    left, expected = gradients(plain, asked, temperature=0.7)
    right, found = gradients(saving, asked, temperature=0.7)
    for name in ("log_probs", "entropies", "token_values", "values"):
        value, other = getattr(left, name), getattr(right, name)
        assert (other - value).abs().max() <= 1e-6 * max(1.0, float(value.detach().abs().max())), name
    assert found.keys() == expected.keys() and any("vis" in name for name in found)
    for name, gradient in expected.items():
        scale = max(1.0, float(gradient.abs().max()))
        assert (found[name] - gradient).abs().max() <= 1e-6 * scale, name
    kept = [saved_bytes(lambda p=policy: p.read(*asked).log_probs, policy) for policy in (plain, saving)]
    assert kept[1] < 0.6 * kept[0], kept


def test_log_probs_in_slices_are_those_of_all_at_once(tmp_path, monkeypatch):
    policy = tiny_policy(tmp_path)
    head = policy.backbone.model.get_output_embeddings().weight
    monkeypatch.setattr(backbone, "_LOGITS_AT_ONCE", 3 * len(head))  # three tokens
    found, kept = [], []
    for in_slices in (False, True):
        hidden = torch.randn(11, head.shape[1], generator=torch.Generator().manual_seed(0)).requires_grad_()

        def read(hidden: Tensor = hidden, in_slices: bool = in_slices) -> Any:
            tokens = torch.arange(11)
            return policy.backbone.chosen_log_probs(hidden, tokens, 0.7, with_entropies=True, in_slices=in_slices)

        kept.append(saved_bytes(read, policy))
        log_probs, entropies = read()
        head.grad = None
        (log_probs.mean() + entropies.mean()).backward()
        found.append((log_probs, entropies, hidden.grad, head.grad.clone()))
    for whole, part in zip(*found, strict=True):
        torch.testing.assert_close(part, whole, atol=1e-6, rtol=1e-6)
    assert kept[1] <= hidden.nbytes + 11 * 8 < kept[0] / 8, kept  # what it was given, and not one row of logits


def test_large_models_are_computed_twice_and_pocket_models_are_not():
    with torch.device("meta"):
        small, large = (torch.nn.Module() for _ in range(2))
        small.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8)])
        large.layers = torch.nn.ModuleList([torch.nn.Linear(2**15, 2**14)])
    assert not recompute_blocks(small, None) and recompute_blocks(large, None) and recompute_blocks(small, True)
    assert not recompute_blocks(large, False)
    assert blocks_of(large) == [*large.layers]


@pytest.mark.slow
def test_at_real_width_a_layer_keeps_its_input():
    width = "qwen2.5-vl-3b"
    before = bytes_per_token_and_layer(width, recompute=False, tokens=16)
    after = bytes_per_token_and_layer(width, recompute=True, tokens=16)
    assert after == 4 * WIDTHS[width]["hidden_size"] and before > 20 * after, (before, after)
