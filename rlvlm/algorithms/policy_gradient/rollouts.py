"""Plays envs with a policy: replies to envs that are talked to, chunks for envs that are driven by them.

Rollouts, evaluations and `rlvlm eval` are made of these. Whoever plays gives `TokenEpisode`s.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rlvlm.algorithms.env_slots import EnvSlot
from rlvlm.core.episodes import ChunkStep, Observations, ReplyRequest, SampledReply, TokenEpisode
from rlvlm.core.finite import check_finite
from rlvlm.core.steps import FloatArray
from rlvlm.envs.env import ChunkEnv, ChunkEnvs
from rlvlm.policies.protocol import look
from rlvlm.policies.vla.policy import VLAPolicy
from rlvlm.policies.vla.tokens import ActionScale, decode
from rlvlm.policies.vlm.engine import Engine

_FIX = "mend the env; rlvlm check-task looks at it"


class Actor:
    """Asks a policy engine for the replies of many slots at once, showing it what it has not seen.

    Args:
        engine: in process or served.
        max_reply_tokens: a reply is cut after so many.
        temperature: of sampling.
    """

    def __init__(self, engine: Engine, max_reply_tokens: int, temperature: float) -> None:
        self._engine = engine
        self._max_reply_tokens = max_reply_tokens
        self._temperature = temperature

    def act(self, slots: Sequence[EnvSlot], seeds: Iterable[int], greedy: bool = False) -> list[SampledReply]:
        """A reply to the present turn of every slot, in their order; an action head's action is one token.

        Args:
            slots: of one task.
            seeds: of each reply alone.
            greedy: the likeliest token each time.
        """
        self.show(slots)
        requests = [
            ReplyRequest(prompt=slot.turn.prompt, image=slot.image, seed=seed)
            for slot, seed in zip(slots, seeds, strict=True)
        ]
        if self._engine.acts == "head":  # in the words that the env reads
            replies = []
            for slot, one in zip(slots, self._engine.act(requests, greedy=greedy), strict=True):
                assert one.action is not None, "a head picks one"
                replies.append(replace(one, text=slot.env.action_text(one.action)))
            return replies
        return self._engine.reply(
            requests, max_new_tokens=self._max_reply_tokens, temperature=self._temperature, greedy=greedy
        )

    def show(self, slots: Sequence[EnvSlot]) -> None:
        """Draws and encodes what `slots` show now and the engine does not have."""
        keys = [slot.image for slot in slots]
        missing = self._engine.missing(keys)
        if missing:
            frames = slots[0].env.draw(np.stack([slots[place].turn.snapshot for place in missing]))
            self._engine.show([keys[place] for place in missing], frames)


def play_turns(
    actor: Actor, make_slot: Callable[[], EnvSlot], seeds: Sequence[int], num_slots: int, greedy: bool
) -> list[TokenEpisode]:
    """A whole episode from a reset with each seed, in their order.

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
    done: dict[int, TokenEpisode] = {}
    free = [make_slot() for _ in range(min(num_slots, len(seeds)))]
    running: list[tuple[EnvSlot, np.random.Generator]] = []
    while waiting or running:
        while free and waiting:
            slot = free.pop()
            slot.place, seed = waiting.pop()
            slot.begin(seed)
            running.append((slot, np.random.default_rng(seed)))
        # from each episode's own generator: what else is under way makes no difference to a reply
        noise = [int(rng.integers(2**63)) for _, rng in running]
        replies = actor.act([slot for slot, _ in running], noise, greedy)
        for (slot, rng), reply in zip(list(running), replies, strict=True):
            if slot.play(reply, slot.piece_len):
                done[slot.place] = slot.episode()
                running.remove((slot, rng))
                free.append(slot)
    return [done[index] for index in range(len(seeds))]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkSampler:
    """How chunks are drawn, or taken, of a policy."""

    policy: VLAPolicy
    env: ChunkEnv
    """Draws what the policy looks at."""
    scale: ActionScale
    """Of the policy's actions."""
    temperature: float | None = None
    """None takes the likeliest token of each distribution."""
    generator: torch.Generator | None = None
    """Of the draws, on the CPU."""
    shared: int = 1
    """See `draw_bins`."""
    least_range: float = 0.0
    """See `PolicyGradientConfig`."""
    version: int = 0
    """Of the weights."""

    @property
    def explored(self) -> NDArray[np.bool_]:
        """[A] those dimensions of actions of whose range demonstrations use `least_range` or more."""
        return self.scale.share_used(self.env.action_low, self.env.action_high) >= self.least_range

    def choose(self, obs: Observations) -> tuple[NDArray[np.int64], FloatArray, FloatArray]:
        """Bins [N, L * A], their log-probs, and values [N]."""
        look(self.policy, self.env, obs)
        return self.policy.sample(
            obs, temperature=self.temperature, generator=self.generator, shared=self.shared, explored=self.explored
        )

    def to_actions(self, bins: NDArray[np.int64]) -> FloatArray:
        """Bins [n, L * A] to actions [n, L, A] in the env's units."""
        return self.scale.to_env(decode(bins).reshape(len(bins), self.env.chunk_steps, -1))


class _Round(NamedTuple):
    """One chunk of each env that was still running, R of them."""

    rows: NDArray[np.intp]
    """[R] which of all envs these are, ascending."""
    obs: Observations
    """R, what they saw."""
    bins: NDArray[np.int64]
    """[R, L * A] that were chosen."""
    log_probs: FloatArray
    """[R, L * A]; 0 of those that were taken and not drawn."""
    values: FloatArray
    """[R]."""
    outcome: ChunkStep
    """R, what came of it."""


def play_chunks(
    envs: ChunkEnvs, task: str, state_ids: NDArray[np.int64], groups: NDArray[np.int64], sampler: ChunkSampler
) -> list[TokenEpisode]:
    """Whole episodes, in the order of `state_ids`; those that end early are neither driven nor looked at any more, and
    those whose env was lost are left out.

    Args:
        envs: driven side by side, as many at once as they say.
        task: their name.
        state_ids: [N] initial states.
        groups: [N] the group that each belongs to: equal groups, equal initial states.
        sampler: chooses the action tokens for what is observed.

    Raises:
        NumericsError: what an env shows or gives is not finite.
    """
    played: dict[int, TokenEpisode] = {}
    for places in envs.batches(state_ids):
        own_ids, own_groups = state_ids[places], groups[places]
        obs = envs.begin(own_ids)
        rows = np.arange(len(obs))
        rounds: list[_Round] = []
        while len(rows):
            # before the policy sees them: its answer to NaN would be blamed on the policy
            seen = {"numbers of observations": obs.snapshots, "numbers of proprioception": obs.proprio}
            check_finite(f"the env {task}", _FIX, seen, {"state_ids": own_ids[rows]})
            bins, log_probs, values = sampler.choose(obs)
            outcome = envs.step(rows, sampler.to_actions(bins))
            rounds.append(_Round(rows, obs, bins, log_probs, values, outcome))
            running = np.flatnonzero(~outcome.ended)
            rows = rows[running]  # of envs that have ended nothing more is drawn, sampled or stepped
            obs = outcome.obs.at(running)
        kept = [(row, place) for row, place in enumerate(places.tolist()) if row not in envs.lost]
        for row, place in kept:
            played[place] = _chunk_episode(row, place, task, int(own_ids[row]), int(own_groups[row]), rounds, sampler)
        if kept:
            rewards = np.concatenate([played[place].env_rewards for _, place in kept])
            check_finite(f"the env {task}", _FIX, {"rewards": rewards}, {"state_ids": own_ids})
    # an env may play its episodes in batches of like ones; the caller gets them in the order it asked for
    return [played[place] for place in sorted(played)]


def _chunk_episode(
    row: int, slot: int, task: str, state_id: int, group: int, rounds: Sequence[_Round], sampler: ChunkSampler
) -> TokenEpisode:
    """The episode of env `row`, cut out of the rounds of all of them."""
    own: list[tuple[int, _Round]] = []  # the rounds that the env was in, and its place among those that ran
    for one in rounds:
        at = int(np.searchsorted(one.rows, row))
        if at == len(one.rows) or one.rows[at] != row:
            break
        own.append((at, one))
    last_at, last = own[-1]
    steps = np.array([one.outcome.steps[at] for at, one in own], np.int64)
    first = rounds[0].obs  # of all envs, in their order
    snapshots = np.concatenate(
        [
            first.snapshots[row : row + 1],
            *(one.outcome.snapshots[at, :count] for (at, one), count in zip(own, steps, strict=True)),
        ]
    )
    ends = np.cumsum(steps)
    # the env is asked for success and progress after each chunk, not after each of its steps
    success, progress = np.zeros(ends[-1], bool), np.full(ends[-1], np.nan, np.float32)
    success[ends - 1] = [one.outcome.success[at] for at, one in own]
    progress[ends - 1] = [one.outcome.progress[at] for at, one in own]
    bins = tuple(one.bins[at].astype(np.int16) for at, one in own)
    log_probs = tuple(one.log_probs[at] for at, one in own)
    # an episode's end may cut its last chunk short: tokens of steps that were never run teach nothing
    is_run = np.arange(len(bins[0])) < (steps * len(sampler.env.action_low))[:, None]
    # stacked row by row: thousands of episodes a round are cut out of the same arrays, which none of them may keep
    after = last.outcome.obs
    seen = Observations(
        images=(*(one.obs.images[at] for at, one in own), after.images[last_at]),
        texts=(*(one.obs.texts[at] for at, one in own), after.texts[last_at]),
        proprio=np.stack([*(one.obs.proprio[at] for at, one in own), after.proprio[last_at]]),
        snapshots=np.stack([*(one.obs.snapshots[at] for at, one in own), after.snapshots[last_at]]),
    )
    return TokenEpisode(
        task=task,
        seed=state_id,
        group=group,
        slot=slot,
        played_at=np.zeros(len(own), np.int64),
        obs=seen,
        snapshots=snapshots,
        steps=steps,
        tokens=bins,
        log_probs=log_probs,
        # a token that was taken and not drawn has log-probability 0
        masks=tuple(run & (one < 0) for run, one in zip(is_run, log_probs, strict=True)),
        values=np.array([one.values[at] for at, one in own], np.float32),
        versions=np.full(len(own), sampler.version),
        env_rewards=np.concatenate(
            [one.outcome.env_rewards[at, :count] for (at, one), count in zip(own, steps, strict=True)]
        ),
        success=success,
        progress=progress,
        gains=np.diff(progress[ends - 1], prepend=0.0).astype(np.float32),
        goals=(first.texts[row],) * len(own),
        is_over=True,
        terminated=bool(last.outcome.terminated[last_at]),
        is_undone=bool(success.any()) and not bool(last.outcome.success_at_end[last_at]),
    )
