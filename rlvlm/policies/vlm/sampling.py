"""How a chat VLM samples: replies token by token, or the action of a head.

A batch goes through the language model once for its prompts and then once per token, with keys and values kept. The
learner recomputes log-probs; the ones given here are a check.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlvlm.core.episodes import IntArray, Observations, SampledReply
from rlvlm.core.errors import UsageError
from rlvlm.policies.reply_policy import ReplySampling, draw
from rlvlm.policies.vlm.backbone import Padded


@torch.no_grad()
def sample_actions(policy: Any, obs: Observations, sampling: ReplySampling) -> list[SampledReply]:
    """The actions that the action head of a `VLMPolicy` picks; only the seeds and `greedy` matter."""
    check_window(policy, policy.prompts(obs), max_tokens=0)
    log_probs, values = policy.act_log_probs(obs)
    chosen = sampling.pick(log_probs)
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
def sample_replies(policy: Any, obs: Observations, sampling: ReplySampling) -> list[SampledReply]:
    """Replies of a `VLMPolicy` in words."""
    max_new_tokens = sampling.max_new_tokens
    check_window(policy, policy.prompts(obs), max_new_tokens)
    noise = sampling.uniforms(max_new_tokens)
    padded = policy.pad(obs)
    from transformers import DynamicCache  # slow to import, and players of chunks import this module too

    cache = DynamicCache(config=policy.backbone.text_config)
    hidden = policy.hidden(padded, obs.images, cache)
    values = policy.prompt_values(hidden, padded).tolist()
    # one token at a time for all replies together, until each has ended or is as long as it may be
    state = hidden[:, -1]
    chosen, log_probs = [], []
    is_open = torch.ones(len(obs), dtype=torch.bool, device=policy.device)
    for step in range(max_new_tokens):
        table = policy.backbone.next_token_log_probs(state, sampling.temperature)
        tokens = draw(table, None if noise is None else noise[step])
        log_probs.append(table.gather(-1, tokens[:, None])[:, 0])
        chosen.append(tokens)
        is_open = is_open & (tokens != policy.stop_id)
        # what would come after the last token is not needed
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
    """[B, D] hidden states after one more token each. Finished replies go along; theirs are not used."""
    # behind the largest position of the prompt, in which an image may count less than its tokens
    positions = (padded.positions.amax((0, 2)) + 1 + step)[None, :, None].expand(len(padded.positions), -1, 1)
    mask = padded.attention
    if mask is not None:
        mask = torch.cat([mask, mask.new_ones(len(tokens), step + 1)], 1)
    return policy.backbone.decode_step(tokens, positions, mask, cache)


def check_window(policy: Any, prompts: Sequence[IntArray], max_tokens: int) -> None:
    """Raises unless each of `prompts` fits into the policy's window together with `max_tokens` tokens of a reply.

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
