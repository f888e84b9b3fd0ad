"""Base of all policies for envs in turns, including chat VLMs: images and a prompt in; a text, or the number of an
action, out.

A policy of your own derives from it and implements `sample`, `log_probs` and `imitation`; `--policy.head my_file:NAME`
then uses it. `VLMPolicy` (vlm/policy.py) writes text, or picks an action by a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlvlm.core.checks import PositiveFloat, PositiveInt, check_bounds
from rlvlm.core.episodes import Answer, Observations, Reply, SampledReply, TokenEpisode
from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.env import TurnEnv
from rlvlm.envs.images import draw_history
from rlvlm.policies.protocol import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplySampling:
    """Settings of sampling replies."""

    max_new_tokens: PositiveInt = 1
    """Maximum length of a reply, at which it is cut, tokens."""
    temperature: PositiveFloat = 1.0
    """Temperature by which logits are divided; there is no other truncation or filter."""
    greedy: bool = False
    """Whether to take the most likely reply; log-probs are still those of `temperature`, and with vLLM of 1."""

    def __post_init__(self) -> None:
        check_bounds(self, "")

    def uniforms(self, seeds: Sequence[int], num: int) -> Tensor | None:
        """Returns [num, B] numbers in [0, 1), `num` for each reply from its own seed; None if greedy."""
        if self.greedy:
            return None
        return torch.from_numpy(np.stack([np.random.default_rng(seed).random(num) for seed in seeds], 1))

    def pick(self, log_probs: Tensor, seeds: Sequence[int]) -> Tensor:
        """Returns [B] numbers in [0, A), one per reply, by `log_probs` [B, A] at `temperature` and its own seed."""
        uniforms = self.uniforms(seeds, 1)
        return draw(log_probs, None if uniforms is None else uniforms[0])


class ReplyPolicy(Policy):
    """A network that answers turns."""

    def sample(self, obs: Observations, seeds: Sequence[int], sampling: ReplySampling) -> list[SampledReply]:
        """Returns B replies to `obs`, whose images it was shown; each depends on its own seed, not on the batch."""
        raise NotImplementedError("each policy has its own answers")

    def draw(self, env: Any, snapshots: FloatArray) -> Frames:
        """Returns [N, H, W, 3], images of `snapshots` [N, D] in the env's own size; see `draw_history`."""
        return draw_history(env, snapshots)

    def demonstrated(self, shown: Sequence[TokenEpisode], env: TurnEnv) -> tuple[Observations, list[Reply]]:
        """Returns the M turns of the episodes `shown`, in order, and shows their images to the policy."""
        for episode in shown:
            *keys, _ = episode.obs.images
            if missing := self.images.missing(keys):
                self.show([keys[index] for index in missing], self.draw(env, episode.obs.snapshots[missing]))
        # there is one more observation than turns: the last is of the state after the episode
        obs = Observations.joined([episode.obs.at(range(len(episode.replies))) for episode in shown])
        return obs, [reply for episode in shown for reply in episode.replies]

    def num_elements(self, text: str) -> int:
        """Returns the number of elements of the answer for a reply `text`."""
        return 1

    def action_elements(self, answer: Answer, span: tuple[int, int] | None) -> NDArray[np.bool_] | None:
        """Returns [N], elements of the action's value, which is in the reply's text at `span`; None: all of them."""
        return None


def draw(log_probs: Tensor, uniforms: Tensor | None) -> Tensor:
    """Returns [B] ids: the most likely, or where `uniforms` [B] falls in the cumulative distribution.

    Tokens with probability 0 add nothing to the sum, so they are never the first to exceed a number.
    """
    if uniforms is None:
        return log_probs.argmax(-1)
    # in float64: a float32 sum over 150,000 tokens visibly deviates from 1
    cumulative = log_probs.double().exp().cumsum(-1)
    threshold = uniforms.to(cumulative.device)[:, None] * cumulative[:, -1:]
    return (cumulative <= threshold).sum(-1).clamp_max(log_probs.shape[-1] - 1)


def check_replies(replies: Sequence[SampledReply], num: int, policy: ReplyPolicy) -> None:
    """Raises unless `policy` has sampled `num` replies of the form that the code above relies on.

    Raises:
        UsageError: it has not; the message says what is wrong.
    """
    odd = [] if len(replies) == num else [f"{len(replies)} replies to {num} observations"]
    for reply in replies:
        if np.ndim(reply.log_probs) != 1 or not np.size(reply.log_probs):
            odd.append(f"log_probs {list(np.shape(reply.log_probs))}, not [N], N >= 1")
        elif reply.action is None and not isinstance(reply.text, str):
            odd.append(f"neither an action nor a text, but {reply.text!r}")
    if odd:
        raise UsageError(
            f"the policy {type(policy).__name__} sampled {odd[0]}", "docs/own_turn_policy.md says what it gives"
        )
