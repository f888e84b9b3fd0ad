"""Sampling: the model's own `generate` is the reference for greedy replies; seeds decide the sampled ones."""

import numpy as np
import pytest
import torch

from rlvlm.core.episodes import Observations
from rlvlm.core.errors import MachineError
from rlvlm.policies.reply_policy import ReplySampling, draw
from rlvlm.policies.vlm.engine import PolicyEngine
from tests.tiny_policy import FAMILIES, requests, tiny_policy


@pytest.fixture(scope="module", params=FAMILIES)
def policy(request, tmp_path_factory):
    return tiny_policy(tmp_path_factory.mktemp("vlm"), request.param)


def test_a_number_picks_where_it_falls_in_the_distribution():
    """Probabilities 0.5, 0, 0.25, 0.25: 0.49 is the first, 0.51 already the third, never the second."""
    table = torch.tensor([[0.5, 0.0, 0.25, 0.25]]).clamp_min(1e-45).log()
    table[0, 1] = -1e9
    for number, expected in ((0.0, 0), (0.49, 0), (0.51, 2), (0.74, 2), (0.76, 3), (0.999999, 3)):
        assert draw(table, torch.tensor([number], dtype=torch.float64)).item() == expected
    assert draw(table, None).item() == 0


@pytest.mark.slow
def test_greedy_replies_are_those_of_generate(policy):
    replies = PolicyEngine(policy).reply(*requests(4), ReplySampling(max_new_tokens=8, greedy=True))
    rng = np.random.default_rng(0)  # the same frames as in tests.tiny_policy
    frames = [frame for size in ((56, 56), (56, 96)) for frame in rng.integers(0, 256, (2, *size, 3), np.uint8)]
    obs, _ = requests(4)
    for prompt, ids, reply in zip(obs.texts, policy.prompts(obs), replies, strict=True):
        content = [{"type": "image"}, {"type": "text", "text": prompt}]
        chat = policy.processor.apply_chat_template([{"role": "user", "content": content}])
        inputs = policy.processor(text=[chat], images=[[frames[int(reply.image[-1:])]]])
        assert inputs["input_ids"][0].tolist() == ids.tolist()
        made = policy.model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=8,
            suppress_tokens=policy.banned_ids.tolist(),
            eos_token_id=policy.stop_id,
            pad_token_id=policy.backbone.pad_id,
        )
        assert made[0, inputs["input_ids"].shape[1] :].tolist() == reply.ids.tolist()


@pytest.mark.slow
def test_a_reply_depends_on_its_seed_and_not_on_its_batch(policy):
    engine = PolicyEngine(policy, max_batch=3)
    obs, seeds = requests(8)
    together = engine.reply(obs, seeds, ReplySampling(max_new_tokens=10))
    alone = [engine.reply(obs.at([row]), [seed], ReplySampling(max_new_tokens=10))[0] for row, seed in enumerate(seeds)]
    others = engine.reply(*requests(8, seed=50), ReplySampling(max_new_tokens=10))
    for one, other, third in zip(together, alone, others, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)
        assert one.ids.tolist() != third.ids.tolist()


def test_a_reply_ends_with_its_stop_token_or_is_marked_as_cut(policy):
    """The stop token is made likely, so that both kinds appear within one batch."""
    with torch.no_grad():
        head = policy.model.get_output_embeddings()
        kept = head.weight.clone()
        head.weight[policy.stop_id] = head.weight.mean(0) + 2 * head.weight.std() * torch.randn(head.weight.shape[1])
        replies = PolicyEngine(policy).reply(*requests(64), ReplySampling(max_new_tokens=6))
        head.weight.copy_(kept)
    banned = set(policy.banned_ids.tolist())
    for reply in replies:
        ids = reply.ids.tolist()
        assert len(ids) == len(reply.log_probs) and policy.stop_id not in ids[:-1] and not banned & set(ids)
        assert reply.is_complete == (ids[-1] == policy.stop_id)
        assert reply.is_complete or len(ids) == 6
        assert "<|im_end|>" not in reply.text


def test_versions_travel_and_impossible_requests_are_refused(tmp_path):
    engine = PolicyEngine(tiny_policy(tmp_path))
    engine.version = 7
    assert {reply.version for reply in engine.reply(*requests(2), ReplySampling(max_new_tokens=1))} == {7}
    with pytest.raises(MachineError, match="was not shown"):
        engine.reply(Observations(texts=("",), images=(b"never",)), [0], ReplySampling(max_new_tokens=1))
    with pytest.raises(ValueError, match="temperature"):
        engine.reply(*requests(1), ReplySampling(max_new_tokens=1, temperature=0.0))
