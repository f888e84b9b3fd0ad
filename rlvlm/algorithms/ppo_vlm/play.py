"""A policy plays envs side by side: rollouts and evaluations both are made of this."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rlvlm.algorithms.env_slots import EnvSlot, TurnObs, TurnOutcome
from rlvlm.core.sampling import ReplyRequest, ReplyTokens
from rlvlm.core.steps import FloatArray
from rlvlm.core.turns import TurnEpisode
from rlvlm.policies.vlm.engine import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyOutput:
    """What a policy did in a turn, by text or by its action head."""

    text: str
    """What the env is told; untrusted."""
    tokens: ReplyTokens
    """What it was shown and what it wrote; log-probs are recomputed from this."""
    log_probs: FloatArray
    """[N] when it was sampled: of each token of the reply, or of the one action."""
    value: float
    """The critic's, before the reply."""
    action: int | None
    """What an action head picked; None where the action is read in the text."""
    version: int
    """Of the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayedTurn:
    """A turn of one env: what the policy did, and what came of it."""

    output: PolicyOutput
    outcome: TurnOutcome
    reward: float = math.nan
    """What is learned from; `label` gives it."""


class Actor:
    """Asks a policy engine for the outputs of many slots at once, showing it what it has not seen.

    Args:
        engine: in process or served.
        max_reply_tokens: a reply is cut after so many.
        temperature: of sampling.
    """

    def __init__(self, engine: Engine, max_reply_tokens: int, temperature: float) -> None:
        self._engine = engine
        self._max_reply_tokens = max_reply_tokens
        self._temperature = temperature

    def act(self, slots: Sequence[EnvSlot], seeds: Iterable[int], greedy: bool = False) -> list[PolicyOutput]:
        """An output for the present turn of every slot, in their order.

        Args:
            slots: of one task.
            seeds: of each reply alone.
            greedy: the likeliest token each time.
        """
        observations = [slot.obs for slot in slots]
        self.show(slots, observations)
        requests = [
            ReplyRequest(prompt=obs.prompt, image=obs.image, seed=seed)
            for obs, seed in zip(observations, seeds, strict=True)
        ]
        if self._engine.acts == "head":
            return [
                PolicyOutput(
                    text=slot.env.action_text(one.action),
                    tokens=one.tokens,
                    log_probs=np.array([one.log_prob], np.float32),
                    value=one.value,
                    action=one.action,
                    version=one.version,
                )
                for slot, one in zip(slots, self._engine.act(requests, greedy=greedy), strict=True)
            ]
        replies = self._engine.reply(
            requests, max_new_tokens=self._max_reply_tokens, temperature=self._temperature, greedy=greedy
        )
        return [
            PolicyOutput(
                text=one.text,
                tokens=one.tokens,
                log_probs=one.log_probs,
                value=one.value,
                action=None,
                version=one.version,
            )
            for one in replies
        ]

    def show(self, slots: Sequence[EnvSlot], observations: Sequence[TurnObs]) -> None:
        """Draws and encodes the images of `observations`, one of each slot, that the engine does not have."""
        missing = self._engine.missing([obs.image for obs in observations])
        if missing:
            snapshots = np.stack([slots[place].turn.snapshot for place in missing])
            frames = slots[0].env.draw(snapshots)
            self._engine.show([observations[place].image for place in missing], frames)


def play_episodes(
    actor: Actor, make_slot: Callable[[], EnvSlot], seeds: Sequence[int], num_slots: int, greedy: bool
) -> list[tuple[TurnEpisode, list[PolicyOutput]]]:
    """A whole episode from a reset with each seed, in their order, with the outputs that made it.

    Replies are drawn from the episode's seed and the number of the turn: what else is played at the same time makes no
    difference to them.

    Args:
        actor: plays.
        make_slot: makes a slot with an env of its own.
        seeds: >= 0.
        num_slots: episodes under way at once.
        greedy: the likeliest token each time.
    """
    waiting = list(enumerate(seeds))[::-1]
    done: dict[int, tuple[TurnEpisode, list[PolicyOutput]]] = {}
    running: list[_Running] = []
    free = [make_slot() for _ in range(min(num_slots, len(seeds)))]
    while waiting or running:
        while free and waiting:
            running.append(_Running(free.pop(), *waiting.pop()))
        outputs = actor.act([one.slot for one in running], [int(one.noise.integers(2**63)) for one in running], greedy)
        for one, output in zip(list(running), outputs, strict=True):
            one.outputs.append(output)
            episode = one.slot.play(output.text).episode
            if episode is not None:
                done[one.index] = episode, one.outputs
                running.remove(one)
                free.append(one.slot)
    return [done[index] for index in range(len(seeds))]


class _Running:
    """An episode under way."""

    def __init__(self, slot: EnvSlot, index: int, seed: int) -> None:
        self.slot, self.index = slot, index
        self.noise = np.random.default_rng(seed)
        self.outputs: list[PolicyOutput] = []
        slot.begin(seed)
