"""Supervised loss of a chat VLM on demonstrated replies: the likelihood of their tokens is raised, or of the action
that an action head should have picked, and of nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlvlm.core.episodes import IntArray, Observations, TokenEpisode
from rlvlm.envs.env import TurnEnv


@dataclass(frozen=True, slots=True)
class Example:
    """A turn to learn from, whose image the policy was shown."""

    prompt: str
    image: bytes
    """Key of the image."""
    ids: IntArray
    """[N] token ids of the reply as the policy would have sampled it."""
    action: int | None
    """Action of the demonstration; None if its reply is unreadable."""
    number: int = 0
    """Index of the turn among all that were shown."""


def examples_of(policy: Any, env: TurnEnv, episodes: Sequence[TokenEpisode]) -> list[Example]:
    """Returns the turns of `episodes` that the policy can learn from, and shows it their images.

    A policy with an action head learns actions, so turns without a readable one are left out.
    """
    obs, replies = policy.demonstrated(episodes, env)  # a turn's number of tokens depends on its image
    turns = zip(obs.texts, obs.images, replies, strict=True)
    return [
        Example(prompt, key, policy.write(reply.text), reply.action, number)
        for number, (prompt, key, reply) in enumerate(turns)
        if policy.action_head is None or reply.action is not None
    ]


def observations_of(examples: Sequence[Example]) -> Observations:
    """Returns the observations of `examples`."""
    return Observations(
        texts=tuple(example.prompt for example in examples), images=tuple(example.image for example in examples)
    )


def lengths_of(policy: Any, examples: Sequence[Example]) -> list[int]:
    """Returns [M], the tokens of each example's prompt and reply together."""
    prompts = policy.prompts(observations_of(examples))
    return [len(prompt) + len(example.ids) for prompt, example in zip(prompts, examples, strict=True)]


def imitation_loss(
    policy: Any, batch: Sequence[Example], reply_weight: float = 0.0, weights: Tensor | None = None
) -> Tensor:
    """Returns the mean over turns of -log p(reply) in nats, or of -log p(action) for a policy with an action head.

    Args:
        policy: a `VLMPolicy` in training.
        batch: turns; for a policy with an action head all have an action.
        reply_weight: weight of -log p(reply) relative to -log p(action), with an action head.
        weights: [B] weight of each turn; None: all 1.
    """
    obs, ids = observations_of(batch), [example.ids for example in batch]
    counts = 1.0 if weights is None else weights.to(policy.device)
    # -log p(reply) = - sum_n log p(token_n | image, prompt, tokens before it)
    if policy.action_head is None:
        return -(policy.read(obs, ids).log_probs.sum(-1) * counts).mean()
    actions = torch.tensor([example.action for example in batch], device=policy.device)
    if not reply_weight:
        table, _ = policy.act_log_probs(obs)
        return -(table.gather(-1, actions[:, None])[:, 0] * counts).mean()
    read = policy.read(obs, ids, with_actions=True)
    assert read.actions is not None, "asked for"
    wrong = -(read.actions.gather(-1, actions[:, None])[:, 0] * counts).mean()
    return wrong - reply_weight * (read.log_probs.sum(-1) * counts).mean()
