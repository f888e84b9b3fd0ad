"""Batch of an update: the turns of episodes with their advantages, as columns to be split into minibatches."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlvlm.algorithms.learners import largest, map_sharded
from rlvlm.algorithms.policy_gradient.advantages import Trajectories, estimate, find_estimator
from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig
from rlvlm.algorithms.policy_gradient.extras import extras_of
from rlvlm.algorithms.policy_gradient.losses import k3, token_weights, truncated_importance
from rlvlm.algorithms.sharding import rejoined
from rlvlm.core import metrics
from rlvlm.core.episodes import Answer, IntArray, Observations, TokenEpisode, answer_key
from rlvlm.core.steps import FloatArray
from rlvlm.policies.protocol import SHOWN_AT_ONCE, Policy, Reading, look


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """M turns, in the order in which they were played, ready to be split into minibatches."""

    obs: Observations
    """Observations of the M turns."""
    answers: tuple[Answer, ...]
    """M answers, in the policy's own form."""
    lengths: IntArray
    """[M] elements of each answer."""
    log_probs: Tensor
    """[M, N] log-probs at sampling; the trainer's own if the engine's are corrected."""
    weights: Tensor
    """[M, N] weights from `losses.token_weights`; 0 for elements without a loss."""
    is_action: Tensor
    """[M, N] mask of elements that belong to the action."""
    values: Tensor
    """[M] or, with a value per element, [M, N]: values at sampling."""
    advantages: Tensor
    """[M] or [M, N] advantages, shaped like `values`."""
    returns: Tensor | None
    """[M] or [M, N] targets of the critic, shaped like `values`; None without a critic."""
    reference: Tensor | None
    """[M, N] log-probs of the policy from which learning started, if needed."""
    slots: Tensor
    """[M] env of each turn: turns of the same env are not independent."""
    action_size: int
    """Elements of an action, for chunks; 1 for replies."""
    chunk_elements: int
    """Trained elements of a completely executed chunk; 0 for replies, which are always complete."""
    extras: Mapping[str, Tensor]
    """[M] or [M, N] by name: further inputs requested by the loss."""
    mismatch: Mapping[str, float]
    """Difference between engine and trainer, by names in `rlvlm.core.metrics`; empty if not measured."""

    @property
    def explained(self) -> float:
        """Share of the returns' variance explained by the critic; 0 without a critic."""
        if self.returns is None:
            return 0.0
        kept = self.weights > 0 if self.returns.ndim == 2 else torch.ones_like(self.returns, dtype=torch.bool)
        returns, values = self.returns[kept], self.values[kept]
        return float(1 - (returns - values).var() / returns.var().clamp_min(1e-8)) if returns.numel() > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Rows:
    """The M turns of some episodes in the order of an update."""

    episodes: Sequence[TokenEpisode]
    indices: list[tuple[int, int]]
    """M pairs (t, e): turn t of episode e."""
    slots: list[int]
    """Env of each episode."""

    @property
    def grid(self) -> tuple[Tensor, Tensor]:
        """Returns the indices of the rows in an array [T, E]."""
        turns, episodes = torch.tensor(self.indices).T
        return turns, episodes

    def of(self, name: str) -> list[Any]:
        """Returns the episodes' values of `name`, one for each row."""
        return [getattr(self.episodes[e], name)[t] for t, e in self.indices]

    def padded(self, name: str) -> Tensor:
        """Returns [M, N], such values per element, padded on the right."""
        # copied: arrays from Ray are read-only, about which torch warns
        return _padded([torch.from_numpy(np.array(elements)) for elements in self.of(name)])

    def observed(self) -> Observations:
        """Returns the observation before each answer."""
        pairs = [(self.episodes[e].obs, t) for t, e in self.indices]
        return Observations(
            images=tuple(obs.images[t] for obs, t in pairs),
            texts=tuple(obs.texts[t] for obs, t in pairs),
            proprio=np.stack([obs.proprio[t] for obs, t in pairs]),
            snapshots=np.stack([obs.snapshots[t] for obs, t in pairs]),
        )


def order_rows(episodes: Sequence[TokenEpisode]) -> Rows:
    """Returns the turns of `episodes`: pieces of parallel envs round by round, whole episodes one after the other."""
    # all chunks of a rollout are of its round 0, so that they come episode by episode
    slots = [e if episode.chunks else episode.slot for e, episode in enumerate(episodes)]
    order = sorted(
        (int(number), slots[e], t, e)
        for e, episode in enumerate(episodes)
        for t, number in enumerate(episode.played_at)
    )
    return Rows(episodes, [(t, e) for *_, t, e in order], slots)


class BatchMaker:
    """Credits every turn, using the policy's, its critic's and the reference's predictions before an update.

    Repeated turns are computed once, and several learners share the work.

    Args:
        policy: policy in training.
        env: env that draws images the policy has not seen, and gives the sizes of actions and episodes.
        algo: estimator, temperature, scale of rewards and size of micro-batches.
    """

    def __init__(self, policy: Policy, env: Any, algo: PolicyGradientConfig) -> None:
        self.policy, self.env, self._algo = policy, env, algo
        self.estimator = find_estimator(algo.advantage.estimator)
        self.has_token_values = "token_values" in self.estimator.needs
        """Whether the critic predicts a value before every element."""
        self.start: Mapping[str, Tensor] = {}
        """Weights of the policy from which learning started, the reference, by name."""

    def make(self, episodes: Sequence[TokenEpisode]) -> Batch:
        """Returns the turns of `episodes` with their advantages."""
        algo, device, rows = self._algo, self.policy.device, order_rows(episodes)
        obs, answers, chunks = rows.observed(), tuple(rows.of("answers")), episodes[0].chunks
        old, mask = rows.padded("log_probs"), rows.padded("masks")
        # elements of an action are adjacent; a flow samples each of them several times
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
            with self.policy.with_weights(start):  # no second copy of the network: only trained weights are swapped
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
        """Returns [M, N], elements that count in means: those not run, after an episode's end, do not."""
        if rows.episodes[0].runs:
            return rows.padded("runs")
        lengths = torch.tensor([len(log_probs) for log_probs in rows.of("log_probs")])
        return torch.arange(int(lengths.max())) < lengths[:, None]

    def _longest(self, num_elements: int, chunks: Sequence[FloatArray]) -> int:
        """Returns the number of elements of the longest possible episode."""
        if not chunks:
            return self._algo.max_reply_tokens
        return self.env.episode_steps * num_elements // chunks[0].size

    def _corrected(
        self, rows: Rows, obs: Observations, old: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor | None, dict[str, float]]:
        """Returns the ratio's reference log-probs, each element's importance weight, and the engine's mismatch."""
        loss = self._algo.loss
        if loss.correction in ("auto", "none"):  # a run has resolved auto for its engine
            return old, None, {}
        sampled = self._is_run(rows) & mask
        own = _padded(self._each_once(obs, rows, self._log_probs))
        counts = truncated_importance(own, old, sampled, loss)
        # from here on ratios are relative to the trainer's own policy
        return own, counts, mismatch_of(own[sampled], old[sampled], counts[sampled], loss.correction_cap)

    def _extras(self, episodes: Sequence[TokenEpisode], rows: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
        """Returns [M] or [M, N], the episodes' extra tensors that the loss requests, by name; raises as `extras_of`."""
        given, found = extras_of(episodes, self._algo.loss.policy), dict[str, Tensor]()
        for name in sorted(given[0]):
            cells = [torch.as_tensor(np.asarray(given[e][name][t], np.float32)) for t, e in rows]
            found[name] = torch.stack(cells) if cells[0].ndim == 0 else _padded(cells)
        return found

    def _valued(
        self, episodes: Sequence[TokenEpisode], rows: Sequence[tuple[int, int]], obs: Observations
    ) -> Sequence[TokenEpisode]:
        """Returns `episodes` with values that their engine, lacking a value head, left NaN: the critic's before the
        update, or 0 if no critic is used.
        """
        if not any(np.isnan(episode.values).any() for episode in episodes):
            return episodes
        values = [np.zeros(len(episode), np.float32) for episode in episodes]
        # values do not depend on the answer: the critic predicts before it
        if self.estimator.has_critic and self._algo.advantage.values == "policy":
            found = self._each_once(obs, None, self._values)
            for (t, e), value in zip(rows, found, strict=True):
                values[e][t] = float(value)
        return [replace(episode, values=own) for episode, own in zip(episodes, values, strict=True)]

    def _trajectories(
        self, episodes: Sequence[TokenEpisode], rows: Rows, obs: Observations, token_values: Tensor | None, mask: Tensor
    ) -> Trajectories:
        """Returns the inputs of the advantage estimator."""
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

        # episodes have different lengths: entries after an end are dead, and never read
        is_live = grid(torch.ones(len(rows.indices), dtype=torch.bool))
        last = [len(episode) - 1 for episode in episodes], list(range(len(episodes)))
        ends = ~is_live
        ends[last] = torch.tensor([episode.is_over for episode in episodes])
        values = columns("values").float()
        next_values = torch.cat([values[1:], torch.zeros_like(values[:1])])
        next_values[last] = 0.0  # after the last turn: 0, unless a time limit or the rollout's end cut it
        has_own_values = self.estimator.has_critic and self._algo.advantage.values == "policy"
        # V(s_T) if the episode was cut: the critic predicts the value of the state after its last turn
        cut = [e for e, episode in enumerate(episodes) if not episode.terminated]
        # in the order of play, so that micro-batches, and hence last bits, depend on nothing else
        cut.sort(key=lambda e: (episodes[e].played_at[-1], episodes[e].slot))
        if has_own_values and cut:
            after = Observations.joined([episodes[e].obs.at([len(episodes[e])]) for e in cut])
            found = self._each_once(after, None, self._values)
            next_values[[len(episodes[e]) - 1 for e in cut], cut] = torch.stack(found)
        states = None
        if "states" in needs:
            numbers: dict[Hashable, int] = {}  # the same image and text: the policy cannot distinguish such states
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
        """Returns `compute`'s result for each row, in micro-batches; equal rows are computed once, and learners share
        the work.

        Parallel envs often coincide: the policy saw and answered exactly the same.

        Args:
            obs: M.
            rows: M rows, whose answers and elements are used; None if `compute` needs none.
            compute: returns [B, ...] for B observations and their answers.
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
            # the last passes of some learners have no effect, see `micro_batches`
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
        """Splits `rows` into micro-batches; learners that gather weights together call it together, because they must
        make equally many passes.

        Args:
            obs: M.
            answers: M; empty ones if only prompts are read.
            rows: rows to split.
        """
        algo = self._algo
        if not algo.microbatch_tokens:
            size = algo.microbatch_turns or max(1, len(rows))
            return [list(rows[begin : begin + size]) for begin in range(0, len(rows), size)]
        lengths: list[int] = []
        parts = [rows[begin : begin + SHOWN_AT_ONCE] for begin in range(0, len(rows), SHOWN_AT_ONCE)]
        for number in range(self.agree(len(parts))):
            part = parts[number] if number < len(parts) else []
            # an image's number of tokens is known once it was encoded
            look(self.policy, self.env, obs.at(part or [0]), self.agree)
            lengths += self.policy.lengths(obs.at(part), [answers[row] for row in part]) if part else []
        return [[rows[index] for index in part] for part in pack(lengths, algo.microbatch_tokens)]

    def agree(self, count: int) -> int:
        """Returns `count`, or the maximum over all learners if they gather weights together."""
        return largest(count) if self._algo.shard else count

    def _values(self, obs: Observations, answers: Sequence[Answer]) -> Tensor:
        return self.policy.values(obs).float()

    def _token_values(self, obs: Observations, answers: Sequence[Answer]) -> Tensor:
        reading = Reading(temperature=self._algo.temperature, with_token_values=True)
        values = self.policy.log_probs(obs, answers, reading).token_values
        assert values is not None, "asked for"
        return values

    def _log_probs(self, obs: Observations, answers: Sequence[Answer]) -> Tensor:
        return self.policy.log_probs(obs, answers, Reading(temperature=self._algo.temperature)).log_probs


def mismatch_of(trainer: Tensor, engine: Tensor, counts: Tensor, cap: float) -> dict[str, float]:
    """Returns the difference between the engine that sampled K tokens and the trainer, as metrics.

    Args:
        trainer: [K] log-probabilities under the weights in training.
        engine: [K] log-probabilities from the engine.
        counts: [K] importance weights from `truncated_importance`.
        cap: maximum of these weights.
    """
    if not len(trainer):
        return {}
    log_ratio = trainer - engine
    return {
        metrics.ENGINE_KL: float(k3(engine, trainer).mean()),  # engine relative to trainer: the tokens are its own
        metrics.ENGINE_MAX_RATIO: float(log_ratio.abs().max().exp()),
        metrics.ENGINE_TRUNCATED: float((counts >= cap).float().mean()),
    }


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Returns the indices of `lengths` [B], longest first, in parts whose padded size is at most `max_tokens`.

    The padded size, longest times number, is the cost of a part; a row longer than `max_tokens` is a part of its own.
    """
    # longest first: the first of a part then decides the padding of the rest
    parts: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if parts and lengths[parts[-1][0]] * (len(parts[-1]) + 1) <= max_tokens:
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts
