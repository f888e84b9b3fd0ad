"""What an update learns from: a rollout's turns with what each was worth, as columns to be cut into minibatches."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rlvlm.algorithms.base import map_sharded
from rlvlm.algorithms.env_slots import TurnObs
from rlvlm.algorithms.ppo_vlm.config import PPOConfig
from rlvlm.algorithms.ppo_vlm.play import PlayedTurn
from rlvlm.algorithms.ppo_vlm.runner import Rollout
from rlvlm.algorithms.ppo_vlm.update.objectives import Objective, Outcome
from rlvlm.core.sampling import ReplyTokens
from rlvlm.policies.vlm.policy import NO_REPLY, VLMPolicy

Row = TypeVar("Row")
Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch:
    """M turns of a rollout, in the order in which rows of `Outcome` are read, ready to be cut into minibatches."""

    tokens: Sequence[ReplyTokens]
    actions: Tensor
    """[M] picked by an action head; -1 elsewhere."""
    log_probs: Tensor
    """[M, N] when they were sampled."""
    is_reply: Tensor
    """[M, N]."""
    is_action: Tensor
    """[M, N]."""
    values: Tensor
    """[M] or, where tokens are judged, [M, N]."""
    advantages: Tensor
    """Likewise."""
    returns: Tensor | None
    """Likewise."""
    reference: Tensor | None
    """[M, N] of the policy that PPO started with, where it is needed."""
    envs: Tensor
    """[M] in which env each turn was played."""

    @property
    def explained(self) -> float:
        """Share of the returns' variance that the critic explains; 0 without a critic."""
        if self.returns is None:
            return 0.0
        chosen = self.is_reply if self.returns.ndim == 2 else torch.ones_like(self.returns, dtype=torch.bool)
        returns, values = self.returns[chosen], self.values[chosen]
        return float(1 - (returns - values).var() / returns.var().clamp_min(1e-8)) if returns.numel() > 1 else 0.0


class RolloutReader:
    """Gives every turn of a rollout its credit, by what the policy, the critic and the reference say before an update.

    What equal turns have in common is computed once, and several learners share the work.

    Args:
        policy: what is trained; its images are known.
        objective: how credit is given.
        ppo: temperature, scale of rewards and size of micro-batches.
    """

    def __init__(self, policy: VLMPolicy, objective: Objective, ppo: PPOConfig) -> None:
        self.policy, self.objective = policy, objective
        self._ppo = ppo
        self.start: Mapping[str, Tensor] = {}
        """Weights of the policy that PPO started with, the reference, by name: `trained_state` after the supervised
        start."""

    def train_batch(self, rollout: Rollout) -> TrainBatch:
        """The rollout with every turn's credit."""
        live = torch.tensor([[played is not None for played in row] for row in rollout.turns])
        turns = [played for row in rollout.turns for played in row if played is not None]
        device, actions = self.policy.device, torch.tensor([_action(one) for one in turns])
        tokens = [one.output.tokens for one in turns]
        log_probs = _padded([torch.tensor(one.output.log_probs) for one in turns]).to(device)
        is_reply = _padded([torch.ones(len(one.output.log_probs), dtype=torch.bool) for one in turns]).to(device)
        values = torch.tensor([one.output.value for one in turns])
        token_values = (
            _padded(_each_once(tokens, _spelled, self._token_values)) if self.objective.judges_tokens else None
        )
        outcome = self._outcome(rollout, live, turns, token_values, is_reply)
        credit = self.objective.credit(outcome)
        return TrainBatch(
            tokens=tokens,
            actions=actions,
            log_probs=log_probs,
            is_reply=is_reply,
            is_action=_padded(self._action_tokens(turns)).to(device),
            values=(values if token_values is None else token_values).to(device),
            advantages=credit.advantages[live].float().to(device),
            returns=None if credit.returns is None else credit.returns[live].float().to(device),
            reference=_padded(_each_once(tokens, _spelled, self.reference_log_probs)).to(device)
            if self.objective.needs_reference
            else None,
            envs=live.nonzero()[:, 1],
        )

    def _outcome(
        self, rollout: Rollout, live: Tensor, turns: Sequence[PlayedTurn], token_values: Tensor | None, is_reply: Tensor
    ) -> Outcome:
        """What decides the advantages, row by row of the rollout."""

        def grid(numbers: Any, blank: float = 0.0) -> Tensor:
            column = torch.as_tensor(numbers).cpu()
            full = torch.full((*live.shape, *column.shape[1:]), blank).to(column.dtype)
            full[live] = column
            return full

        values = grid([one.output.value for one in turns])
        ends = grid([one.outcome.is_end for one in turns], blank=1.0)
        has_groups = self.objective.group_size > 1
        return Outcome(
            rewards=grid([one.reward * self._ppo.reward_scale for one in turns]),
            ends=ends,
            is_live=live,
            values=values,
            next_values=self.next_values(rollout, live, values, ends) if self.objective.has_critic else values * 0,
            token_values=None if token_values is None else grid(token_values),
            is_reply=None if token_values is None else grid(is_reply),
            states=grid(_numbered([one.outcome.obs for one in turns])) if has_groups else None,
            groups=torch.tensor(list(rollout.groups)) if has_groups else None,
        )

    def next_values(self, rollout: Rollout, live: Tensor, values: Tensor, ends: Tensor) -> Tensor:
        """[T, W] the critic after each turn: of the next turn, of a state that was cut off, or 0 after an end."""
        after = torch.cat((values[1:], torch.zeros_like(values[:1])))
        cut: list[tuple[int, int, TurnObs]] = []
        for t, row in enumerate(rollout.turns):
            for w, played in enumerate(row):
                if played is None or played.outcome.is_terminated:
                    continue
                if played.outcome.is_end or t + 1 == len(rollout.turns):
                    cut.append((t, w, played.outcome.next_obs))
        after = torch.where(ends, 0.0, after) * live
        values_of = _each_once([obs for _, _, obs in cut], lambda obs: obs, self._values)
        for (t, w, _), value in zip(cut, values_of, strict=True):
            after[t, w] = value
        return after

    @torch.no_grad()
    def _values(self, observations: Sequence[TurnObs]) -> list[float]:
        """The critic of each observation."""
        prompts = [self._prompt(obs) for obs in observations]
        parts = chunks(prompts, self._ppo.microbatch_turns)
        return [value for part in parts for value in self.policy.values(part).tolist()]

    def _prompt(self, obs: TurnObs) -> ReplyTokens:
        (seen,) = self.policy.images.get([obs.image])
        prompt = self.policy.encode(obs.prompt, seen.size_px)
        return ReplyTokens(prompt_ids=prompt, image=obs.image, reply_ids=NO_REPLY)

    def _action_tokens(self, turns: Sequence[PlayedTurn]) -> list[Tensor]:
        """Which tokens of each reply are its action; equal replies are looked at once."""
        known: dict[tuple[bytes, tuple[int, int] | None], Tensor] = {}
        found = []
        for one in turns:
            key = (one.output.tokens.reply_ids.tobytes(), one.outcome.reply.action_span)
            if one.output.action is not None:
                known[key] = torch.ones(1, dtype=torch.bool)
            elif key not in known:
                known[key] = torch.from_numpy(
                    self.policy.action_tokens(one.output.tokens.reply_ids, one.outcome.reply.action_span)
                )
            found.append(known[key])
        return found

    @torch.no_grad()
    def _token_values(self, tokens: Sequence[ReplyTokens]) -> list[Tensor]:
        """[N] of each reply, the critic before each token, by the policy as it is now."""
        parts = []
        for chunk in chunks(tokens, self._ppo.microbatch_turns):
            values = self.policy.read(chunk, temperature=self._ppo.temperature, with_token_values=True).token_values
            assert values is not None
            parts += [row[: len(one.reply_ids)].cpu() for row, one in zip(values, chunk, strict=True)]
        return parts

    @torch.no_grad()
    def reference_log_probs(self, tokens: Sequence[ReplyTokens]) -> list[Tensor]:
        """[N] of each reply, by the policy that PPO started with."""
        parts: list[Tensor] = []
        with self.policy.with_weights(self.start):
            for chunk in chunks(tokens, self._ppo.microbatch_turns):
                table = self.policy.read(chunk, temperature=self._ppo.temperature).log_probs
                parts += [row[: len(one.reply_ids)].cpu() for row, one in zip(table, chunk, strict=True)]
        return parts


def chunks(rows: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """`rows` in pieces of at most `size`."""
    yield from (rows[begin : begin + size] for begin in range(0, len(rows), size))


def _action(played: PlayedTurn) -> int:
    return -1 if played.output.action is None else played.output.action


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _each_once(
    rows: Sequence[Row], key: Callable[[Row], Hashable], compute: Callable[[Sequence[Row]], list[Answer]]
) -> list[Answer]:
    """`compute`'s answer for each of `rows`; rows with equal keys are computed once, and learners share the work."""
    firsts = {key(row): row for row in rows}
    answers = dict(zip(firsts, map_sharded(list(firsts.values()), compute), strict=True))
    return [answers[key(row)] for row in rows]


def _spelled(tokens: ReplyTokens) -> Hashable:
    """Equal for turns in which the policy saw and wrote the very same: envs that are played side by side meet."""
    return tokens.prompt_ids.tobytes(), tokens.image, tokens.reply_ids.tobytes()


def _numbered(observations: Sequence[TurnObs]) -> list[int]:
    """A number for each observation, the same for equal ones."""
    numbers: dict[TurnObs, int] = {}
    return [numbers.setdefault(obs, len(numbers)) for obs in observations]
