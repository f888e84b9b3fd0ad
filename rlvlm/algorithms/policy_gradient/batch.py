"""Batch of an update: the turns of episodes with their advantages, as columns to be cut into minibatches."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlvlm.algorithms.learners import largest, map_sharded
from rlvlm.algorithms.policy_gradient.advantages import Trajectories, estimate, find_estimator
from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig
from rlvlm.algorithms.policy_gradient.losses import find_policy_loss, k3, token_weights, truncated_importance
from rlvlm.algorithms.sharding import rejoined
from rlvlm.core import metrics
from rlvlm.core.episodes import Answer, IntArray, Observations, TokenEpisode, answer_key
from rlvlm.core.errors import NumericsError, UsageError
from rlvlm.core.steps import FloatArray
from rlvlm.policies.protocol import SHOWN_AT_ONCE, Policy, look


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """M turns, in the order in which they were played, ready to be cut into minibatches."""

    obs: Observations
    """M."""
    answers: tuple[Answer, ...]
    """M, as their policy reads them."""
    lengths: IntArray
    """[M] elements of each answer."""
    log_probs: Tensor
    """[M, N] when they were sampled; the trainer's own where the engine's are corrected."""
    weights: Tensor
    """[M, N] as `losses.token_weights` gives them; 0 for elements that teach nothing."""
    is_action: Tensor
    """[M, N]."""
    values: Tensor
    """[M] or, where elements have values, [M, N], when they were sampled."""
    advantages: Tensor
    """[M] or [M, N], as `values`."""
    returns: Tensor | None
    """[M] or [M, N], as `values`: the critic's targets; None without a critic."""
    reference: Tensor | None
    """[M, N] log-probs of the policy that learning started from, where they are needed."""
    slots: Tensor
    """[M] env of each turn: turns of one env are not independent."""
    action_size: int
    """Elements of an action, of chunks; 1 of replies."""
    chunk_elements: int
    """Elements that teach of a chunk that is played whole; 0 of replies, each of which is whole."""
    extras: Mapping[str, Tensor]
    """[M] or [M, N] by name, what the loss asks for beside these."""
    mismatch: Mapping[str, float]
    """How far the engine is from the trainer, by names of `rlvlm.core.metrics`; empty where it was not measured."""

    @property
    def explained(self) -> float:
        """Share of the returns' variance that the critic explains; 0 without a critic."""
        if self.returns is None:
            return 0.0
        kept = self.weights > 0 if self.returns.ndim == 2 else torch.ones_like(self.returns, dtype=torch.bool)
        returns, values = self.returns[kept], self.values[kept]
        return float(1 - (returns - values).var() / returns.var().clamp_min(1e-8)) if returns.numel() > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Rows:
    """The M turns of some episodes in the order in which an update has them."""

    episodes: Sequence[TokenEpisode]
    indices: list[tuple[int, int]]
    """M pairs (t, e): turn t of episode e."""
    slots: list[int]
    """Env of each episode."""

    @property
    def grid(self) -> tuple[Tensor, Tensor]:
        """Indices of the rows in an array [T, E]."""
        turns, episodes = torch.tensor(self.indices).T
        return turns, episodes

    def of(self, name: str) -> list[Any]:
        """The episodes' values of `name`, one for each row."""
        return [getattr(self.episodes[e], name)[t] for t, e in self.indices]

    def padded(self, name: str) -> Tensor:
        """[M, N] the same of elements, padded on the right."""
        # copied: what came through Ray may not be written, which torch warns of
        return _padded([torch.from_numpy(np.array(elements)) for elements in self.of(name)])

    def observed(self) -> Observations:
        """The observation before each answer."""
        pairs = [(self.episodes[e].obs, t) for t, e in self.indices]
        return Observations(
            images=tuple(obs.images[t] for obs, t in pairs),
            texts=tuple(obs.texts[t] for obs, t in pairs),
            proprio=np.stack([obs.proprio[t] for obs, t in pairs]),
            snapshots=np.stack([obs.snapshots[t] for obs, t in pairs]),
        )


def order_rows(episodes: Sequence[TokenEpisode]) -> Rows:
    """The turns of `episodes`: pieces of envs side by side round by round, whole episodes one after the other."""
    # all chunks of a rollout are of its round 0, so that they come episode by episode
    slots = [e if episode.chunks else episode.slot for e, episode in enumerate(episodes)]
    order = sorted(
        (int(number), slots[e], t, e)
        for e, episode in enumerate(episodes)
        for t, number in enumerate(episode.played_at)
    )
    return Rows(episodes, [(t, e) for *_, t, e in order], slots)


class BatchMaker:
    """Gives every turn its credit, by what the policy, its critic and the reference say before an update.

    What equal turns have in common is computed once, and several learners share the work.

    Args:
        policy: in training.
        env: draws what the policy has not seen, and says how long actions and episodes are.
        algo: estimator, temperature, scale of rewards and size of micro-batches.
    """

    def __init__(self, policy: Policy, env: Any, algo: PolicyGradientConfig) -> None:
        self.policy, self.env, self._algo = policy, env, algo
        self.estimator = find_estimator(algo.advantage.estimator)
        self.has_token_values = "token_values" in self.estimator.needs
        """Whether the critic is asked before every element."""
        self.start: Mapping[str, Tensor] = {}
        """Weights of the policy that learning started from, the reference, by name."""

    def make(self, episodes: Sequence[TokenEpisode]) -> Batch:
        """The turns of `episodes` with what each was worth."""
        algo, device, rows = self._algo, self.policy.device, order_rows(episodes)
        obs, answers, chunks = rows.observed(), tuple(rows.of("answers")), episodes[0].chunks
        old, mask = rows.padded("log_probs"), rows.padded("masks")
        # elements of an action lie side by side; a flow draws each of them several times
        action_size = chunks[0].shape[1] if chunks else 1
        weights = token_weights(
            self._is_run(rows), torch.tensor([e for _, e in rows.indices]), len(episodes), algo.loss.average,
            action_size=action_size, longest_steps=self._longest(old.shape[1], chunks),
        )  # fmt: skip
        old, counts, mismatch = self._corrected(rows, obs, old, mask)
        if counts is not None:
            weights = weights * counts
        episodes = self._valued(episodes, rows.indices, obs)
        token_values = _padded(self._each_once(obs, rows, self._token_values)) if self.has_token_values else None
        advantages, returns = estimate(self._trajectories(episodes, rows, obs, token_values, mask), algo.advantage)
        values = torch.tensor([float(episodes[e].values[t]) for t, e in rows.indices])
        reference = None
        if algo.loss.kl_weight:
            own = self.policy.trained_state()
            start = {name: rejoined(value, own[name]) for name, value in self.start.items()}
            with self.policy.with_weights(start):  # no second copy of the network: what learns is swapped
                reference = _padded(self._each_once(obs, rows, self._log_probs)).to(device)
        extras = {name: column.to(device) for name, column in self._extras(episodes, rows.indices).items()}
        return Batch(
            obs=obs,
            answers=answers,
            lengths=np.array([len(log_probs) for log_probs in rows.of("log_probs")]),
            log_probs=old.to(device),
            weights=(weights * mask).to(device),
            is_action=(rows.padded("actions") if episodes[0].actions else mask).to(device),
            values=(values if token_values is None else token_values).to(device),
            advantages=advantages[rows.grid].float().to(device),
            returns=None if returns is None else returns[rows.grid].float().to(device),
            reference=reference,
            slots=torch.tensor([rows.slots[e] for _, e in rows.indices]),
            action_size=action_size,
            chunk_elements=int((weights * mask > 0).sum(dim=1).amax()) if chunks else 0,
            extras=extras,
            mismatch=mismatch,
        )

    def _is_run(self, rows: Rows) -> Tensor:
        """[M, N] elements that count in means: a chunk that an episode's end cut short has some that were not run."""
        if rows.episodes[0].runs:
            return rows.padded("runs")
        lengths = torch.tensor([len(log_probs) for log_probs in rows.of("log_probs")])
        return torch.arange(int(lengths.max())) < lengths[:, None]

    def _longest(self, num_elements: int, chunks: Sequence[FloatArray]) -> int:
        """Actions of the longest possible episode, each as often as a chunk's elements draw it."""
        if not chunks:
            return self._algo.max_reply_tokens
        return self.env.episode_steps * num_elements // chunks[0].size

    def _corrected(
        self, rows: Rows, obs: Observations, old: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor | None, dict[str, float]]:
        """Log-probs that the ratio starts at, what each element counts, and how far the engine was from the trainer."""
        loss = self._algo.loss
        if loss.correction in ("auto", "none"):  # a run has said what auto means for its engine
            return old, None, {}
        sampled = self._is_run(rows) & mask
        own = _padded(self._each_once(obs, rows, self._log_probs))
        counts = truncated_importance(own, old, sampled, loss)
        # from here on the ratio starts at the trainer's own policy
        return own, counts, mismatch_of(own[sampled], old[sampled], counts[sampled], loss.correction_cap)

    def _extras(self, episodes: Sequence[TokenEpisode], rows: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
        """[M] or [M, N] what the episodes carry and the loss asks for beside what every batch has, by name.

        Raises:
            UsageError: it has another length than the episode's turns or answers.
            NumericsError: it is not finite.
        """
        who, ask = self._algo.loss.policy, find_policy_loss(self._algo.loss.policy).extras
        given = [{**episode.extras, **({} if ask is None else ask(episode))} for episode in episodes]
        found: dict[str, Tensor] = {}
        for name in sorted({name for extras in given for name in extras}):
            for extras, episode in zip(given, episodes, strict=True):
                column, lengths = extras.get(name, ()), [len(log_probs) for log_probs in episode.log_probs]
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
        if not any(np.isnan(episode.values).any() for episode in episodes):
            return episodes
        values = [np.zeros(len(episode), np.float32) for episode in episodes]
        # a value does not depend on the answer: the critic is asked before it
        if self.estimator.has_critic and self._algo.advantage.values == "policy":
            found = self._each_once(obs, None, self._values)
            for (t, e), value in zip(rows, found, strict=True):
                values[e][t] = float(value)
        return [replace(episode, values=own) for episode, own in zip(episodes, values, strict=True)]

    def _trajectories(
        self, episodes: Sequence[TokenEpisode], rows: Rows, obs: Observations, token_values: Tensor | None, mask: Tensor
    ) -> Trajectories:
        """The inputs of the advantage estimator."""
        needs, indices = self.estimator.needs, rows.grid
        shape = (max(map(len, episodes)), len(episodes))

        def grid(column: Tensor) -> Tensor:
            full = torch.zeros(*shape, *column.shape[1:], dtype=column.dtype)
            full[indices] = column
            return full

        def columns(name: str) -> Tensor:
            return nn.utils.rnn.pad_sequence(
                [torch.from_numpy(np.array(getattr(episode, name))) for episode in episodes]
            )

        # episodes are of unequal length: what lies behind an end is dead, and its numbers are never read
        is_live = grid(torch.ones(len(rows.indices), dtype=torch.bool))
        last = [len(episode) - 1 for episode in episodes], list(range(len(episodes)))
        ends = ~is_live
        ends[last] = torch.tensor([episode.is_over for episode in episodes])
        values = columns("values").float()
        next_values = torch.cat([values[1:], torch.zeros_like(values[:1])])
        next_values[last] = 0.0  # what follows the last turn: nothing, unless a time limit or the rollout's end cut it
        has_own_values = self.estimator.has_critic and self._algo.advantage.values == "policy"
        # V(s_T) where the episode was cut: the critic is asked about the state that its last turn led to
        cut = [e for e, episode in enumerate(episodes) if not episode.terminated]
        # in the order in which they were played: micro-batches, and with them last bits, then depend on nothing else
        cut.sort(key=lambda e: (episodes[e].played_at[-1], episodes[e].slot))
        if has_own_values and cut:
            after = Observations.joined([episodes[e].obs.at([len(episodes[e])]) for e in cut])
            found = self._each_once(after, None, self._values)
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
            groups=torch.tensor([episode.group for episode in episodes]),
            values=values,
            next_values=next_values,
            token_values=None if token_values is None else grid(token_values),
            is_token=None if token_values is None else grid(mask),
            states=states,
        )

    def _each_once(
        self, obs: Observations, rows: Rows | None, compute: Callable[[Observations, Sequence[Answer]], Tensor]
    ) -> list[Tensor]:
        """Result of `compute` for each row, in micro-batches; equal rows are computed once, and learners share the
        work.

        Envs that are played side by side meet: the policy saw and answered the very same.

        Args:
            obs: M.
            rows: M, whose answers are asked about, and whose elements are given back; None: `compute` needs none.
            compute: gives [B, ...] of B observations and their answers.
        """
        answers: Sequence[Answer] = [{}] * len(obs) if rows is None else rows.of("answers")
        sizes = None if rows is None else [len(log_probs) for log_probs in rows.of("log_probs")]
        proprio = [row.tobytes() for row in obs.proprio]
        keys = list(zip(obs.images, obs.texts, proprio, map(answer_key, answers), strict=True))
        known: dict[Hashable, int] = {}
        for row, key in enumerate(keys):
            known.setdefault(key, row)  # the first row of each kind
        firsts = list(known.values())

        @torch.no_grad()
        def all_of(some: Sequence[int]) -> list[Tensor]:
            found: dict[int, Tensor] = {}
            parts = self.micro_batches(obs, answers, some)
            # the last passes of some learners count for nothing, see `micro_batches`
            for part in parts + [list(some[:1])] * (self.agree(len(parts)) - len(parts)):
                look(self.policy, self.env, obs.at(part), self.agree)
                table = compute(obs.at(part), [answers[row] for row in part]).cpu()
                found |= {
                    row: cells if sizes is None else cells[: sizes[row]] for row, cells in zip(part, table, strict=True)
                }
            return [found[row] for row in some]

        computed = dict(zip([keys[row] for row in firsts], map_sharded(firsts, all_of), strict=True))
        return [computed[key] for key in keys]

    def micro_batches(self, obs: Observations, answers: Sequence[Answer], rows: Sequence[int]) -> list[list[int]]:
        """`rows` in the parts that go through the policy at once; learners that gather weights together call it
        together, and must make equally many passes.

        Args:
            obs: M.
            answers: M; empty ones where prompts alone are read.
            rows: of them.
        """
        algo = self._algo
        if not algo.microbatch_tokens:
            size = algo.microbatch_turns or max(1, len(rows))
            return [list(rows[begin : begin + size]) for begin in range(0, len(rows), size)]
        lengths: list[int] = []
        parts = [rows[begin : begin + SHOWN_AT_ONCE] for begin in range(0, len(rows), SHOWN_AT_ONCE)]
        for number in range(self.agree(len(parts))):
            part = parts[number] if number < len(parts) else []
            # how many tokens an image makes is known once it was looked at
            look(self.policy, self.env, obs.at(part or [0]), self.agree)
            lengths += self.policy.lengths(obs.at(part), [answers[row] for row in part]) if part else []
        return [[rows[index] for index in part] for part in pack(lengths, algo.microbatch_tokens)]

    def agree(self, count: int) -> int:
        """`count`, or the largest of all learners' where they gather weights together."""
        return largest(count) if self._algo.shard else count

    def _values(self, obs: Observations, answers: Sequence[Answer]) -> Tensor:
        return self.policy.values(obs).float()

    def _token_values(self, obs: Observations, answers: Sequence[Answer]) -> Tensor:
        values = self.policy.log_probs(
            obs, answers, temperature=self._algo.temperature, with_token_values=True
        ).token_values  # fmt: skip
        assert values is not None, "asked for"
        return values

    def _log_probs(self, obs: Observations, answers: Sequence[Answer]) -> Tensor:
        return self.policy.log_probs(obs, answers, temperature=self._algo.temperature).log_probs


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
        metrics.ENGINE_MAX_RATIO: float(log_ratio.abs().max().exp()),
        metrics.ENGINE_TRUNCATED: float((counts >= cap).float().mean()),
    }


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices in `lengths` [B], the longest first, in parts whose longest times their number is at most `max_tokens`.

    That is what a part costs, for shorter rows are padded; one that is longer than `max_tokens` is a part of its own.
    """
    # longest first: the first of a part is then its longest, and decides what the rest are padded to
    parts: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if parts and lengths[parts[-1][0]] * (len(parts[-1]) + 1) <= max_tokens:
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts
