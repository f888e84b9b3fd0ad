"""A conditioned policy is asked for what is better than expected, and learns what it is told of what it is shown."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlvlm.core.episodes import Observations
from rlvlm.envs.registry import make_env, task_env
from rlvlm.policies.advantage_prompt import P_DROPPED, positive, told
from rlvlm.policies.vla.build import build_policy
from rlvlm.policies.vla.config import PocketVLAConfig, VLAConfig
from rlvlm.policies.vla.policy import Sampling
from rlvlm.policies.vla.tokens import log_probs_of
from rlvlm.policies.vlm.config import PolicyConfig
from tests.tiny_policy import tiny_policy


def test_advantage_words_follow_the_judgement_and_are_dropped_now_and_then():
    judged = np.repeat(np.array([1.0, 0.0, np.nan], np.float32), 400)
    texts = told(["go"] * 1_200, judged, np.random.default_rng(0))
    for begin, word in ((0, "go\nAdvantage: positive"), (400, "go\nAdvantage: negative")):
        part = texts[begin : begin + 400]
        assert set(part) == {"go", word} and abs(part.count("go") / 400 - P_DROPPED) < 0.06
    assert set(texts[800:]) == {"go"}
    assert positive(["go"]) == ("go\nAdvantage: positive",)


def test_a_vla_reads_the_word_when_it_plays_and_not_what_it_is_shown():
    env = make_env("push_block", task_env("push_block"), 0)
    config = VLAConfig(conditioned=True, pocket=PocketVLAConfig(image_px=16, hidden=32))
    policy = build_policy(config, env)  # pyright: ignore[reportArgumentType] - its kind
    obs: Observations = env.reset_to(0)[0]
    policy.show(obs.images, policy.draw(env, obs.snapshots))
    asked, shown = policy.inputs(obs)[1], policy.shown_inputs(env, obs)[1]  # pyright: ignore[reportArgumentType]
    assert torch.equal(asked, policy.read(positive(obs.texts))) and torch.equal(shown, policy.read(obs.texts))
    assert not torch.equal(asked, shown)


def test_a_vlm_reads_the_word_when_it_plays_and_not_what_it_is_shown(tmp_path):
    policy = tiny_policy(tmp_path, config=PolicyConfig(learns="all", conditioned=True))
    plain = tiny_policy(tmp_path)
    obs = Observations(texts=("Go.",), images=(b"image 0",))
    word = Observations(texts=positive(obs.texts), images=obs.images)
    assert policy.prompts(obs)[0].tolist() == plain.prompts(word)[0].tolist()
    with policy._as_shown():
        assert policy.prompts(obs)[0].tolist() == plain.prompts(obs)[0].tolist()


@pytest.mark.parametrize("head", ["tokens", "flow"])
def test_guidance_exaggerates_what_the_word_changes_when_sampled_and_when_learned(head):
    env = make_env("push_block", task_env("push_block"), 0)
    pocket = PocketVLAConfig(image_px=16, hidden=32)
    config = VLAConfig(head=head, conditioned=True, guidance=3.0, pocket=pocket)
    torch.manual_seed(0)
    policy = build_policy(config, env)  # pyright: ignore[reportArgumentType] - its kind
    for weight in policy.parameters():  # a new head of flows says nothing yet
        weight.data += 0.1 * torch.randn_like(weight)
    obs: Observations = env.reset_to(0)[0]
    policy.show(obs.images, policy.draw(env, obs.snapshots))
    shown = SimpleNamespace(obs=obs, actions=np.random.default_rng(0).uniform(-1, 1, (9, 1, len(env.action_low))))
    policy.learn_statistics(shown, env)  # pyright: ignore[reportArgumentType] - all that it reads
    drawn = policy.sample(obs, Sampling(temperature=1.0))
    (same,) = policy.log_probs(obs, drawn.answers).log_probs.detach().numpy()
    np.testing.assert_allclose(same, drawn.log_probs[0], atol=1e-5)

    def log_probs(**changes: Any) -> Tensor:
        policy.config = replace(config, **changes)
        return policy.log_probs(obs, drawn.answers).log_probs.detach()

    if head == "tokens":
        asked, images, proprio = policy.read(positive(obs.texts)), *policy.shown_inputs(env, obs)[::2]
        with torch.no_grad():
            told, plain = policy(images, asked, proprio), policy(images, policy.read(obs.texts), proprio)
        bins = torch.from_numpy(drawn.answers[0]["bins"].astype(np.int64))[None]
        by_hand = log_probs_of(3 * told - 2 * plain, bins, 1.0)
        torch.testing.assert_close(log_probs(), by_hand, atol=1e-5, rtol=0)
    # the same word weighed by 1 is no guidance, and another policy
    assert not torch.allclose(log_probs(), log_probs(guidance=1.0), atol=1e-4)
