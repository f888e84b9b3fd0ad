"""A policy on a random chat VLM of a real class, a few thousand weights, and random images to ask it about."""

import dataclasses
from pathlib import Path

import numpy as np
import torch

from rlvlm.core.episodes import Observations
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.loading import load_policy
from rlvlm.policies.vlm.policy import VLMPolicy

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_next")
PROMPTS = ("Go.", "Which way is the goal? Think, then act.", "You see a number line; add or subtract one.", "")


def tiny_policy(
    folder: Path, family: str = "qwen3_vl", config: PolicyConfig | None = None, num_actions: int = 0
) -> VLMPolicy:
    """Random weights, the same for each call; two images of different size are shown under `image 0` to `image 3`."""
    from tests.tiny_vlm import save_tiny_llava_next, save_tiny_vlm  # seconds, which actors need not wait for

    save_tiny_llava_next(folder) if family == "llava_next" else save_tiny_vlm(folder, family)
    settings = dataclasses.replace(config or PolicyConfig(learns="all"), model=str(folder), device="cpu", seed=1)
    policy = load_policy(settings, num_actions)
    for head in (policy.value_head, policy.action_head):
        if head is not None:  # heads that begin at zero would hide mistakes
            head.state_dict()["2.weight"].normal_(generator=torch.Generator().manual_seed(2))
    show_images(policy)
    return policy


def show_images(policy: VLMPolicy) -> None:
    rng = np.random.default_rng(0)
    for first, size in ((0, (56, 56)), (2, (56, 96))):
        frames = rng.integers(0, 256, (2, *size, 3), np.uint8)
        policy.show([b"image %d" % (first + i) for i in range(2)], frames)


def requests(count: int = 4, seed: int = 0) -> tuple[Observations, range]:
    """Prompts of different length about images of different size, and the seed of each reply."""
    obs = Observations(
        texts=tuple(PROMPTS[i % 4] for i in range(count)),
        images=tuple(b"image %d" % ((i * 3) % 4) for i in range(count)),
    )
    return obs, range(seed, seed + count)
