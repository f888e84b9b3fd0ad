"""The supervised start of a policy with replies: its demonstrations, and its validation.

Runs and the job `rlvlm sft` (`sft_job`) learn from them with `sft.Imitator`; `sft_folders` has its files.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
import torch
from torch import Tensor

from rlvlm.algorithms.sft_config import NO_EXPERT_FIX, ReplySFTConfig
from rlvlm.core import metrics
from rlvlm.core.episodes import Observations, Reply, TokenEpisode
from rlvlm.core.errors import UsageError
from rlvlm.demonstrations.collect import FIRST_SEED, ScriptedExpert, acting
from rlvlm.envs.env import TurnEnv
from rlvlm.envs.images import draw_history
from rlvlm.envs.playing import play
from rlvlm.envs.slots import EnvSlot
from rlvlm.policies.protocol import Imitation, Policy
from rlvlm.policies.reply_policy import ReplyPolicy, ReplySampling
from rlvlm.policies.vlm.engine import Engine


def demonstrate(slot: EnvSlot, config: ReplySFTConfig, seed: int) -> list[TokenEpisode]:
    """Plays whole episodes with at least `config.turns` turns in total.

    If the player was perturbed, replies are those of the demonstrator, and everything else is as actually played.

    Args:
        slot: slot of an env with an expert.
        config: number of turns, and of mistakes; the thought beside a wrong action stays the expert's.
        seed: seed of starts and mistakes.

    Raises:
        UsageError: the env has no expert.

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
        # another action is executed, but the expert's is learned: `shown` has it already
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


def split(episodes: Sequence[TokenEpisode], share: float) -> tuple[list[TokenEpisode], list[TokenEpisode]]:
    """Returns the episodes to learn from, and those held out: `share` of them, spread evenly.

    Whole episodes go to one side, because turns of one episode resemble each other. At least one episode is learned
    from and, if there are two and the share is not 0, at least one is held out.

    Args:
        episodes: in the order in which they were played.
        share: share to hold out, in [0, 1).
    """
    learned: list[TokenEpisode] = []
    held_out: list[TokenEpisode] = []
    for number, episode in enumerate(episodes):
        # one more is held out whenever `share` of the episodes so far passes an integer
        is_held_out = int((number + 1) * share) > int(number * share)
        (held_out if is_held_out else learned).append(episode)
    if share > 0 and len(episodes) > 1 and not held_out:
        held_out.append(learned.pop())
    return learned, held_out


@torch.no_grad()
def held_out_loss(
    policy: Policy, env: TurnEnv, episodes: Sequence[TokenEpisode], sft: ReplySFTConfig,
    at_once: Callable[[Tensor, Imitation], list[Tensor]] = lambda units, _: [units],
) -> float:  # fmt: skip
    """Returns the loss per turn of held-out episodes, NaN if the policy can use none. With an action head it is that of
    actions alone. It uses the micro-batches of `Imitator`.
    """
    plain, unused = dataclasses.replace(sft, reply_weight=0.0), np.random.default_rng(0)
    prepared = policy.imitation(episodes, env, plain, unused, lambda line: None)
    batches = torch.arange(len(prepared))[:, None].split(sft.batch_size) if len(prepared) else ()
    parts = [part.flatten() for batch in batches for part in at_once(batch, prepared)]
    loss = sum(prepared.loss(rows, None).item() * len(rows) for rows in parts)
    return loss / len(prepared) if len(prepared) else math.nan


def validate(
    engine: Engine, env: TurnEnv, episodes: Sequence[TokenEpisode], sft: ReplySFTConfig, max_reply_tokens: int
) -> dict[str, float]:
    """Returns the shares of greedy and of sampled replies (at temperature 1) with the demonstrated action, and of
    readable ones; empty without turns. Rollouts sample, so training starts from the latter.

    Args:
        engine: engine with the trained weights.
        env: draws images, and parses the replies.
        episodes: held-out episodes; unreadable turns are left out of the share of equal actions.
        sft: settings with the number of turns processed together.
        max_reply_tokens: maximum length of a reply, at which it is cut.
    """
    turns: list[tuple[str, bytes, int | None]] = []
    for episode in episodes:
        *keys, _ = episode.obs.images
        if missing := engine.missing(keys):
            engine.show([keys[index] for index in missing], draw_history(env, episode.obs.snapshots[missing]))
        actions = [reply.action for reply in episode.replies]
        turns += zip(episode.obs.texts[:-1], keys, actions, strict=True)
    if not turns:
        return {}
    exact, valid = np.zeros(2), np.zeros(2)  # of greedy and of sampled replies
    for begin in range(0, len(turns), sft.batch_size):
        texts, images, wanted = zip(*turns[begin : begin + sft.batch_size], strict=True)
        obs, seeds = Observations(texts=texts, images=images), range(begin, begin + len(texts))
        for how, greedy in enumerate((True, False)):
            replies = engine.reply(obs, seeds, ReplySampling(max_new_tokens=max_reply_tokens, greedy=greedy))
            actions = [env.read(reply.text).action if reply.action is None else reply.action for reply in replies]
            valid[how] += sum(action is not None for action in actions)
            exact[how] += sum(action == right is not None for action, right in zip(actions, wanted, strict=True))
    # an unreadable demonstration has no action to equal, but its turn can be answered validly
    exact /= max(sum(action is not None for *_, action in turns), 1)
    valid /= len(turns)
    return {
        metrics.SFT_EXACT_ACTION: float(exact[0]),
        metrics.SFT_VALID: float(valid[0]),
        metrics.SFT_SAMPLED_EXACT_ACTION: float(exact[1]),
        metrics.SFT_SAMPLED_VALID: float(valid[1]),
    }


def warn_of_length(
    policy: ReplyPolicy, episodes: Sequence[TokenEpisode], most: int, log: Callable[[str], None]
) -> None:
    """Logs if replies of `episodes` are longer than `most` tokens: the policy would learn what is then cut."""
    lengths = np.array([policy.num_elements(reply.text) for episode in episodes for reply in episode.replies])
    if lengths.max() > most:
        log(
            f"{np.mean(lengths > most):.0%} of the demonstrated replies are longer than "
            f"algo.max_reply_tokens {most}, at which the policy's are cut; the longest has {lengths.max()}"
        )
