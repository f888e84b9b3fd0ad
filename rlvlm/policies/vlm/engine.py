"""Sampling of replies in batches: the interface of engines, the engine in process for any `ReplyPolicy`, and a VLM's.

A batch is processed by the language model once for its prompts and then once per token, with cached keys and values.
Images are encoded when they are shown, not when they are used. The learner recomputes log-probs; those returned here
are a check.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlvlm.core.episodes import IntArray, Observations, SampledReply
from rlvlm.core.errors import UsageError
from rlvlm.core.steps import Frames
from rlvlm.policies.buckets import Bucket
from rlvlm.policies.reply_policy import ReplyPolicy, ReplySampling, check_replies, draw
from rlvlm.policies.vlm.backbone import Padded
from rlvlm.policies.vlm.config import BUCKET_MIB


class Engine(Protocol):
    """Samples replies of a policy, wherever it runs; every reply carries the version of its weights."""

    version: int = 0
    """Version of the weights with which replies are sampled now."""
    bucket_bytes: int = BUCKET_MIB << 20
    """Size of a bucket of weights from learners in other processes, bytes."""

    def pack(self, version: int, buckets: Sequence[Bucket] = ()) -> Any:
        """Packs the present weights of the policy in training; called by the training thread.

        Args:
            version: version to give them.
            buckets: the same weights, if learners have put them into Ray's object store already.
        """
        ...

    def use(self, weights: Any) -> None:
        """Samples replies with these packed weights from now on; called by the process that asks for replies."""
        ...

    def missing(self, images: Sequence[bytes]) -> list[int]:
        """Returns the indices of `images` that must be shown before they can be used."""
        ...

    def show(self, images: Sequence[bytes], frames: Frames) -> None:
        """Stores `frames` [N, H, W, 3] under the keys `images`."""
        ...

    def reply(self, obs: Observations, seeds: Sequence[int], sampling: ReplySampling) -> list[SampledReply]:
        """Returns replies to `obs`, in order; see `PolicyEngine.reply`."""
        ...

    # defaults for an engine in the learner's own process, which owns nothing besides the policy

    def report(self) -> dict[str, float]:
        """Returns metrics of the engine, by names in `rlvlm.core.metrics`."""
        return {}

    @property
    def shares_gpus(self) -> bool:
        """Whether it samples on the learners' GPUs, and must sleep while they learn."""
        return False

    def sleep(self) -> None:
        """Releases the learners' GPUs, and returns once it has. Only if it shares them."""

    def wake(self, gpus: Sequence[tuple[str, str]]) -> None:
        """Takes the learners' GPUs, each as its node in Ray and its id there. It starts asleep."""

    def close(self) -> None:
        """Frees what the engine holds besides the policy."""


class PolicyEngine(Engine):
    """Samples from `policy`, which may be in training elsewhere: weights are read when a batch is sampled.

    Args:
        policy: policy to sample from.
        max_batch: maximum replies processed together; more are split.
    """

    def __init__(self, policy: ReplyPolicy, max_batch: int = 64) -> None:
        self.policy = policy
        self.max_batch = max_batch

    def pack(self, version: int, buckets: Sequence[Bucket] = ()) -> int:  # noqa: ARG002 - the policy has them
        """Returns only `version`: replies are sampled with the policy's weights at that moment."""
        return version

    def use(self, weights: int) -> None:
        """Sets the version of the weights, which are the policy's own."""
        self.version = weights

    def missing(self, images: Sequence[bytes]) -> list[int]:
        return self.policy.images.missing(images)

    def show(self, images: Sequence[bytes], frames: Frames) -> None:
        self.policy.show(images, frames)

    def reply(self, obs: Observations, seeds: Sequence[int], sampling: ReplySampling) -> list[SampledReply]:
        """Returns replies to `obs`, in order: texts, or the actions of a policy with an action head, for which only the
        seeds and `greedy` matter.

        Args:
            obs: images, which were shown, and user messages, which the policy puts into the model's chat format.
            seeds: seed of each reply, which does not depend on the rest of the batch.
            sampling: settings for all of them.

        Raises:
            MachineError: an image was not shown.
            UsageError: a prompt and its reply would be longer than the model's window; a prompt is never cut.
        """
        replies: list[SampledReply] = []
        for begin in range(0, len(obs), self.max_batch):
            own = seeds[begin : begin + self.max_batch]
            part = obs.at(range(begin, begin + len(own)))
            sampled = self.policy.sample(part, own, sampling)
            check_replies(sampled, len(own), self.policy)
            pairs = zip(part.images, sampled, strict=True)
            replies += [replace(reply, image=image, version=self.version) for image, reply in pairs]
        return replies


@torch.no_grad()
def sample_actions(policy: Any, obs: Observations, seeds: Sequence[int], sampling: ReplySampling) -> list[SampledReply]:
    """Returns the actions picked by the action head of a `VLMPolicy`; only the seeds and `greedy` matter."""
    check_window(policy, policy.prompts(obs), max_tokens=0)
    log_probs, values = policy.act_log_probs(obs)
    chosen = sampling.pick(log_probs, seeds)
    picked = log_probs.gather(-1, chosen[:, None])[:, 0]
    return [
        SampledReply(
            answer={"ids": np.array([action], np.int64)},
            log_probs=np.array([log_prob], np.float32),
            action=action,
            value=value,
        )
        for action, log_prob, value in zip(chosen.tolist(), picked.tolist(), values.tolist(), strict=True)
    ]


@torch.no_grad()
def sample_replies(policy: Any, obs: Observations, seeds: Sequence[int], sampling: ReplySampling) -> list[SampledReply]:
    """Returns text replies of a `VLMPolicy`."""
    max_new_tokens = sampling.max_new_tokens
    check_window(policy, policy.prompts(obs), max_new_tokens)
    noise = sampling.uniforms(seeds, max_new_tokens)
    padded = policy.pad(obs)
    from transformers import DynamicCache  # slow to import, and players of chunks import this module too

    cache = DynamicCache(config=policy.backbone.text_config)
    hidden = policy.hidden(padded, obs.images, cache)
    values = policy.prompt_values(hidden, padded).tolist()
    # one token at a time for all replies together, until each has ended or reached its maximum length
    state = hidden[:, -1]
    chosen, log_probs = [], []
    is_open = torch.ones(len(obs), dtype=torch.bool, device=policy.device)
    for step in range(max_new_tokens):
        table = policy.backbone.next_token_log_probs(state, sampling.temperature)
        tokens = draw(table, None if noise is None else noise[step])
        log_probs.append(table.gather(-1, tokens[:, None])[:, 0])
        chosen.append(tokens)
        is_open = is_open & (tokens != policy.stop_id)
        # the prediction after the last token is not needed
        if step + 1 == max_new_tokens or not is_open.any():
            break
        state = _decode_step(policy, padded, tokens, step, cache)
    # each ends with its first stop token, or where all were cut
    ids = torch.stack(chosen, 1)  # [B, N]
    is_stop = ids == policy.stop_id
    lengths = torch.where(is_stop.any(1), is_stop.int().argmax(1) + 1, ids.shape[1]).tolist()
    all_ids, all_log_probs = ids.cpu().numpy(), torch.stack(log_probs, 1).cpu().numpy()
    replies = []
    for row, (length, is_complete) in enumerate(zip(lengths, is_stop.any(1).tolist(), strict=True)):
        # a view would keep the whole batch in memory as long as one of its replies
        own = all_ids[row, :length].copy()
        replies.append(
            SampledReply(
                answer={"ids": own},
                log_probs=all_log_probs[row, :length].copy(),
                text=policy.text_of(own),
                value=values[row],
                is_complete=is_complete,
            )
        )
    return replies


def _decode_step(policy: Any, padded: Padded, tokens: Tensor, step: int, cache: Any) -> Tensor:
    """Returns [B, D] hidden states after one more token each. Finished replies are computed too, but not used."""
    # after the largest position of the prompt, in which an image may have fewer positions than tokens
    positions = (padded.positions.amax((0, 2)) + 1 + step)[None, :, None].expand(len(padded.positions), -1, 1)
    mask = padded.attention
    if mask is not None:
        mask = torch.cat([mask, mask.new_ones(len(tokens), step + 1)], 1)
    return policy.backbone.decode_step(tokens, positions, mask, cache)


def check_window(policy: Any, prompts: Sequence[IntArray], max_tokens: int) -> None:
    """Raises unless each of `prompts` fits into the policy's window together with `max_tokens` of a reply.

    Raises:
        UsageError: one does not; a prompt is never cut.
    """
    longest, window = max(map(len, prompts), default=0), policy.backbone.window
    if longest + max_tokens > window:
        raise UsageError(
            f"a prompt has {longest:,} tokens and its reply may have {max_tokens}; the model's window holds {window:,}",
            "lower --policy.max-pixels (smaller images) or --algo.max-reply-tokens, or take a model with a larger "
            "window",
        )
