"""Teaches a policy by demonstrations, in this process: a run's supervised start, in seconds."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rlvlm.algorithms.env_slots import EnvSlot
from rlvlm.algorithms.sft.batches import grouped_by_length
from rlvlm.algorithms.sft.config import SFTConfig
from rlvlm.algorithms.sft.demonstrations import check_actions, split
from rlvlm.core import metrics
from rlvlm.core.errors import NumericsError
from rlvlm.core.sampling import ReplyRequest, ReplyTokens
from rlvlm.core.turns import TurnEpisode
from rlvlm.envs.turn_env import TurnEnv
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.policies.vlm.policy import VLMPolicy

_TELL_EVERY = 20
_FIX = "start anew with a smaller --sft.lr"


@dataclass(frozen=True, slots=True)
class Example:
    """A turn to learn from."""

    tokens: ReplyTokens
    prompt: str
    action: int | None
    """Of the demonstration; None where its reply cannot be read."""

    def __len__(self) -> int:
        return len(self.tokens.prompt_ids) + len(self.tokens.reply_ids)


def examples_of(policy: VLMPolicy, world: TurnEnv, episodes: Sequence[TurnEpisode]) -> list[Example]:
    """The turns of `episodes` that the policy can learn from, as it would have stored them; it is shown their images.

    A policy that acts by a head learns actions, so turns without one that can be read are left out.
    """
    examples = []
    for episode in episodes:
        snapshots = episode.snapshots[:-1]
        keys = [key.tobytes() for key in world.image_key(snapshots)]
        missing = policy.images.missing(keys)
        if missing:
            policy.show([keys[place] for place in missing], world.draw(snapshots[missing]))
        for key, prompt, reply in zip(keys, episode.prompts, episode.replies, strict=True):
            if policy.action_head is not None and reply.action is None:
                continue
            examples.append(Example(policy.write(prompt, key, reply.text), prompt, reply.action))
    return examples


def fit_examples(
    policy: VLMPolicy,
    examples: Sequence[Example],
    config: SFTConfig,
    seed: int,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, float]:
    """Raises the likelihood of every token of the replies, and of nothing else; returns the last loss by its name.

    Args:
        policy: is changed; what of it learns, it knows itself. The value head is left alone.
        examples: at least one.
        config: of the updates.
        seed: of the order of examples.
        log: takes a line on how it goes.

    Raises:
        NumericsError: the loss is not finite.
    """
    heads = [] if policy.action_head is None else list(policy.action_head.parameters())
    parameters = [*policy.backbone_parameters(), *heads]
    optimizer = torch.optim.AdamW(parameters, lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01)
    recent = math.nan
    for update, batch in zip(range(config.updates), _batches(examples, config, seed), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * _rate(update, config.updates)
        loss = imitation_loss(policy, batch, config.reply_weight)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
        optimizer.step()
        if not math.isfinite(loss.item()):
            raise NumericsError(f"the loss of update {update + 1} of the supervised start is {loss.item()}", _FIX)
        recent = loss.item() if math.isnan(recent) else 0.9 * recent + 0.1 * loss.item()
        if (update + 1) % _TELL_EVERY == 0:
            log(f"supervised start: update {update + 1} of {config.updates}, loss {recent:.3f}")
    policy.forget_stale_images()
    return {metrics.SFT_LOSS: recent}


def imitation_loss(policy: VLMPolicy, batch: Sequence[Example], reply_weight: float = 0.0) -> Tensor:
    """Mean over turns of -log p(reply) in nats, or of -log p(action) for a policy with an action head.

    Args:
        policy: learns.
        batch: turns; of a policy with an action head all have an action.
        reply_weight: with an action head, how much -log p(reply) counts beside -log p(action).
    """
    tokens = [example.tokens for example in batch]
    if policy.action_head is None:
        return -policy.read(tokens).log_probs.sum(-1).mean()
    actions = torch.tensor([example.action for example in batch], device=policy.device)
    if not reply_weight:
        table, _ = policy.act_log_probs(tokens)
        return -table.gather(-1, actions[:, None]).mean()
    read = policy.read(tokens, with_actions=True)
    assert read.actions is not None, "asked for"
    wrong = -read.actions.gather(-1, actions[:, None]).mean()
    return wrong - reply_weight * read.log_probs.sum(-1).mean()


@torch.no_grad()
def validate(
    policy: VLMPolicy, world: TurnEnv, examples: Sequence[Example], batch: int, max_reply_tokens: int
) -> dict[str, float]:
    """Loss per turn, share of greedy replies with the demonstrated action, share that can be read; none: nothing.

    Args:
        policy: not changed.
        world: reads the replies.
        examples: held out; demonstrations that cannot be read are left out of the share of equal actions.
        batch: turns that go through the model together.
        max_reply_tokens: a longer reply is cut.
    """
    if not examples:
        return {}
    loss = exact = valid = 0.0
    engine = PolicyEngine(policy, batch)
    for begin in range(0, len(examples), batch):
        part = examples[begin : begin + batch]
        loss += imitation_loss(policy, part).item() * len(part)
        requests = [ReplyRequest(prompt=one.prompt, image=one.tokens.image, seed=0) for one in part]
        if policy.action_head is None:
            replies = engine.reply(requests, max_new_tokens=max_reply_tokens, greedy=True)
            actions = [world.read(reply.text).action for reply in replies]
        else:
            actions = [one.action for one in engine.act(requests, greedy=True)]
        valid += sum(action is not None for action in actions)
        exact += sum(action == one.action is not None for action, one in zip(actions, part, strict=True))
    return {
        metrics.SFT_HELD_OUT_LOSS: loss / len(examples),
        metrics.SFT_EXACT_ACTION: exact / max(sum(one.action is not None for one in examples), 1),
        metrics.SFT_VALID: valid / len(examples),
    }


def fine_tune(
    policy: VLMPolicy,
    slot: EnvSlot,
    episodes: Sequence[TurnEpisode],
    config: SFTConfig,
    seed: int,
    max_reply_tokens: int,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, float]:
    """Fine-tunes on most episodes and validates on the rest; returns what was measured by its names in `metrics`.

    Tells of replies that are longer than `max_reply_tokens`: the policy would learn to write what is then cut.

    Raises:
        UsageError: the policy acts by a head, and no turn that it would learn from has an action that can be read.
        NumericsError: the loss is not finite.
    """
    started = time.monotonic()
    learned, held_out = split(episodes, config.held_out)
    if policy.action_head is not None:
        check_actions(learned)
    examples = examples_of(policy, slot.env, learned)
    lengths = np.array([len(example.tokens.reply_ids) for example in examples])
    if policy.action_head is None and lengths.max() > max_reply_tokens:
        log(
            f"{np.mean(lengths > max_reply_tokens):.0%} of the demonstrated replies are longer than "
            f"algo.max_reply_tokens {max_reply_tokens}, at which the policy's are cut; the longest has {lengths.max()}"
        )
    measured = fit_examples(policy, examples, config, seed, log)
    unseen = examples_of(policy, slot.env, held_out)
    measured |= validate(policy, slot.env, unseen, config.batch_turns, max_reply_tokens)
    return measured | {metrics.SFT_WALL_S: time.monotonic() - started}


def _batches(examples: Sequence[Example], config: SFTConfig, seed: int) -> Iterator[list[Example]]:
    """Batches for ever, epoch after epoch."""
    noise = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(5,)))
    lengths = [len(example) for example in examples]
    while True:
        for places in grouped_by_length(lengths, config.batch_turns, noise):
            yield [examples[place] for place in places]


def _rate(update: int, updates: int) -> float:
    """Share of the step size: up over the first tenth, then down to 0 along half a cosine."""
    rise = max(updates // 10, 1)
    if update < rise:
        return (update + 1) / rise
    return (1 + math.cos(math.pi * (update - rise) / max(updates - rise, 1))) / 2
