"""The last k images in a prompt: as the model itself reads them, from env to weights, and with k = 1 as ever."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlvlm.algorithms.sft_folders import sft_manifest_of
from rlvlm.core.episodes import Observations
from rlvlm.envs.images import draw_history
from rlvlm.envs.registry import task_env
from rlvlm.envs.slots import EnvSlot, make_slot
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.policies.vlm.vllm import collapsed
from tests.tiny_policy import FAMILIES, tiny_policy

TASK = "empty_random_6x6"


def obs_of(*snapshots: float) -> Observations:
    rows = np.array(snapshots, np.float32)[:, None]
    return Observations(texts=tuple(map(str, snapshots)), images=tuple(b"%d" % s for s in snapshots), snapshots=rows)


def played(history: int, turns: int = 3) -> EnvSlot:
    slot = make_slot(TASK, task_env(TASK), history)
    slot.begin(5)
    for _ in range(turns):
        slot.play(slot.env.action_text(slot.env.expert_action()))
    return slot


def test_history_by_hand():
    obs = obs_of(1, 2, 3)
    assert obs.with_history(1) is obs
    seen = obs.with_history(3)
    assert seen.snapshots.tolist() == [[1, 1, 1], [1, 1, 2], [1, 2, 3]]
    assert seen.images == (b"111", b"112", b"123") and seen.texts == obs.texts


def test_a_slot_sees_what_a_recorded_episode_becomes_and_goes_on_from_a_checkpoint():
    one, three = played(1), played(3)
    plain, several = one.episode().obs, three.episode().obs
    wanted = plain.with_history(3)
    assert several.images == wanted.images and several.texts == wanted.texts
    np.testing.assert_array_equal(several.snapshots, wanted.snapshots)
    # with one image everything is what it was: the env's own keys and snapshots, to the byte
    np.testing.assert_array_equal(plain.snapshots, one.episode().snapshots)
    assert plain.images == tuple(key.tobytes() for key in one.env.image_key(plain.snapshots))
    again = make_slot(TASK, task_env(TASK), 3)
    again.set_state(three.get_state())
    assert again.obs.images == three.obs.images
    for slot in (again, three):
        slot.play(slot.env.action_text(0))
    assert again.obs.images == three.obs.images
    frames = draw_history(one.env, several.snapshots)
    assert frames.shape[:2] == (4, 3)
    np.testing.assert_array_equal(frames[:, -1], draw_history(one.env, plain.snapshots))
    np.testing.assert_array_equal(frames[3, 0], frames[1, 2])
    three.begin(6)
    assert not np.ptp(three.obs.snapshots[0].reshape(3, -1), axis=0).any(), "nothing of the episode before"


@pytest.mark.parametrize("family", FAMILIES)
def test_several_images_are_read_as_the_model_reads_them(family, tmp_path):
    policy = tiny_policy(tmp_path, family, PolicyConfig(learns="all", history=3))
    frames = np.random.default_rng(1).integers(0, 256, (2, 3, 56, 56, 3), np.uint8)
    frames[1, :2] = frames[0, 1:]  # the next turn
    encoded: list[int] = []
    encode = policy.backbone.encode_images
    policy.backbone.encode_images = lambda frames: encoded.append(len(frames)) or encode(frames)
    for key, several in zip((b"first", b"second"), frames, strict=True):
        policy.show([key], several[None])
    assert encoded == [3, 1], "an image of a turn before is not encoded again"
    obs = Observations(texts=("Go.", "Which way?"), images=(b"first", b"second"))
    replies = PolicyEngine(policy).reply(obs, [0, 1], ReplySampling(max_new_tokens=6))
    ids = [reply.ids for reply in replies]
    read = policy.read(obs, ids).log_probs.detach()
    for row, (reply, text, several) in enumerate(zip(replies, obs.texts, frames, strict=True)):
        np.testing.assert_allclose(read[row, : len(reply.ids)], reply.log_probs, atol=1e-4)
        content: list[dict[str, Any]] = [*[{"type": "image"}] * 3, {"type": "text", "text": text}]
        chat = policy.processor.apply_chat_template([{"role": "user", "content": content}])
        inputs = dict(policy.processor(text=[chat], images=[list(several)]))
        prompt = inputs["input_ids"]
        assert policy.prompts(obs)[row].tolist() == prompt[0].tolist()
        # what vLLM is sent has one place for each image
        sent = collapsed(prompt[0].tolist(), policy.backbone.image_id, 3)
        assert sent.count(policy.backbone.image_id) == 3
        both = torch.cat([prompt, torch.tensor(reply.ids)[None]], 1)
        inputs |= {"input_ids": both, "attention_mask": torch.ones_like(both)}
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = (both == policy.backbone.image_id).int()
        with torch.no_grad():
            logits = policy.model(**inputs).logits[0].float()
        table = logits.index_fill(-1, policy.banned_ids, -1e9).log_softmax(-1)[prompt.shape[1] - 1 : -1]
        own = table.gather(1, torch.tensor(reply.ids)[:, None])[:, 0]
        np.testing.assert_allclose(read[row, : len(reply.ids)], own, atol=2e-4)
    # the oldest image matters
    other = frames[:1].copy()
    other[0, 0] = 255 - other[0, 0]
    policy.show([b"other"], other)
    changed = policy.read(replace(obs.at([0]), images=(b"other",)), ids[:1]).log_probs.detach()
    assert (changed[0, : len(ids[0])] - read[0, : len(ids[0])]).abs().max() > 1e-6


def test_eyes_that_learn_look_again_at_each_of_several(tmp_path):
    policy = tiny_policy(tmp_path, "qwen3_vl", PolicyConfig(learns="all", history=2, train_vision=True))
    frames = np.random.default_rng(1).integers(0, 256, (2, 2, 56, 56, 3), np.uint8)
    policy.show([b"a", b"b"], frames)
    obs, ids = Observations(texts=("Go.", "Go."), images=(b"a", b"b")), [np.array([5, 6])] * 2
    learned = policy.read(obs, ids).log_probs
    with torch.no_grad():
        torch.testing.assert_close(policy.read(obs, ids).log_probs, learned.detach(), atol=1e-4, rtol=1e-4)
    learned.sum().backward()
    assert any(p.grad is not None and p.grad.any() for name, p in policy.model.named_parameters() if "visual" in name)


def test_other_numbers_of_images_are_refused():
    one, three = (sft_manifest_of(TASK, task_env(TASK), PolicyConfig(history=k), ("+", "-")) for k in (1, 3))
    assert one.lacks(three) == ["policy.history was 1"] and three.lacks(three) == []
