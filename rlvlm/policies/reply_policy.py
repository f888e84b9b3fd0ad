"""Common base of all policies for envs in turns, chat VLMs included: images and a prompt in; a text, or the number of
an action, out.

A policy of your own derives from it and gives `sample`, `log_probs` and `imitation`; `--policy.head my_file:NAME` then
acts and learns by it. `VLMPolicy` (vlm/policy.py) writes, or picks an action by a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlvlm.core.episodes import Answer, Observations, Reply, SampledReply, TokenEpisode
from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.env import TurnEnv
from rlvlm.envs.images import draw_history
from rlvlm.policies.protocol import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplySampling:
    """How replies are drawn."""

    max_new_tokens: int = 1
    """A longer reply is cut."""
    temperature: float = 1.0
    """> 0; logits are divided by it, nothing else is cut off or filtered."""
    greedy: bool = False
    """Whether the likeliest reply is taken each time; log-probs are still those of `temperature`, and vLLM's of 1."""

    def uniforms(self, seeds: Sequence[int], num: int) -> Tensor | None:
        """[num, B] in [0, 1): so many numbers for each reply, from its own seed; None where nothing is drawn."""
        if self.greedy:
            return None
        return torch.from_numpy(np.stack([np.random.default_rng(seed).random(num) for seed in seeds], 1))

    def pick(self, log_probs: Tensor, seeds: Sequence[int]) -> Tensor:
        """[B] a number in [0, A) for each reply, by `log_probs` [B, A] at `temperature` and its own seed."""
        uniforms = self.uniforms(seeds, 1)
        return draw(log_probs, None if uniforms is None else uniforms[0])


class ReplyPolicy(Policy):
    """A network that answers turns."""

    def sample(self, obs: Observations, seeds: Sequence[int], sampling: ReplySampling) -> list[SampledReply]:
        """B replies to `obs`, whose images it was shown; each is drawn by its own seed, whatever is in the batch."""
        raise NotImplementedError("each policy has its own answers")

    def draw(self, env: Any, snapshots: FloatArray) -> Frames:
        """[N, H, W, 3] the images of `snapshots` [N, D], in the env's own size; see `draw_history`."""
        return draw_history(env, snapshots)

    def demonstrated(self, shown: Sequence[TokenEpisode], env: TurnEnv) -> tuple[Observations, list[Reply]]:
        """The M turns of the episodes `shown`, in their order; the policy is shown their images."""
        for episode in shown:
            *keys, _ = episode.obs.images
            if missing := self.images.missing(keys):
                self.show([keys[index] for index in missing], self.draw(env, episode.obs.snapshots[missing]))
        # of observations there is one more than turns: the last is of the state after the episode
        obs = Observations.joined([episode.obs.at(range(len(episode.replies))) for episode in shown])
        return obs, [reply for episode in shown for reply in episode.replies]

    def num_elements(self, text: str) -> int:
        """Elements of the answer that a reply `text` would be."""
        return 1

    def action_elements(self, answer: Answer, span: tuple[int, int] | None) -> NDArray[np.bool_] | None:
        """[N] elements that make the action's value, which stands in the reply's text at `span`; None: all do."""
        return None


def draw(log_probs: Tensor, uniforms: Tensor | None) -> Tensor:
    """[B] ids: of the likeliest, or where `uniforms` [B] falls in the cumulative distribution.

    Tokens without probability add nothing to the sum, so they are never the first to exceed a number.
    """
    if uniforms is None:
        return log_probs.argmax(-1)
    # in float64: a float32 sum over 150,000 tokens ends visibly beside 1
    cumulative = log_probs.double().exp().cumsum(-1)
    threshold = uniforms.to(cumulative.device)[:, None] * cumulative[:, -1:]
    return (cumulative <= threshold).sum(-1).clamp_max(log_probs.shape[-1] - 1)


def check_replies(replies: Sequence[SampledReply], num: int, policy: ReplyPolicy) -> None:
    """Raises unless `policy` has sampled `num` replies of the form that all code above it relies on.

    Raises:
        UsageError: it has not; says what is odd.
    """
    odd = [] if len(replies) == num else [f"{len(replies)} replies to {num} observations"]
    for reply in replies:
        if np.ndim(reply.log_probs) != 1 or not np.size(reply.log_probs):
            odd.append(f"log_probs {list(np.shape(reply.log_probs))}, not [N], N >= 1")
        elif reply.action is None and not isinstance(reply.text, str):
            odd.append(f"neither an action nor a text, but {reply.text!r}")
    if odd:
        raise UsageError(
            f"the policy {type(policy).__name__} sampled {odd[0]}", "see `ReplyPolicy.sample` and docs/own_policy.md"
        )
