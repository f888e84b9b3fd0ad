"""A conditioned policy is asked for what is better than expected, and learns what it is told of what it is shown."""

import numpy as np
import torch

from rlvlm.core.episodes import Observations
from rlvlm.envs.registry import make_env, task_env
from rlvlm.policies.advantage_prompt import P_DROPPED, positive, told
from rlvlm.policies.vla.build import build_policy
from rlvlm.policies.vla.config import PocketVLAConfig, VLAConfig
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
