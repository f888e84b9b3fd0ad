"""A policy's log-probs and values: batched against single, sampled against recomputed, and what may not be written."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn.modules import Linear4bit

from rlvlm.core.episodes import IntArray, Observations, SampledReply
from rlvlm.core.errors import UsageError
from rlvlm.policies.protocol import Reading
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.policies.vlm import loading
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.policies.vlm.policy import VLMPolicy
from tests.tiny_policy import FAMILIES, requests, show_images, tiny_policy


@pytest.fixture(scope="module", params=FAMILIES)
def policy(request, tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("vlm"), request.param)


def sample(
    policy: VLMPolicy, count: int = 8, temperature: float = 1.0
) -> tuple[Observations, list[IntArray], list[SampledReply]]:
    """What was asked, the ids of the replies, and the replies."""
    replies = PolicyEngine(policy).reply(*requests(count), ReplySampling(max_new_tokens=10, temperature=temperature))
    return requests(count)[0], [reply.ids for reply in replies], replies


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampled_log_probs_are_the_recomputed_ones(policy, temperature):
    obs, tokens, replies = sample(policy, temperature=temperature)
    read = policy.read(obs, tokens, Reading(temperature=temperature))
    for row, reply in enumerate(replies):
        count = len(reply.log_probs)
        assert not read.log_probs[row, count:].any()
        np.testing.assert_allclose(read.log_probs[row, :count].detach(), reply.log_probs, atol=1e-4)
        assert float(read.values[row].detach()) == pytest.approx(reply.value, abs=1e-3)


def test_a_batch_reads_as_its_rows_do(policy):
    obs, tokens, _ = sample(policy)
    batch = policy.read(obs, tokens, Reading(with_entropies=True, with_token_values=True))
    assert batch.entropies is not None and batch.token_values is not None
    for row, one in enumerate(tokens):
        single = policy.read(obs.at([row]), [one], Reading(with_entropies=True, with_token_values=True))
        assert single.entropies is not None and single.token_values is not None
        count = len(one)
        for many, alone in (
            (batch.log_probs, single.log_probs),
            (batch.entropies, single.entropies),
            (batch.token_values, single.token_values),
        ):
            torch.testing.assert_close(many[row, :count], alone[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(batch.values[row], single.values[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(batch.token_values[row, 0], batch.values[row], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(policy.values(obs.at([row]))[0], single.values[0], atol=1e-4, rtol=1e-4)


def test_gradients_are_finite_and_stay_out_of_the_eyes(policy):
    policy.zero_grad()
    read = policy.read(*sample(policy)[:2], Reading(with_entropies=True))
    assert read.entropies is not None
    (read.log_probs.sum() + read.values.sum() + read.entropies.sum()).backward()
    gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    assert all(torch.isfinite(g).all() for g in gradients.values())
    assert any("language_model" in name for name in gradients) and any("value_head" in name for name in gradients)
    assert not any("visual" in name or "vision_tower" in name for name in gradients)
    policy.zero_grad()


def test_a_detached_value_does_not_reach_the_backbone(policy):
    policy.zero_grad()
    policy.read(*sample(policy, 2)[:2], Reading(detach_values=True)).values.sum().backward()
    assert all(p.grad is None for p in policy.acting_parameters())
    assert any(p.grad is not None for p in policy.value_parameters())
    policy.zero_grad()


def test_the_critic_sees_the_image_and_where_the_prompt_ends_and_nothing_else(policy):
    obs, tokens, _ = sample(policy)
    padded = policy.pad(obs, tokens)
    hidden = policy.hidden(padded, obs.images).detach()
    is_image = padded.ids == policy.backbone.image_id
    is_last = torch.arange(padded.ids.shape[1]).expand_as(is_image) == padded.prompt_length - 1
    before = policy.prompt_values(hidden, padded)
    for seen, is_moved in ((is_image, True), (is_last, True), (~is_image & ~is_last, False)):
        moved = policy.prompt_values(hidden + seen[..., None] * torch.linspace(-1, 1, hidden.shape[-1]), padded)
        assert ((before - moved).abs() > 1e-4).all() == is_moved


def test_banned_tokens_have_no_probability(policy):
    tokenizer = policy.tokenizer
    banned = set(policy.banned_ids.tolist())
    assert policy.stop_id not in banned and policy.backbone.pad_id in banned
    assert policy.model.config.image_token_id in banned
    assert {tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|vision_start|>")} <= banned
    with torch.no_grad():
        hidden = torch.randn(3, policy.backbone.text_config.hidden_size)
        policy_logits = policy.backbone.next_token_log_probs(hidden, 1.0)
    assert policy_logits[:, policy.banned_ids].exp().max() == 0
    torch.testing.assert_close(policy_logits.exp().sum(-1), torch.ones(3))


def test_demonstrations_end_as_replies_do(policy):
    written = policy.write('{"action": "+"}')
    assert written[-1] == policy.stop_id
    assert policy.text_of(written) == '{"action": "+"}'
    with pytest.raises(ValueError, match="special tokens"):
        policy.write("a<|im_end|>b")


def test_an_action_head_reads_a_batch_as_its_rows(tmp_path):
    config = PolicyConfig(learns="all", head="actions")
    policy = tiny_policy(tmp_path, "qwen3_vl", config, num_actions=3)
    engine = PolicyEngine(policy)
    obs, seeds = requests(8)
    actions = engine.reply(obs, seeds, ReplySampling(max_new_tokens=1))
    log_probs, values = policy.act_log_probs(obs)
    assert log_probs.shape == (8, 3)
    for row, action in enumerate(actions):
        assert float(log_probs[row, action.action].detach()) == pytest.approx(action.log_probs[0], abs=1e-4)
        alone, value = policy.act_log_probs(obs.at([row]))
        torch.testing.assert_close(alone[0], log_probs[row], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(value[0], values[row], atol=1e-4, rtol=1e-4)
    greedy = engine.reply(obs, seeds, ReplySampling(max_new_tokens=1, greedy=True))
    assert [action.action for action in greedy] == log_probs.argmax(-1).tolist()


def test_an_adapter_alone_learns_and_earlier_weights_can_be_looked_through(tmp_path):
    policy = tiny_policy(tmp_path, "qwen2_5_vl", PolicyConfig(learns="lora", lora_rank=2))
    assert policy.acting_parameters()
    assert all("lora_" in name or "_head" in name for name in policy.trained_state())
    assert not any("visual" in name for name in policy.trained_state())
    obs, tokens, _ = sample(policy)
    base = policy.read(obs, tokens).log_probs.detach()
    before = {name: value.clone() for name, value in policy.trained_state().items()}
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    now = policy.read(obs, tokens).log_probs.detach()
    assert (now - base).abs().max() > 1e-4
    with policy.with_weights(before):
        torch.testing.assert_close(policy.read(obs, tokens).log_probs.detach(), base)
    assert torch.equal(policy.read(obs, tokens).log_probs.detach(), now)
    with pytest.raises(ValueError, match="another policy"), policy.with_weights({"x": torch.zeros(1)}):
        pass


def test_trained_weights_travel(tmp_path):
    first, second = (tiny_policy(tmp_path / name) for name in ("a", "b"))
    for parameter in first.acting_parameters() + first.value_parameters():
        parameter.data.add_(0.01)
    asked = sample(first)[:2]
    assert (first.read(*asked).log_probs - second.read(*asked).log_probs).abs().max() > 1e-4
    second.load_trained_state(first.trained_state())
    torch.testing.assert_close(first.read(*asked).log_probs, second.read(*asked).log_probs)
    with pytest.raises(ValueError, match="another policy"):
        second.load_trained_state({"x": torch.zeros(1)})


def test_trained_eyes_look_again_and_get_gradients(tmp_path):
    policy = tiny_policy(tmp_path, "qwen3_vl", PolicyConfig(learns="all", train_vision=True))
    asked = sample(policy)[:2]
    read = policy.read(*asked)
    read.log_probs.sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in policy.model.model.visual.parameters())
    with torch.no_grad():
        torch.testing.assert_close(policy.read(*asked).log_probs, read.log_probs.detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "quantization"), [("bfloat16", "none"), ("float32", "nf4")])
def test_coarse_weights_sample_and_learn(tmp_path, dtype, quantization):
    """Heads and log-probs are float32 whatever the weights are; only the adapter and the heads take gradients."""
    config = PolicyConfig(learns="lora", lora_rank=4, dtype=dtype, quantization=quantization)
    policy = tiny_policy(tmp_path, "qwen3_vl", config)
    obs, tokens, replies = sample(policy)
    read = policy.read(obs, tokens)
    assert read.log_probs.dtype == read.values.dtype == torch.float32
    for row, reply in enumerate(replies):
        recomputed = read.log_probs[row, : len(reply.log_probs)].detach().numpy()
        np.testing.assert_allclose(recomputed, reply.log_probs, atol=0.2 if dtype == "bfloat16" else 1e-3)
    (read.log_probs.sum() + read.values.sum()).backward()
    learning = {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
    assert learning and all("lora_" in name or name.startswith("value_head") for name in learning)


def test_gradients_through_4_bit_weights_are_those_of_the_weights_they_stand_for(tmp_path):
    config = PolicyConfig(learns="lora", lora_rank=4, dtype="float32", quantization="nf4")
    policy = tiny_policy(tmp_path, "qwen3_vl", config)
    for parameter in policy.acting_parameters():
        parameter.data.normal_(std=0.01, generator=torch.Generator().manual_seed(3))
    asked = sample(policy)[:2]

    def gradients() -> list[torch.Tensor]:
        policy.zero_grad()
        policy.read(*asked).log_probs.sum().backward()
        return [p.grad.clone() for p in policy.acting_parameters() if p.grad is not None]

    coarse = gradients()
    for module in list(policy.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Linear4bit):
                plain = torch.nn.Linear(child.in_features, child.out_features, child.bias is not None)
                packed: Any = child.weight
                weight = dequantize_4bit(packed.data, packed.quant_state)
                plain.weight = torch.nn.Parameter(weight.float(), requires_grad=False)
                if child.bias is not None:
                    plain.bias = torch.nn.Parameter(child.bias.data.float(), requires_grad=False)
                setattr(module, name, plain)
    exact = gradients()
    assert len(coarse) == len(exact) > 0
    for one, other in zip(coarse, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2 * float(other.abs().max()))


def test_eyes_that_stop_learning_look_once_and_are_still_saved(tmp_path):
    policy = tiny_policy(tmp_path, "qwen3_vl", PolicyConfig(learns="all", train_vision=True))
    policy.stop_training_vision()
    assert len(policy.images) == 0, "what was encoded with other eyes is forgotten"
    show_images(policy)
    read = policy.read(*sample(policy)[:2])
    read.log_probs.sum().backward()
    eyes = dict(policy.model.model.visual.named_parameters())
    assert eyes and all(parameter.grad is None for parameter in eyes.values())
    assert any(".visual." in name for name in policy.trained_state())


def test_features_of_eyes_that_have_changed_are_forgotten(tmp_path):
    kept, changed = (
        tiny_policy(tmp_path / str(learns), "qwen3_vl", PolicyConfig(learns="all", train_vision=learns))
        for learns in (False, True)
    )
    for policy in (kept, changed):
        policy.forget_stale_images()
    assert (len(kept.images), len(changed.images)) == (4, 0)


def test_new_words_are_one_token_each_and_begin_as_the_mean_of_their_parts(tmp_path):
    words = ("Which way is the goal? ", "add or subtract one")
    plain, taught = (
        tiny_policy(tmp_path, "qwen3_vl", PolicyConfig(learns="all", new_words=new)) for new in ((), (*words, "a"))
    )
    parts = plain.tokenizer(words[0], add_special_tokens=False)["input_ids"]
    (token,) = taught.tokenizer(words[0], add_special_tokens=False)["input_ids"]
    for side in ("get_input_embeddings", "get_output_embeddings"):
        before, after = (getattr(policy.model, side)().weight for policy in (plain, taught))
        torch.testing.assert_close(after[token], before[parts].mean(0))
    prompt = f"{words[0]}Then {words[1]}."
    short, long = (policy.backbone.encode(prompt, (56, 56)) for policy in (taught, plain))
    assert len(parts) > 1 and len(short) < len(long)
    assert taught.text_of(taught.write(prompt)) == prompt
    assert len(taught.tokenizer) == len(plain.tokenizer) + 2, "what is one token already stays it"
    assert token not in taught.banned_ids.tolist()


@pytest.mark.parametrize("settings", [{"learns": "lora"}, {"adapter": "mine"}, {"model": "some/model"}])
def test_new_words_are_refused_where_their_vectors_would_not_learn(settings):
    with pytest.raises(ValueError, match="policy.new_words has no effect where an adapter learns, got 1 of them"):
        PolicyConfig(new_words=("hello",), **settings)
    assert not PolicyConfig(new_words=(), **settings).new_words
    assert PolicyConfig(new_words=("hello",), model="some/model", learns="all").new_words


def test_a_vision_encoder_that_nothing_would_teach_is_refused(tmp_path):
    config = PolicyConfig(learns="lora", lora_rank=2, train_vision=True)
    with pytest.raises(UsageError, match="policy.train_vision has no effect"):
        tiny_policy(tmp_path, "qwen3_vl", config)
    both = tiny_policy(tmp_path, "qwen3_vl", dataclasses.replace(config, lora_targets="all-linear"))
    assert any("visual" in name for name in both.trained_state())


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"learns": "all"}, "float32"),
        ({}, "float32"),  # the pocket policy, all of it
        ({"learns": "all", "dtype": "bfloat16"}, "bfloat16"),
        ({"learns": "lora"}, "auto"),
        ({"model": "some/model"}, "auto"),
    ],
)
def test_weights_that_learn_are_not_rounded(settings, dtype, tmp_path, monkeypatch):
    """On a GPU `auto` is bfloat16, in which a step of Adam is often less than the last bit of a weight."""

    class EnoughSeen(Exception):
        pass

    def look(config: PolicyConfig, *, trainable: bool) -> None:
        assert (config.dtype, trainable) == (dtype, True)
        raise EnoughSeen

    monkeypatch.setattr("rlvlm.vlms.loading.load_vlm", look)
    monkeypatch.setattr(loading, "fetched", lambda *_: tmp_path)  # nothing is fetched of a model that is none
    with pytest.raises(EnoughSeen):
        loading.load_policy(PolicyConfig(**settings))
