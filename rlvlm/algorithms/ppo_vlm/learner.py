"""Trains the policy on rollouts. RLlib builds the learner; the algorithm hands it each rollout.

Log-probs and values are computed anew from exactly the prompt ids, images and reply ids that were stored. Several
learners take each step together, see `algorithms.learners`.
"""
# pyright: reportAttributeAccessIssue=false
# RLlib types configs and modules by their base classes

import copy
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from torch import Tensor, nn

from rlvlm import metrics
from rlvlm.algorithms.learners import add_up, add_up_gradients, check_weights, own_share, shared_out
from rlvlm.algorithms.ppo_vlm.config import PPOConfig
from rlvlm.algorithms.ppo_vlm.objectives import Loss, Minibatch, Objective, Outcome, build_objective
from rlvlm.algorithms.ppo_vlm.play import PlayedTurn
from rlvlm.algorithms.ppo_vlm.runner import Rollout
from rlvlm.algorithms.seats import Scene
from rlvlm.envs.registry import make_world
from rlvlm.errors import NumericsError
from rlvlm.policies.vlm.policy import NO_REPLY, ReadReplies, VLMPolicy
from rlvlm.types.sampling import ReplyTokens

Row = TypeVar("Row")
Answer = TypeVar("Answer")
_FARTHEST = 2.0
"""Log-ratios beyond count as this when the divergence of an update is measured."""
_LOSS = "loss"
_FIX = "lower algo.lr and algo.value_lr in the run's config.yaml, then `rlvlm resume`"
_MEASURED = (
    metrics.PPO_POLICY_LOSS,
    metrics.PPO_VALUE_LOSS,
    metrics.PPO_KL,
    metrics.PPO_CLIPPED,
    metrics.PPO_FIRST_RATIO_ERROR,
)
"""What `_measure` tells of a minibatch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
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


class ReplyLearner(TorchLearner):
    """PPO's updates for any objective; see `objectives` for what they descend."""

    policy: VLMPolicy
    objective: Objective
    _ppo: PPOConfig

    def build(self) -> None:
        """Makes the policy, its optimiser and the objective."""
        super().build()
        self._ppo = ppo = self.config.ppo
        self.policy = self.module[DEFAULT_MODULE_ID].policy
        self.objective = build_objective(ppo.objective)
        self.num_updates = 0
        assert self.config.seed is not None, "PPOVLMConfig always has a seed"
        self._seed = self.config.seed
        self._generator = torch.Generator().manual_seed(self.config.seed)
        self._latest: dict[str, float] = {}
        self._start: dict[str, Tensor] = {}
        self._reference: VLMPolicy | None = None
        self._world: Any = None
        self._parameters = [*self.policy.backbone_parameters(), *self.policy.head_parameters()]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": self.policy.backbone_parameters(), "lr": ppo.lr},
                {"params": self.policy.head_parameters(), "lr": ppo.value_lr},
            ],
            betas=(0.9, 0.98), eps=1e-6, weight_decay=0.0,
        )  # fmt: skip

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """Nothing to register: the learner's own optimiser takes the steps."""

    def _map_module_to_device(self, module: Any) -> None:
        """The policy lies where its own config says; RLlib would move it to the CPU."""

    def _make_modules_ddp_if_necessary(self) -> None:
        """Gradients are summed here, so that shares may be uneven; RLlib's wrapper would average them."""

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Tensor:
        """RLlib's own path from episodes to a loss, which this learner does not take.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("ReplyLearner learns from rollouts; call `learn`")

    def begin(self) -> None:
        """Keeps the policy as it is now: evaluations compare with it, and so do objectives that stay near it."""
        self._start = {name: _plain(value).clone() for name, value in self.policy.trained_state().items()}
        if self.objective.needs_reference and not hasattr(self.policy.model, "disable_adapter"):
            self._reference = copy.deepcopy(self.policy).requires_grad_(False)
            self._reference.images = self.policy.images

    def learn(self, rollout: Rollout, progress: float) -> None:
        """Some epochs over a rollout.

        Args:
            rollout: by the policy as it is now.
            progress: share of the run that is done, in [0, 1]; step sizes fall with it.
        """
        ppo = self._ppo
        self._look(rollout)
        fall = ppo.final_lr + (1 - ppo.final_lr) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
        for group, lr in zip(self._optimizer.param_groups, (ppo.lr, ppo.value_lr), strict=True):
            group["lr"] = lr * fall
        columns = self._columns(rollout)
        readings: list[dict[str, float]] = []
        for rows in self._minibatches(len(columns.tokens)):
            readings.append(self._step(columns, rows))
            if ppo.largest_kl and readings[-1][metrics.PPO_KL] > ppo.largest_kl:
                break
        self.num_updates += 1
        check_weights(self._parameters, _FIX)
        means = {name: sum(one[name] for one in readings) / len(readings) for name in readings[0]}
        self._latest |= means | {
            metrics.PPO_FIRST_RATIO_ERROR: readings[0][metrics.PPO_FIRST_RATIO_ERROR],
            metrics.PPO_STEPS: float(len(readings)),
            metrics.PPO_EXPLAINED: _explained(columns),
            metrics.PPO_UPDATES: float(self.num_updates),
        }

    def weights(self) -> dict[str, Tensor]:
        """Everything that learns, on the CPU: what others act with."""
        return {name: value.cpu() for name, value in self.policy.trained_state().items()}

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Takes over what `weights` of an equal policy gave: all learners begin alike."""
        self.policy.load_trained_state(weights)

    def _look(self, rollout: Rollout) -> None:
        """Draws and encodes what the policy has not seen here: others may have played."""
        keys = list(rollout.snapshots)
        missing = [keys[place] for place in self.policy.images.missing(keys)]
        if not missing:
            return
        if self._world is None:
            self._world = make_world(self.config.task, self.config.world, self._seed)
        for chunk in _chunks(missing, self._ppo.microbatch_turns):
            frames = self._world.draw(np.stack([rollout.snapshots[key] for key in chunk]))
            self.policy.show(chunk, frames)

    def forget_images(self) -> None:
        """Leaves no features behind: who goes on from a checkpoint has none either."""
        self.policy.images.clear()

    def _minibatches(self, count: int) -> Iterator[Tensor]:
        """Rows of each step, epoch by epoch."""
        for _ in range(self._ppo.epochs):
            yield from torch.randperm(count, generator=self._generator).split(self._ppo.minibatch_turns)

    def _step(self, columns: Columns, rows: Tensor) -> dict[str, float]:
        """One step of the optimiser on some rows, which go through the policy in micro-batches.

        Every learner takes the same step, having gone through its share of the rows.
        """
        self._optimizer.zero_grad()
        reading: dict[str, float] = {name: 0.0 for name in (_LOSS, *_MEASURED)}
        is_warming_up = self.num_updates < self.objective.value_warm_up
        for part in own_share(rows).split(self._ppo.microbatch_turns):
            if not len(part):
                continue
            share = len(part) / len(rows)
            batch = self._batch(columns, part)
            loss = self.objective.loss(batch)
            total = loss.value if is_warming_up else loss.policy + loss.value + loss.rest
            (share * total).backward()
            for name, value in ({_LOSS: float(total.detach())} | _measure(batch, loss)).items():
                reading[name] += share * value
        add_up_gradients(self._parameters)
        reading = self._added_up(reading)
        if not math.isfinite(reading.pop(_LOSS)):
            raise NumericsError(
                f"a loss is not finite after {self.num_updates} updates",
                _FIX,
                {"advantages": columns.advantages[rows.to(columns.advantages.device)].float().cpu().numpy()},
            )
        reading[metrics.PPO_GRAD_NORM] = float(nn.utils.clip_grad_norm_(self._parameters, self._ppo.max_grad_norm))
        if not math.isfinite(reading[metrics.PPO_GRAD_NORM]):
            raise NumericsError(f"the gradient is not finite after {self.num_updates} updates", _FIX)
        self._optimizer.step()
        return reading

    def _added_up(self, reading: dict[str, float]) -> dict[str, float]:
        """`reading` summed over all learners; they decide by it, so it is the same in each."""
        values = torch.tensor(list(reading.values()), dtype=torch.float64, device=self.policy.device)
        return dict(zip(reading, add_up(values).tolist(), strict=True))

    def _batch(self, columns: Columns, rows: Tensor) -> Minibatch:
        """Some rows as they were sampled and as the policy sees them now."""
        asked = [columns.tokens[row] for row in rows.tolist()]
        now = self._read(asked, columns.actions[rows])
        width, judges_tokens = now.log_probs.shape[1], self.objective.judges_tokens

        def narrow(column: Tensor) -> Tensor:
            picked = column[rows.to(column.device)]
            return picked[:, :width] if picked.ndim == 2 else picked

        assert not judges_tokens or now.token_values is not None
        return Minibatch(
            log_probs=now.log_probs,
            old_log_probs=narrow(columns.log_probs),
            is_reply=narrow(columns.is_reply),
            is_action=narrow(columns.is_action),
            advantages=narrow(columns.advantages),
            values=now.values if now.token_values is None else now.token_values,
            old_values=narrow(columns.values),
            returns=None if columns.returns is None else narrow(columns.returns),
            entropies=now.entropies,
            reference=None if columns.reference is None else narrow(columns.reference),
        )

    def _read(self, asked: Sequence[ReplyTokens], actions: Tensor) -> ReadReplies:
        """What the policy says now; an action of an action head counts as a reply of one token."""
        if self.policy.config.acts == "head":
            table, values = self.policy.act_log_probs(asked, detach_values=self._ppo.is_value_detached)
            chosen = table.gather(-1, actions.to(table.device)[:, None])
            entropies = -(table.exp() * table).sum(-1, keepdim=True)
            mask = torch.ones_like(chosen, dtype=torch.bool)
            return ReadReplies(log_probs=chosen, mask=mask, values=values, entropies=entropies, token_values=None)
        return self.policy.read(
            asked,
            temperature=self._ppo.temperature,
            detach_values=self._ppo.is_value_detached,
            with_entropies=self.objective.needs_entropies,
            with_token_values=self.objective.judges_tokens,
        )

    def _columns(self, rollout: Rollout) -> Columns:
        """The rollout with every turn's credit."""
        live = torch.tensor([[played is not None for played in row] for row in rollout.turns])
        turns = [played for row in rollout.turns for played in row if played is not None]
        device, actions = self.policy.device, torch.tensor([_action(one) for one in turns])
        tokens = [one.move.tokens for one in turns]
        log_probs = _padded([torch.tensor(one.move.log_probs) for one in turns]).to(device)
        is_reply = _padded([torch.ones(len(one.move.log_probs), dtype=torch.bool) for one in turns]).to(device)
        values = torch.tensor([one.move.value for one in turns])
        token_values = (
            _padded(_each_once(tokens, _spelled, self._token_values)) if self.objective.judges_tokens else None
        )
        outcome = self._outcome(rollout, live, turns, token_values, is_reply)
        credit = self.objective.credit(outcome)
        return Columns(
            tokens=tokens,
            actions=actions,
            log_probs=log_probs,
            is_reply=is_reply,
            is_action=_padded(self._action_tokens(turns)).to(device),
            values=(values if token_values is None else token_values).to(device),
            advantages=credit.advantages[live].float().to(device),
            returns=None if credit.returns is None else credit.returns[live].float().to(device),
            reference=_padded(_each_once(tokens, _spelled, self._reference_log_probs)).to(device)
            if self.objective.needs_reference
            else None,
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

        values = grid([one.move.value for one in turns])
        ends = grid([one.outcome.is_end for one in turns], blank=1.0)
        has_groups = self.objective.group_size > 1
        return Outcome(
            rewards=grid([one.reward * self._ppo.reward_scale for one in turns]),
            ends=ends,
            is_live=live,
            values=values,
            next_values=self._next_values(rollout, live, values, ends) if self.objective.has_critic else values * 0,
            token_values=None if token_values is None else grid(token_values),
            is_reply=None if token_values is None else grid(is_reply),
            states=grid(_numbered([one.outcome.scene for one in turns])) if has_groups else None,
            groups=torch.tensor(list(rollout.groups)) if has_groups else None,
        )

    def _next_values(self, rollout: Rollout, live: Tensor, values: Tensor, ends: Tensor) -> Tensor:
        """[T, W] the critic after each turn: of the next turn, of a state that was cut off, or 0 after an end."""
        after = torch.cat((values[1:], torch.zeros_like(values[:1])))
        cut: list[tuple[int, int, Scene]] = []
        for t, row in enumerate(rollout.turns):
            for w, played in enumerate(row):
                if played is None or played.outcome.is_terminated:
                    continue
                if played.outcome.is_end or t + 1 == len(rollout.turns):
                    cut.append((t, w, played.outcome.following))
        after = torch.where(ends, 0.0, after) * live
        values_of = _each_once([scene for _, _, scene in cut], lambda scene: scene, self._values)
        for (t, w, _), value in zip(cut, values_of, strict=True):
            after[t, w] = value
        return after

    @torch.no_grad()
    def _values(self, scenes: Sequence[Scene]) -> list[float]:
        """The critic of each scene."""
        chunks = _chunks([self._prompt(scene) for scene in scenes], self._ppo.microbatch_turns)
        return [value for chunk in chunks for value in self.policy.values(chunk).tolist()]

    def _prompt(self, scene: Scene) -> ReplyTokens:
        (seen,) = self.policy.images.get([scene.image])
        prompt = self.policy.encode(scene.prompt, seen.size_px)
        return ReplyTokens(prompt_ids=prompt, image=scene.image, reply_ids=NO_REPLY)

    def _action_tokens(self, turns: Sequence[PlayedTurn]) -> list[Tensor]:
        """Which tokens of each reply are its action; equal replies are looked at once."""
        known: dict[tuple[bytes, tuple[int, int] | None], Tensor] = {}
        found = []
        for one in turns:
            key = (one.move.tokens.reply_ids.tobytes(), one.outcome.reply.action_span)
            if one.move.action is not None:
                known[key] = torch.ones(1, dtype=torch.bool)
            elif key not in known:
                known[key] = torch.from_numpy(
                    self.policy.action_tokens(one.move.tokens.reply_ids, one.outcome.reply.action_span)
                )
            found.append(known[key])
        return found

    @torch.no_grad()
    def _token_values(self, tokens: Sequence[ReplyTokens]) -> list[Tensor]:
        """[N] of each reply, the critic before each token, by the policy as it is now."""
        parts = []
        for chunk in _chunks(tokens, self._ppo.microbatch_turns):
            values = self.policy.read(chunk, temperature=self._ppo.temperature, with_token_values=True).token_values
            assert values is not None
            parts += [row[: len(one.reply_ids)].cpu() for row, one in zip(values, chunk, strict=True)]
        return parts

    @torch.no_grad()
    def _reference_log_probs(self, tokens: Sequence[ReplyTokens]) -> list[Tensor]:
        """[N] of each reply, by the policy that PPO started with: a frozen copy, or the base without its adapter."""
        parts: list[Tensor] = []
        for chunk in _chunks(tokens, self._ppo.microbatch_turns):
            if self._reference is not None:
                table = self._reference.read(chunk, temperature=self._ppo.temperature).log_probs
            else:
                with self.policy.without_adapter():
                    table = self.policy.read(chunk, temperature=self._ppo.temperature).log_probs
            parts += [row[: len(one.reply_ids)].cpu() for row, one in zip(table, chunk, strict=True)]
        return parts

    def report(self) -> dict[str, float]:
        """Means over the newest update; nothing before the first."""
        return dict(self._latest)

    def save_tree(self) -> dict[str, Any]:
        """Everything a bit-identical continuation needs, as a state tree."""
        states = self._optimizer.state_dict()["state"]
        return {
            "trained": {name: _plain(value) for name, value in self.policy.trained_state().items()},
            "adam": {
                str(number): {name: _plain(value) for name, value in state.items()} for number, state in states.items()
            },
            "start": self._start,
            "generator": self._generator.get_state().numpy(),
            "num_updates": self.num_updates,
            "latest": self._latest,
        }

    def load_tree(self, tree: dict[str, Any]) -> None:
        """Restores what `save_tree` returned; learning rates stay those of the present config."""
        own = self.policy.trained_state()
        self.policy.load_trained_state(
            {name: torch.as_tensor(value).to(own[name].dtype) for name, value in tree["trained"].items()}
        )
        saved = self._optimizer.state_dict()
        saved["state"] = {  # copied: the tree may lie in memory that other learners read too, and Adam writes in place
            int(number): {name: torch.as_tensor(value).clone() for name, value in state.items()}
            for number, state in tree["adam"].items()
        }
        self._optimizer.load_state_dict(saved)
        if tree["start"]:
            self.begin()
            self._start = {name: torch.as_tensor(value) for name, value in tree["start"].items()}
            if self._reference is not None:
                self._reference.load_state_dict(self._start, strict=False)
        self._generator.set_state(torch.as_tensor(tree["generator"]))
        self.num_updates, self._latest = tree["num_updates"], dict(tree["latest"])


def _measure(batch: Minibatch, loss: Loss) -> dict[str, float]:
    """What a minibatch is logged by."""
    with torch.no_grad():
        log_ratio = torch.where(batch.is_reply, batch.log_probs - batch.old_log_probs, 0.0)
        near = log_ratio.clamp(-_FARTHEST, _FARTHEST)  # one rare token would decide otherwise
        divergence = (near.exp() - 1 - near).sum(-1).mean()
        error = (log_ratio.exp() - 1).abs().sum() / batch.is_reply.sum().clamp_min(1)
    return {
        metrics.PPO_POLICY_LOSS: float(loss.policy.detach()),
        metrics.PPO_VALUE_LOSS: float(loss.value.detach()),
        metrics.PPO_KL: float(divergence),
        metrics.PPO_CLIPPED: loss.clipped,
        metrics.PPO_FIRST_RATIO_ERROR: float(error),
    }


def _explained(columns: Columns) -> float:
    """Share of the returns' variance that the critic explains; 0 without a critic."""
    if columns.returns is None:
        return 0.0
    chosen = columns.is_reply if columns.returns.ndim == 2 else torch.ones_like(columns.returns, dtype=torch.bool)
    returns, values = columns.returns[chosen], columns.values[chosen]
    return float(1 - (returns - values).var() / returns.var().clamp_min(1e-8)) if returns.numel() > 1 else 0.0


def _action(played: PlayedTurn) -> int:
    return -1 if played.move.action is None else played.move.action


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _chunks(rows: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    yield from (rows[begin : begin + size] for begin in range(0, len(rows), size))


def _each_once(
    rows: Sequence[Row], key: Callable[[Row], Hashable], compute: Callable[[Sequence[Row]], list[Answer]]
) -> list[Answer]:
    """`compute`'s answer for each of `rows`; rows with equal keys are computed once, and learners share the work."""
    firsts = {key(row): row for row in rows}
    answers = dict(zip(firsts, shared_out(list(firsts.values()), compute), strict=True))
    return [answers[key(row)] for row in rows]


def _spelled(tokens: ReplyTokens) -> Hashable:
    """Equal for turns in which the policy saw and wrote the very same: worlds that are played side by side meet."""
    return tokens.prompt_ids.tobytes(), tokens.image, tokens.reply_ids.tobytes()


def _numbered(scenes: Sequence[Scene]) -> list[int]:
    """A number for each scene, the same for equal ones."""
    numbers: dict[Scene, int] = {}
    return [numbers.setdefault(scene, len(numbers)) for scene in scenes]


def _plain(value: Tensor) -> Tensor:
    """A copy that a state tree can hold: numpy knows no bfloat16, and float32 holds it exactly."""
    return value.detach().cpu().float() if value.dtype == torch.bfloat16 else value.detach().cpu()
