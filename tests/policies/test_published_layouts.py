"""Chat VLMs as they lie on the hub, by folder: as judge and as policy, with NF4 and with adapters of two ages.

What docs/policies.md says of each line is what these tests, and those of sharded learners, have seen.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlvlm.core.errors import ModelUnavailable
from rlvlm.core.judging import Clip, Query, Status
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.policies.vlm.config import FAMILIES, PolicyConfig
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.policies.vlm.loading import load_policy
from rlvlm.policies.vlm.policy import VLMPolicy
from rlvlm.vlms.lora import ADAPTER_WEIGHTS, save_adapter
from tests.published import SAVE, old_name, save_published
from tests.tiny_policy import requests, show_images

FRAMES = np.random.default_rng(0).integers(0, 256, (4, 56, 96, 3), np.uint8)
"""Those of `show_images` come from the same generator, but are others."""


@pytest.fixture(scope="module", params=SAVE)
def published(request, tmp_path_factory):
    """A family, and a folder in its layout."""
    return request.param, save_published(tmp_path_factory.mktemp("hub") / request.param, request.param)


def judged(folder: Path, **changes: Any) -> tuple[Any, float]:
    """Probabilities of a pair's labels, and a clip's score."""
    judge = build_judge(JudgeConfig(backend="transformers", model=str(folder), score="success", **changes))
    (verdict,) = judge.compare([Query(goal="open it", left=FRAMES[:1], right=FRAMES[1:2])])
    (score,) = judge.score([Clip(goal="open it", frames=FRAMES[2:])])
    # random weights mostly like other words better than a label, and then the answer is invalid
    assert verdict.status is not Status.FAILED and verdict.probabilities is not None, verdict
    assert score.status is not Status.FAILED, score
    return verdict.probabilities, score.value or 0.0


def acting(folder: Path, **changes: Any) -> VLMPolicy:
    config = PolicyConfig(**({"model": str(folder), "learns": "all", "device": "cpu", "seed": 1} | changes))
    policy = load_policy(config)
    show_images(policy)
    return policy


def check_recomputed(policy: VLMPolicy, count: int = 8) -> None:
    """Passes where log-probs as they were sampled, prompts of different length in one batch, are those recomputed."""
    obs, seeds = requests(count)
    replies = PolicyEngine(policy).reply(obs, seeds, ReplySampling(max_new_tokens=6))
    read = policy.read(obs, [reply.ids for reply in replies]).log_probs.detach().numpy()
    for row, reply in enumerate(replies):
        np.testing.assert_allclose(read[row, : len(reply.log_probs)], reply.log_probs, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_judge_answers_a_pair_and_a_score(published):
    exact, coarse = judged(published[1]), judged(published[1], quantization="nf4")
    for probabilities, _ in (exact, coarse):
        assert sum(probabilities) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.slow
def test_a_policy_samples_what_it_recomputes_and_what_its_own_forward_pass_says(published):
    family, folder = published
    policy = acting(folder)
    check_recomputed(policy)
    rng = np.random.default_rng(0)  # the same frames as in tests.tiny_policy
    frames = [frame for size in ((56, 56), (56, 96)) for frame in rng.integers(0, 256, (2, *size, 3), np.uint8)]
    obs, seeds = requests(4)
    replies = PolicyEngine(policy).reply(obs, seeds, ReplySampling(max_new_tokens=6))
    read = policy.read(obs, [reply.ids for reply in replies]).log_probs.detach()
    for row, (prompt, reply) in enumerate(zip(obs.texts, replies, strict=True)):
        content = [{"type": "image"}, {"type": "text", "text": prompt}]
        chat = policy.processor.apply_chat_template([{"role": "user", "content": content}])
        inputs = policy.processor([chat], [[frames[int(reply.image[-1:])]]])
        ids = torch.from_numpy(reply.ids)[None]
        whole = {
            name: torch.cat([value, ids if name == "input_ids" else torch.full_like(ids, name == "attention_mask")], 1)
            for name, value in inputs.items()
            if value.shape == inputs["input_ids"].shape
        }
        with torch.no_grad():
            logits = policy.model(**(inputs | whole)).logits[0, -ids.shape[1] - 1 : -1].float()
        logits[:, policy.banned_ids] = -torch.inf
        expected = logits.log_softmax(-1).gather(-1, ids[0, :, None])[:, 0]
        torch.testing.assert_close(read[row, : len(expected)], expected, atol=1e-4, rtol=0, msg=family)


@pytest.mark.slow
def test_an_adapter_learns_beside_coarse_weights_and_is_read_by_names_of_either_age(published, tmp_path):
    family, folder = published
    policy = acting(folder, learns="lora", lora_rank=2, quantization="nf4")
    obs, seeds = requests(4)
    replies = PolicyEngine(policy).reply(obs, seeds, ReplySampling(max_new_tokens=6))
    policy.read(obs, [reply.ids for reply in replies]).log_probs.sum().backward()
    learned = [name for name, one in policy.named_parameters() if one.grad is not None and one.grad.abs().sum() > 0]
    assert learned and all("lora_" in name for name in learned)

    policy = acting(folder, learns="lora", lora_rank=2)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.5, generator=torch.Generator().manual_seed(len(name)))
    save_adapter(policy.model, tmp_path / "new")
    check_recomputed(policy)
    (tmp_path / "old").mkdir()
    weights = load_file(tmp_path / "new" / ADAPTER_WEIGHTS)
    prefix = "base_model.model."
    older = {prefix + old_name(name.removeprefix(prefix), family): value for name, value in weights.items()}
    save_file(older, tmp_path / "old" / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (tmp_path / "old" / "adapter_config.json").write_text((tmp_path / "new" / "adapter_config.json").read_text())
    plain, *adapted = judged(folder), *(judged(folder, adapter=str(tmp_path / age)) for age in ("new", "old"))
    assert adapted[0][0] == pytest.approx(adapted[1][0], abs=1e-6)
    assert max(abs(one - other) for one, other in zip(plain[0], adapted[0][0], strict=True)) > 1e-4
    again = acting(folder, adapter=str(tmp_path / "old"))
    for name, value in policy.trained_state().items():
        if "lora_" in name:
            assert torch.equal(again.trained_state()[name], value), name


def test_an_uncompared_layout_is_refused_at_once(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "paligemma"}))
    with pytest.raises(ModelUnavailable, match="paligemma model, which cannot be trained") as caught:
        load_policy(PolicyConfig(model=str(tmp_path)))
    assert all(name in caught.value.fix for name in FAMILIES.values())
    assert FAMILIES.keys() == SAVE.keys(), "every line that is known is tried here"
