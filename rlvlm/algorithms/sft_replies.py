"""The supervised start of a policy that replies: demonstrations, and the fine-tuning on them.

Replies are learned by raising the likelihood of their tokens and of nothing else. A run does it in its own process, in
seconds (`fine_tune`); `rlvlm sft` does it as a job (`sft_job`). `sft_folders` keeps what comes of it.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from rlvlm.algorithms.policy_gradient.slots import EnvSlot
from rlvlm.algorithms.sft import fit
from rlvlm.algorithms.sft_config import NO_EXPERT_FIX, ReplySFTConfig
from rlvlm.core import metrics
from rlvlm.core.episodes import IntArray, Observations, Reply, TokenEpisode
from rlvlm.core.errors import UsageError
from rlvlm.demonstrations.collect import FIRST_SEED, ScriptedExpert, acting
from rlvlm.envs.env import TurnEnv
from rlvlm.envs.playing import play
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.policies.vlm.policy import VLMPolicy


def demonstrate(slot: EnvSlot, config: ReplySFTConfig, seed: int) -> list[TokenEpisode]:
    """Whole episodes with at least `config.turns` turns together.

    Where the player was perturbed, the replies are those demonstrated, and everything else is what was really played.

    Args:
        slot: with an env that has an expert.
        config: how many turns, with how many mistakes; the thought beside a wrong action stays the expert's.
        seed: of starts and mistakes.

    Raises:
        UsageError: nobody knows how to play this env.

    Source of perturbed: noise injected into the supervisor, Laskey et al. 2017 (DART), arXiv:1703.09327.
    """
    if not slot.env.has_expert:
        raise UsageError("this env has no scripted expert to demonstrate it", NO_EXPERT_FIX)
    answer = acting(ScriptedExpert(p_wrong_action=config.p_wrong))
    noise = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(4,)))
    shown: list[Reply] = []

    def act(slots: Sequence[EnvSlot]) -> list[str]:
        (reply,) = answer(slots)
        shown.append(slot.env.read(reply.text))
        if not (config.p_perturb and noise.random() < config.p_perturb):
            return [reply.text]
        # another action is carried out, and what is learned stays the expert's: `shown` has it already
        others = [action for action in slot.env.legal() if action != shown[-1].action]
        return [slot.env.action_text(int(noise.choice(others)))]

    # starts that neither training nor evaluation uses
    starts = (int(noise.integers(FIRST_SEED, 2 * FIRST_SEED)) for _ in count())
    episodes: list[TokenEpisode] = []
    turns = 0
    for ended in play([slot], starts, act):
        episodes.append(dataclasses.replace(ended.episode(), replies=tuple(shown)))
        turns += len(shown)
        shown.clear()
        if turns >= config.turns:
            break
    return episodes


def check_actions(episodes: Sequence[TokenEpisode]) -> None:
    """Passes where a policy that acts by a head would have something to learn.

    Raises:
        UsageError: no turn has an action that can be read.
    """
    if not any(reply.action is not None for episode in episodes for reply in episode.replies):
        raise UsageError(
            f"of {sum(map(len, episodes)):,} demonstrated turns to learn from none has an action that can be read, and "
            "an action head learns nothing else",
            "look at them with rlvlm data show DIR, and collect others with rlvlm collect",
        )


def split(episodes: Sequence[TokenEpisode], share: float) -> tuple[list[TokenEpisode], list[TokenEpisode]]:
    """Episodes to learn from, and episodes held out: `share` of them, spread evenly.

    Whole episodes go to one side: turns of one episode look alike. One episode at least is learned from and, where
    there are two and the share is not 0, one at least is held out.

    Args:
        episodes: in the order in which they were played.
        share: in [0, 1).
    """
    learned: list[TokenEpisode] = []
    held_out: list[TokenEpisode] = []
    for number, episode in enumerate(episodes):
        # one more is held out wherever `share` of the episodes so far passes a whole number
        is_held_out = int((number + 1) * share) > int(number * share)
        (held_out if is_held_out else learned).append(episode)
    if share > 0 and len(episodes) > 1 and not held_out:
        held_out.append(learned.pop())
    return learned, held_out


@dataclass(frozen=True, slots=True)
class Example:
    """A turn to learn from, whose image the policy was shown."""

    prompt: str
    image: bytes
    """Its key."""
    ids: IntArray
    """[N] the reply as the policy would have sampled it."""
    action: int | None
    """Of the demonstration; None where its reply cannot be read."""


def examples_of(policy: VLMPolicy, env: TurnEnv, episodes: Sequence[TokenEpisode]) -> list[Example]:
    """The turns of `episodes` that the policy can learn from; it is shown their images.

    A policy that acts by a head learns actions, so turns without one that can be read are left out.
    """
    examples = []
    for episode in episodes:
        *keys, _ = episode.obs.images
        missing = policy.images.missing(keys)  # how many tokens a turn has depends on its image
        if missing:
            policy.show([keys[place] for place in missing], env.draw(episode.snapshots[missing]))
        for key, prompt, reply in zip(keys, episode.obs.texts[:-1], episode.replies, strict=True):
            if policy.action_head is not None and reply.action is None:
                continue
            examples.append(Example(prompt, key, policy.write(reply.text), reply.action))
    return examples


def observations_of(examples: Sequence[Example]) -> Observations:
    """What the policy is asked in `examples`."""
    return Observations(texts=tuple(one.prompt for one in examples), images=tuple(one.image for one in examples))


def lengths_of(policy: VLMPolicy, examples: Sequence[Example]) -> list[int]:
    """[M] tokens of each example's prompt and reply together."""
    prompts = policy.prompts(observations_of(examples))
    return [len(prompt) + len(example.ids) for prompt, example in zip(prompts, examples, strict=True)]


def fit_examples(
    policy: VLMPolicy,
    examples: Sequence[Example],
    config: ReplySFTConfig,
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
    noise = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(5,)))
    lengths = lengths_of(policy, examples)

    def endless() -> Iterator[list[Example]]:  # epoch after epoch
        while True:
            for places in grouped_by_length(lengths, config.batch_size, noise):
                yield [examples[place] for place in places]

    def lr_of(update: int) -> float:
        # up over the first tenth, then down to 0 along half a cosine
        rise = max(config.updates // 10, 1)
        if update < rise:
            return config.lr * ((update + 1) / rise)
        return config.lr * ((1 + math.cos(math.pi * (update - rise) / max(config.updates - rise, 1))) / 2)

    heads = [] if policy.action_head is None else list(policy.action_head.parameters())
    batches = endless()
    loss = fit(
        torch.optim.AdamW([*policy.backbone_parameters(), *heads], betas=(0.9, 0.98), weight_decay=0.01),
        lambda update: imitation_loss(policy, next(batches), config.reply_weight),
        updates=config.updates,
        lr_of=lr_of,
        max_grad_norm=config.max_grad_norm,
        log_every=20,
        log=log,
    )
    policy.forget_stale_images()
    return {metrics.SFT_LOSS: loss}


def imitation_loss(policy: VLMPolicy, batch: Sequence[Example], reply_weight: float = 0.0) -> Tensor:
    """Mean over turns of -log p(reply) in nats, or of -log p(action) for a policy with an action head.

    Args:
        policy: learns.
        batch: turns; of a policy with an action head all have an action.
        reply_weight: with an action head, how much -log p(reply) counts beside -log p(action).
    """
    obs, ids = observations_of(batch), [example.ids for example in batch]
    # -log p(reply) = - sum_n log p(token_n | image, prompt, tokens before it)
    if policy.action_head is None:
        return -policy.read(obs, ids).log_probs.sum(-1).mean()
    actions = torch.tensor([example.action for example in batch], device=policy.device)
    if not reply_weight:
        table, _ = policy.act_log_probs(obs)
        return -table.gather(-1, actions[:, None]).mean()
    read = policy.read(obs, ids, with_actions=True)
    assert read.actions is not None, "asked for"
    wrong = -read.actions.gather(-1, actions[:, None]).mean()
    return wrong - reply_weight * read.log_probs.sum(-1).mean()


@torch.no_grad()
def validate(
    policy: VLMPolicy, env: TurnEnv, examples: Sequence[Example], batch: int, max_reply_tokens: int
) -> dict[str, float]:
    """Loss per turn, and of greedy and of sampled replies (at temperature 1) the share with the demonstrated action and
    the share that can be read; of no examples nothing. Rollouts sample, so training starts from the second kind.

    Args:
        policy: not changed.
        env: reads the replies.
        examples: held out; demonstrations that cannot be read are left out of the share of equal actions.
        batch: turns that go through the model together.
        max_reply_tokens: a longer reply is cut.
    """
    if not examples:
        return {}
    loss = 0.0
    exact, valid = np.zeros(2), np.zeros(2)  # of greedy and of sampled replies
    engine = PolicyEngine(policy, batch)
    for begin in range(0, len(examples), batch):
        part = examples[begin : begin + batch]
        loss += imitation_loss(policy, part).item() * len(part)
        obs, seeds = observations_of(part), range(begin, begin + len(part))
        for how, greedy in enumerate((True, False)):
            replies = engine.reply(obs, seeds, max_new_tokens=max_reply_tokens, greedy=greedy)
            actions = [env.read(one.text).action if one.action is None else one.action for one in replies]
            valid[how] += sum(action is not None for action in actions)
            exact[how] += sum(action == one.action is not None for action, one in zip(actions, part, strict=True))
    # a demonstration that cannot be read has no action to be equal to, but its turn can be answered validly
    exact /= max(sum(one.action is not None for one in examples), 1)
    valid /= len(examples)
    return {
        metrics.SFT_HELD_OUT_LOSS: loss / len(examples),
        metrics.SFT_EXACT_ACTION: float(exact[0]),
        metrics.SFT_VALID: float(valid[0]),
        metrics.SFT_SAMPLED_EXACT_ACTION: float(exact[1]),
        metrics.SFT_SAMPLED_VALID: float(valid[1]),
    }


def fine_tune(
    policy: VLMPolicy,
    slot: EnvSlot,
    episodes: Sequence[TokenEpisode],
    config: ReplySFTConfig,
    seed: int,
    max_reply_tokens: int,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, float]:
    """Fine-tunes on most episodes and validates on the rest; returns what was measured by its names in `metrics`.

    Replies that are longer than `max_reply_tokens` are logged: the policy would learn to write what is then cut.

    Raises:
        UsageError: the policy acts by a head, and no turn that it would learn from has an action that can be read.
        NumericsError: the loss is not finite.
    """
    started = time.monotonic()
    learned, held_out = split(episodes, config.held_out)
    if policy.action_head is not None:
        check_actions(learned)
    examples = examples_of(policy, slot.env, learned)
    lengths = np.array([len(example.ids) for example in examples])
    if policy.action_head is None and lengths.max() > max_reply_tokens:
        log(
            f"{np.mean(lengths > max_reply_tokens):.0%} of the demonstrated replies are longer than "
            f"algo.max_reply_tokens {max_reply_tokens}, at which the policy's are cut; the longest has {lengths.max()}"
        )
    measured = fit_examples(policy, examples, config, seed, log)
    unseen = examples_of(policy, slot.env, held_out)
    measured |= validate(policy, slot.env, unseen, config.batch_size, max_reply_tokens)
    return measured | {metrics.SFT_WALL_S: time.monotonic() - started}


_MEGA = 8
"""Batches that are sorted by length together: more save padding, fewer mix better."""


def grouped_by_length(lengths: Sequence[int], batch: int, noise: np.random.Generator) -> Iterator[list[int]]:
    """One epoch: places of examples of like `lengths` [M] in batches, each place once; the last may be smaller.

    `noise` shuffles the examples, and then the batches.
    """
    places = noise.permutation(len(lengths)).tolist()
    batches: list[list[int]] = []
    for begin in range(0, len(places), batch * _MEGA):
        mega = sorted(places[begin : begin + batch * _MEGA], key=lambda place: lengths[place])
        batches += [mega[at : at + batch] for at in range(0, len(mega), batch)]
    # sorted batches would come from the shortest to the longest, eight at a time
    for index in noise.permutation(len(batches)).tolist():
        yield batches[index]
