"""The example of a VLA of one's own: a Gaussian, whose log-probs are densities; and what such a policy may not give."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import resumed, run_here

from rlvlm.algorithms.policy_gradient.chunks import ChunkSampler, check_chunks, play_chunks
from rlvlm.algorithms.policy_gradient.config import chunk_defaults
from rlvlm.core.errors import UsageError
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.push_block import PushBlock
from rlvlm.policies.protocol import Reading
from rlvlm.policies.vla.build import build_policy
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vla.policy import SampledChunks

OWN = str(Path(__file__).parents[2] / "examples" / "own_policy.py") + ":GaussianVLA"
CONFIG = VLAConfig(head=OWN, settings={"width": "32"})
ENV = PushBlock(ChunkEnvConfig(episode_steps=16), seed=0)


def gaussian() -> Any:
    torch.manual_seed(0)
    return build_policy(CONFIG, ENV)


def test_densities_above_one_are_learned_from_like_any_log_prob():
    policy = gaussian()
    policy.log_std.data.fill_(-3.0)  # a standard deviation of .05: densities far above 1
    algo = chunk_defaults(temperature=1.0)
    generator = torch.Generator().manual_seed(1)
    sampler = ChunkSampler(policy=policy, env=ENV, algo=algo, greedy=False, generator=generator)
    ids = np.arange(3)
    for episode in play_chunks(ENV.many(), "", ids, ids, sampler):
        stored = np.stack(episode.log_probs)
        found = policy.log_probs(episode.obs.at(range(len(episode))), episode.answers, Reading()).log_probs
        np.testing.assert_allclose(found.detach().numpy(), stored, atol=1e-4)
        assert (stored > 0).mean() > 0.5
        # every element of every step that was run is learned from, whatever the sign of its log-prob
        run = [np.arange(stored.shape[1]) < 7 * steps for steps in episode.steps]
        assert all(map(np.array_equal, episode.masks, run))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actions": np.zeros((2, 7, 8))}, r"actions \[2, 7, 8\], not \[2, 8, 7\]"),
        ({"mask": np.ones((2, 55), bool)}, r"mask \[2, 55\], not \[2, 56\]"),
        ({"log_probs": np.zeros(2)}, r"log_probs \[2\]"),
        ({"answers": [{}]}, "1 answers, not 2"),
        ({"steps": np.arange(56)}, "steps from 0 to 55, not 0 to 7"),
        ({"values": np.zeros((2, 1))}, r"values \[2, 1\], not \[2\]"),
    ],
)
def test_chunks_of_another_form_are_refused_by_name(change, message):
    right = SampledChunks(
        actions=np.zeros((2, 8, 7), np.float32), answers=[{}, {}], log_probs=np.zeros((2, 56), np.float32),
        mask=np.ones((2, 56), bool), steps=np.arange(56) // 7, values=np.zeros(2, np.float32),
    )  # fmt: skip
    check_chunks(right, 2, ENV, "own")
    with pytest.raises(UsageError, match="the policy own sampled .*" + message):
        check_chunks(replace(right, **change), 2, ENV, "own")


@pytest.mark.parametrize(
    ("head", "settings", "message"),
    [
        ("wide", {}, "policy.head must be one of tokens"),
        (OWN, {"depth": "3"}, "unexpected keyword argument 'depth'"),
        (OWN.replace("GaussianVLA", "json"), {}, "policy.head"),
        ("tokens", {"width": "3"}, "policy.settings has no effect"),
    ],
)
def test_an_unusable_policy_is_refused(head, settings, message):
    with pytest.raises((UsageError, ValueError), match=message):
        build_policy(VLAConfig(head=head, settings=settings), ENV)


@pytest.mark.ray
@pytest.mark.slow
def test_it_trains_and_goes_on_exactly(local_ray, tmp_path):
    words = (
        f"push_block --policy.head {OWN} --policy.settings width 32 --steps 6000 --sft.episodes 12 --sft.updates 60 "
        "--algo.groups 6 --algo.group-size 4 --algo.rounds 1 --eval.every-steps 2000 --eval.episodes 4 "
        "--track.checkpoint-every-steps 1000 --track.log-every-steps 1000"
    ).split()
    run_here("run", *words, "--out", str(tmp_path / "whole"))
    resumed(tmp_path / "whole")
