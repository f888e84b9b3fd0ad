"""What an update learns from: the turns of episodes with what each was worth, as columns to be cut into minibatches."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlvlm.algorithms.learners import largest, map_sharded
from rlvlm.algorithms.policy_gradient.advantages import Trajectories, estimate, find_estimator
from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig
from rlvlm.algorithms.policy_gradient.losses import find_policy_loss, k3, token_weights, truncated_importance
from rlvlm.core import metrics
from rlvlm.core.episodes import IntArray, Observations, TokenEpisode
from rlvlm.core.errors import NumericsError, UsageError
from rlvlm.core.steps import FloatArray
from rlvlm.policies.protocol import TokenPolicy, look

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """M turns, in the order in which they were played, ready to be cut into minibatches."""

    obs: Observations
    """M."""
    tokens: tuple[IntArray, ...]
    """M answers."""
    log_probs: Tensor
    """[M, N] when they were sampled; the trainer's own where the engine's are corrected."""
    weights: Tensor
    """[M, N] as `losses.token_weights` gives them; 0 for tokens that teach nothing."""
    is_action: Tensor
    """[M, N]."""
    values: Tensor
    """[M] or, where tokens have values, [M, N], when they were sampled."""
    advantages: Tensor
    """Likewise."""
    returns: Tensor | None
    """Likewise, a critic's targets; None without one."""
    reference: Tensor | None
    """[M, N] of the policy that learning started from, where it is needed."""
    slots: Tensor
    """[M] env of each turn: turns of one env are not independent."""
    chosen: Tensor
    """[Q] rows that are learned from."""
    action_size: int
    """Tokens of an action, of chunks; 1 of replies."""
    chunk_tokens: int
    """Tokens that teach of a chunk that is played whole; 0 of replies, each of which is whole."""
    extras: Mapping[str, Tensor]
    """[M] or [M, N] by name, what the loss asks for beside these."""
    mismatch: Mapping[str, float]
    """How far the engine is from the trainer, by names of `rlvlm.core.metrics`; empty where nobody looked."""

    @property
    def explained(self) -> float:
        """Share of the returns' variance that the critic explains; 0 without a critic."""
        if self.returns is None:
            return 0.0
        kept = self.weights > 0 if self.returns.ndim == 2 else torch.ones_like(self.returns, dtype=torch.bool)
        returns, values = self.returns[kept], self.values[kept]
        return float(1 - (returns - values).var() / returns.var().clamp_min(1e-8)) if returns.numel() > 1 else 0.0


class BatchMaker:
    """Gives every turn its credit, by what the policy, its critic and the reference say before an update.

    What equal turns have in common is computed once, and several learners share the work.

    Args:
        policy: what is trained.
        env: draws what the policy has not seen, and says how long actions and episodes are.
        algo: estimator, temperature, scale of rewards and size of micro-batches.
    """

    def __init__(self, policy: TokenPolicy, env: Any, algo: PolicyGradientConfig) -> None:
        self.policy, self.env, self._algo = policy, env, algo
        self.estimator = find_estimator(algo.advantage.estimator)
        self.has_token_values = "token_values" in self.estimator.needs
        """Whether the critic is asked before every token."""
        self.start: Mapping[str, Tensor] = {}
        """Weights of the policy that learning started from, the reference, by name."""
        is_chunk = hasattr(env, "chunk_steps")
        self._action_size = len(env.action_low) if is_chunk else 0
        self._longest = env.episode_steps if is_chunk else 0

    def make(self, episodes: Sequence[TokenEpisode]) -> Batch:
        """The turns of `episodes` with what each was worth."""
        algo, device = self._algo, self.policy.device
        # Pieces of envs side by side are read round by round; whole episodes one after the other.
        slots = list(range(len(episodes))) if self._action_size else [one.slot for one in episodes]
        order = sorted(
            ((int(at), slots[e], t, e) for e, one in enumerate(episodes) for t, at in enumerate(one.played_at))
        )
        rows = [(t, e) for *_, t, e in order]
        obs = Observations(
            images=tuple(episodes[e].obs.images[t] for t, e in rows),
            texts=tuple(episodes[e].obs.texts[t] for t, e in rows),
            proprio=np.stack([episodes[e].obs.proprio[t] for t, e in rows]),
            snapshots=np.stack([episodes[e].obs.snapshots[t] for t, e in rows]),
        )
        tokens = tuple(episodes[e].tokens[t] for t, e in rows)

        def padded(name: str) -> Tensor:
            # copied: what came through Ray may not be written, which torch warns of
            return _padded([torch.from_numpy(np.array(getattr(episodes[e], name)[t])) for t, e in rows])

        old, mask = padded("log_probs"), padded("masks")
        # a chunk that the episode's end cut short has tokens for steps that were never run
        steps = torch.tensor([int(episodes[e].steps[t]) for t, e in rows])
        lengths = steps * self._action_size if self._action_size else torch.tensor([len(one) for one in tokens])
        is_run = torch.arange(old.shape[1]) < lengths[:, None]
        weights = token_weights(
            is_run, torch.tensor([e for _, e in rows]), len(episodes), algo.loss.average,
            action_size=self._action_size or 1, longest_steps=self._longest or algo.max_reply_tokens,
        )  # fmt: skip
        mismatch: dict[str, float] = {}
        if algo.loss.correction != "none":
            sampled = is_run & mask
            own = _padded(self._each_once(obs, tokens, self._log_probs))
            counts = truncated_importance(own, old, sampled, algo.loss)
            mismatch = mismatch_of(own[sampled], old[sampled], counts[sampled], algo.loss.correction_cap)
            weights, old = weights * counts, own  # from here on the ratio starts at the trainer's own policy
        token_values = None
        episodes = self._valued(episodes, rows, obs)
        if self.has_token_values:
            token_values = _padded(self._each_once(obs, tokens, self._token_values))
        played = self._trajectories(episodes, rows, obs, tokens, token_values, mask)
        grid = tuple(torch.tensor(rows).T)
        advantages, returns = estimate(played, algo.advantage)
        values = torch.tensor([float(episodes[e].values[t]) for t, e in rows]) if token_values is None else token_values
        reference = None
        if algo.loss.kl_weight:
            with self.policy.with_weights(self.start):  # no second copy of the network: what learns is swapped
                reference = _padded(self._each_once(obs, tokens, self._log_probs)).to(device)
        return Batch(
            obs=obs,
            tokens=tokens,
            log_probs=old.to(device),
            weights=(weights * mask).to(device),
            is_action=(padded("actions") if episodes[0].actions else mask).to(device),
            values=values.to(device),
            advantages=advantages[grid].float().to(device),
            returns=None if returns is None else returns[grid].float().to(device),
            reference=reference,
            slots=torch.tensor([slots[e] for _, e in rows]),
            chosen=self._chosen(episodes, rows),
            action_size=self._action_size or 1,
            chunk_tokens=int((weights * mask > 0).sum(dim=1).amax()) if self._action_size else 0,
            extras={name: column.to(device) for name, column in self._extras(episodes, rows).items()},
            mismatch=mismatch,
        )

    def _extras(self, episodes: Sequence[TokenEpisode], rows: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
        """[M] or [M, N] what the loss asks for beside what every batch has, by name.

        Raises:
            UsageError: it has another length than the episode's turns or answers.
            NumericsError: it is not finite.
        """
        who, ask = self._algo.loss.policy, find_policy_loss(self._algo.loss.policy).extras
        if ask is None:
            return {}
        given = [dict(ask(episode)) for episode in episodes]
        found: dict[str, Tensor] = {}
        for name in sorted({name for extras in given for name in extras}):
            for extras, episode in zip(given, episodes, strict=True):
                column, lengths = extras.get(name, ()), [len(answer) for answer in episode.tokens]
                got = [np.size(each) for each in column]
                if got not in ([1] * len(episode), lengths):
                    raise UsageError(
                        f"the extras {name} of algo.loss.policy {who} have lengths {got}, for an episode of "
                        f"{len(episode)} turns whose answers have {lengths}",
                        "give one number for each turn, or an array for each turn as long as its answer",
                    )
                if not all(np.isfinite(each).all() for each in column):
                    raise NumericsError(f"the extras {name} of algo.loss.policy {who} are not finite", "mend them")
            cells = [torch.as_tensor(np.asarray(given[e][name][t], np.float32)) for t, e in rows]
            found[name] = torch.stack(cells) if cells[0].ndim == 0 else _padded(cells)
        return found

    def _valued(
        self, episodes: Sequence[TokenEpisode], rows: Sequence[tuple[int, int]], obs: Observations
    ) -> Sequence[TokenEpisode]:
        """`episodes` with the values that their engine, having no value head, left NaN: the critic's before the update,
        and 0 where no critic is used.
        """
        if not any(np.isnan(one.values).any() for one in episodes):
            return episodes
        values = [np.zeros(len(one), np.float32) for one in episodes]
        # a value does not depend on the answer: the critic is asked before it, so no tokens are needed
        if self.estimator.has_critic and self._algo.advantage.values == "policy":
            found = self._each_once(obs, [np.zeros(0, np.int64)] * len(rows), self._values)
            for (t, e), value in zip(rows, found, strict=True):
                values[e][t] = float(value)
        return [replace(one, values=own) for one, own in zip(episodes, values, strict=True)]

    def _trajectories(
        self, episodes: Sequence[TokenEpisode], rows: Sequence[tuple[int, int]], obs: Observations,
        tokens: Sequence[IntArray], token_values: Tensor | None, mask: Tensor,
    ) -> Trajectories:  # fmt: skip
        """What decides the advantages."""
        needs, place = self.estimator.needs, tuple(torch.tensor(rows).T)
        shape = (max(map(len, episodes)), len(episodes))

        def grid(column: Tensor) -> Tensor:
            full = torch.zeros(*shape, *column.shape[1:], dtype=column.dtype)
            full[place] = column
            return full

        def columns(name: str) -> Tensor:
            return nn.utils.rnn.pad_sequence([torch.from_numpy(np.array(getattr(one, name))) for one in episodes])

        # episodes are of unequal length: what lies behind an end is dead, and its numbers are never read
        is_live = grid(torch.ones(len(rows), dtype=torch.bool))
        last = [len(one) - 1 for one in episodes], list(range(len(episodes)))
        ends = ~is_live
        ends[last] = torch.tensor([one.is_over for one in episodes])
        values = columns("values").float()
        next_values = torch.cat([values[1:], torch.zeros_like(values[:1])])
        next_values[last] = 0.0  # what follows the last turn: nothing, unless a time limit or the rollout's end cut it
        has_own_values = self.estimator.has_critic and self._algo.advantage.values == "policy"
        # V(s_T) where the episode was cut: the critic is asked about the state that its last turn led to
        cut = [e for e, one in enumerate(episodes) if not one.terminated]
        # in the order in which they were played: micro-batches, and with them last bits, then depend on nothing else
        cut.sort(key=lambda e: (episodes[e].played_at[-1], episodes[e].slot))
        if has_own_values and cut:
            after = Observations.joined([episodes[e].obs.at([len(episodes[e])]) for e in cut])
            found = self._each_once(after, [np.zeros(0, np.int64)] * len(cut), self._values)
            next_values[[len(episodes[e]) - 1 for e in cut], cut] = torch.stack(found)
        states = None
        if "states" in needs:
            numbers: dict[Hashable, int] = {}  # the same image and words: the policy cannot tell such states apart
            pairs = zip(obs.images, obs.texts, strict=True)
            states = grid(torch.tensor([numbers.setdefault(pair, len(numbers)) for pair in pairs]))
        return Trajectories(
            rewards=columns("rewards").float() * self._algo.reward_scale,
            ends=ends,
            is_live=is_live,
            groups=torch.tensor([one.group for one in episodes]),
            values=values,
            next_values=next_values,
            token_values=None if token_values is None else grid(token_values),
            is_token=None if token_values is None else grid(mask),
            states=states,
        )

    def _chosen(self, episodes: Sequence[TokenEpisode], rows: Sequence[tuple[int, int]]) -> Tensor:
        """Rows that are learned from: all, or of each group those that differ most from what its other kind did."""
        share = self._algo.advantage.chunk_share
        if share == 1:
            return torch.arange(len(rows))
        kept: set[tuple[int, int]] = set()
        for group in sorted({one.group for one in episodes}):
            members = [e for e, one in enumerate(episodes) if one.group == group]
            returns = np.array([episodes[e].rewards.sum() for e in members])
            apart = differences([episodes[e].tokens for e in members], returns - returns.mean())
            turns = [(t, e) for e in members for t in range(len(episodes[e]))]
            best = np.argsort(-apart, kind="stable")[: math.ceil(share * len(apart))]
            kept |= {turns[place] for place in best}
        return torch.tensor([row for row, turn in enumerate(rows) if turn in kept])

    def _each_once(
        self, obs: Observations, tokens: Sequence[IntArray],
        compute: Callable[[Observations, Sequence[IntArray]], list[Answer]],
    ) -> list[Answer]:  # fmt: skip
        """`compute`'s answer for each row, in micro-batches; equal rows are computed once, and learners share the work.

        Envs that are played side by side meet: the policy saw and wrote the very same.
        """
        proprio = [row.tobytes() for row in obs.proprio]
        keys = list(zip(obs.images, obs.texts, proprio, [one.tobytes() for one in tokens], strict=True))
        known: dict[Hashable, int] = {}
        for row, key in enumerate(keys):
            known.setdefault(key, row)  # the first row of each kind
        firsts = list(known.values())
        size = self._algo.microbatch_turns or max(1, len(firsts))
        agree = largest if self._algo.shard else int  # who gather weights together must look equally often

        @torch.no_grad()
        def all_of(rows: Sequence[int]) -> list[Answer]:
            found: list[Answer] = []
            for begin in range(0, len(rows), size):
                part = obs.at(rows[begin : begin + size])
                look(self.policy, self.env, part, agree)
                found += compute(part, [tokens[row] for row in rows[begin : begin + size]])
            return found

        answers = dict(zip([keys[row] for row in firsts], map_sharded(firsts, all_of), strict=True))
        return [answers[key] for key in keys]

    def _values(self, obs: Observations, tokens: Sequence[IntArray]) -> list[Tensor]:
        return list(self.policy.values(obs).float().cpu())

    def _token_values(self, obs: Observations, tokens: Sequence[IntArray]) -> list[Tensor]:
        values = self.policy.log_probs(
            obs, tokens, temperature=self._algo.temperature, with_token_values=True
        ).token_values  # fmt: skip
        assert values is not None, "asked for"
        return [row[: len(one)].cpu() for row, one in zip(values, tokens, strict=True)]

    def _log_probs(self, obs: Observations, tokens: Sequence[IntArray]) -> list[Tensor]:
        table = self.policy.log_probs(obs, tokens, temperature=self._algo.temperature).log_probs
        return [row[: len(one)].cpu() for row, one in zip(table, tokens, strict=True)]


def mismatch_of(trainer: Tensor, engine: Tensor, counts: Tensor, cap: float) -> dict[str, float]:
    """How far the engine that sampled K tokens is from the trainer, by names of `rlvlm.core.metrics`.

    Args:
        trainer: [K] log-probabilities under the weights that are trained.
        engine: [K] those that came with the tokens.
        counts: [K] as `truncated_importance` gives them.
        cap: the largest of these.
    """
    if not len(trainer):
        return {}
    log_ratio = trainer - engine
    return {
        metrics.ENGINE_KL: float(k3(engine, trainer).mean()),  # of the engine from the trainer: its tokens are its own
        metrics.ENGINE_LARGEST_RATIO: float(log_ratio.abs().max().exp()),
        metrics.ENGINE_TRUNCATED: float((counts >= cap).float().mean()),
    }


def differences(answers: Sequence[Sequence[IntArray]], advantages: FloatArray) -> NDArray[np.float32]:
    """How far each chunk's actions are from what the other kind of a group's episodes did at its time.

    Better episodes are held against worse ones and the other way round, chunks of one number in their episodes against
    each other: the distance of a chunk's tokens from the other kind's mean, in standard deviations of all of them (and
    one bin, so that tokens that hardly differ do not count much), mean over tokens.

    Args:
        answers: the chunks of G episodes of one initial state.
        advantages: [G]; above 0 is better, below 0 worse.

    Returns:
        [chunks of all episodes], one after the other; 0 where only one of the two kinds was still acting.

    Source: arXiv:2605.16154, which learns from the fifth of the chunks whose actions differ most between successes and
    failures. Departure: how it measures that is not known here.
    """
    apart = [np.zeros(len(one), np.float32) for one in answers]
    for number in range(max(len(one) for one in apart)):
        acting = [place for place, one in enumerate(apart) if len(one) > number]
        bins = np.stack([answers[place][number] for place in acting]).astype(np.float32)
        kinds = np.sign(advantages[acting])
        if not {-1.0, 1.0} <= set(kinds.tolist()):
            continue
        unit = bins.std(axis=0) + 1.0  # a deviation and one bin
        means = {kind: bins[kinds == kind].mean(axis=0) for kind in (-1.0, 1.0)}
        for place, own, kind in zip(acting, bins, kinds.tolist(), strict=True):
            if kind:
                apart[place][number] = (np.abs(own - means[-kind]) / unit).mean()
    return np.concatenate(apart)


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
