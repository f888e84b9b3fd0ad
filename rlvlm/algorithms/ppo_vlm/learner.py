"""Trains the policy on rollouts. RLlib builds the learner; the algorithm hands it each rollout.

Log-probs and values are computed anew from exactly the prompt ids, images and reply ids that were stored. Several
learners take each step together, see `algorithms.base`.
"""
# pyright: reportAttributeAccessIssue=false
# RLlib types configs and modules by their base classes

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from torch import Tensor, nn

from rlvlm.algorithms.base import ManualLearner, add_up_gradients, all_reduce, check_weights, local_shard
from rlvlm.algorithms.ppo_vlm.config import PPOConfig
from rlvlm.algorithms.ppo_vlm.runner import Rollout
from rlvlm.algorithms.ppo_vlm.update import losses
from rlvlm.algorithms.ppo_vlm.update.objectives import Loss, Minibatch, Objective, build_objective
from rlvlm.algorithms.ppo_vlm.update.train_batch import RolloutReader, TrainBatch, chunks
from rlvlm.core import metrics
from rlvlm.core.errors import NumericsError
from rlvlm.core.sampling import ReplyTokens
from rlvlm.envs.registry import make_env
from rlvlm.policies.vlm.policy import ReadReplies, VLMPolicy

_LOG_RATIO_BOUND = 2.0
"""Log-ratios beyond count as this when the divergence of an update is measured."""
_GAIN_CLIP = 0.2
"""Ratios farther than this from 1 count as this far when an update is tested."""
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


class ReplyLearner(ManualLearner):
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
        self.reader = RolloutReader(self.policy, self.objective, ppo)
        self._env: Any = None
        head = self.policy.action_head
        self._acting = [*self.policy.backbone_parameters(), *([] if head is None else head.parameters())]
        self._parameters = [*self.policy.backbone_parameters(), *self.policy.head_parameters()]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": self._acting, "lr": ppo.lr},
                {"params": list(self.policy.value_head.parameters()), "lr": ppo.value_lr},
            ],
            betas=(0.9, 0.98), eps=1e-6, weight_decay=0.0,
        )  # fmt: skip

    def _map_module_to_device(self, module: Any) -> None:
        """The policy lies where its own config says; RLlib would move it to the CPU."""

    def begin(self) -> None:
        """Keeps the policy as it is now: evaluations compare with it, and so do objectives that stay near it."""
        if self._ppo.keeps_vision:
            self.policy.stop_training_vision()
        self.reader.start = {name: _plain(value).clone() for name, value in self.policy.trained_state().items()}

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
        train_batch = self.reader.train_batch(rollout)
        readings: list[dict[str, float]] = []
        before = [parameter.detach().clone() for parameter in self._acting] if self.objective.is_shrunk else []
        gains = torch.zeros(int(train_batch.envs.max()) + 1, device=self.policy.device)  # [W]
        is_tested = torch.zeros_like(gains, dtype=torch.bool)
        for rows, is_test in self._minibatches(train_batch.envs):
            readings.append(self._step(train_batch, rows, gains if is_test else None))
            is_tested[train_batch.envs[rows]] |= is_test
            if ppo.largest_kl and readings[-1][metrics.PPO_KL] > ppo.largest_kl:
                break
        kept = self._shrink(before, all_reduce(gains)[is_tested])
        self.policy.forget_stale_images()
        self.num_updates += 1
        check_weights(self._parameters, _FIX)
        means = {name: sum(one[name] for one in readings) / len(readings) for name in readings[0]}
        self._latest |= means | {
            metrics.PPO_FIRST_RATIO_ERROR: readings[0][metrics.PPO_FIRST_RATIO_ERROR],
            metrics.PPO_STEPS: float(len(readings)),
            metrics.PPO_EXPLAINED: train_batch.explained,
            metrics.PPO_KEPT: kept,
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
        if self._env is None:
            self._env = make_env(self.config.task, self.config.env_settings, self._seed)
        for chunk in chunks(missing, self._ppo.microbatch_turns):
            frames = self._env.draw(np.stack([rollout.snapshots[key] for key in chunk]))
            self.policy.show(chunk, frames)

    def forget_images(self) -> None:
        """Leaves no features behind: who goes on from a checkpoint has none either."""
        self.policy.images.clear()

    def _minibatches(self, worlds: Tensor) -> Iterator[tuple[Tensor, bool]]:
        """Rows of each step, epoch by epoch, and whether all learners' update so far can be tested on them.

        Where updates are shrunk the first epoch goes through the envs, some at a time: turns of one env share what
        came of them, so an update that has seen one of them is tested on other envs only.

        Args:
            worlds: [M] of each turn.
        """
        size, count = self._ppo.minibatch_turns, len(worlds)
        epochs = self._ppo.epochs
        if self.objective.is_shrunk:
            epochs -= 1
            order = worlds.unique()[torch.randperm(len(worlds.unique()), generator=self._generator)]
            for part in order.split(max(1, size * len(order) // count)):
                rows = torch.isin(worlds, part).nonzero()[:, 0]
                first, *others = rows[torch.randperm(len(rows), generator=self._generator)].split(size)
                yield first, part[0] != order[0]
                yield from ((rest, False) for rest in others)
        for _ in range(epochs):
            yield from ((rows, False) for rows in torch.randperm(count, generator=self._generator).split(size))

    @torch.no_grad()
    def _shrink(self, before: Sequence[Tensor], gains: Tensor) -> float:
        """Takes back the part of the update that may be chance; returns the share that stays.

        Args:
            before: of each of `_acting` before the update; none where updates are not shrunk.
            gains: of the envs on which the update was tested.
        """
        if not before or self.num_updates < self.objective.value_warm_up:
            return 1.0
        kept = losses.kept_share(gains)
        for parameter, old in zip(self._acting, before, strict=True):
            parameter.copy_(torch.lerp(old, parameter, kept))
        return kept

    def _step(self, train_batch: TrainBatch, rows: Tensor, gains: Tensor | None = None) -> dict[str, float]:
        """One step of the optimiser on some rows, which go through the policy in micro-batches.

        Every learner takes the same step, having gone through its share of the rows.

        Args:
            train_batch: the rollout.
            rows: of this step.
            gains: [W] where the policy before the step is tested on these rows: what it gains is added to each env.
        """
        self._optimizer.zero_grad()
        reading: dict[str, float] = {name: 0.0 for name in (_LOSS, *_MEASURED)}
        is_warming_up = self.num_updates < self.objective.value_warm_up
        for part in local_shard(rows).split(self._ppo.microbatch_turns):
            if not len(part):
                continue
            share = len(part) / len(rows)
            batch = self._batch(train_batch, part)
            if gains is not None:
                gains.index_add_(0, train_batch.envs[part].to(gains.device), _gain(batch))
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
                {"advantages": train_batch.advantages[rows.to(train_batch.advantages.device)].float().cpu().numpy()},
            )
        reading[metrics.PPO_GRAD_NORM] = float(nn.utils.clip_grad_norm_(self._parameters, self._ppo.max_grad_norm))
        if not math.isfinite(reading[metrics.PPO_GRAD_NORM]):
            raise NumericsError(f"the gradient is not finite after {self.num_updates} updates", _FIX)
        self._optimizer.step()
        return reading

    def _added_up(self, reading: dict[str, float]) -> dict[str, float]:
        """`reading` summed over all learners; they decide by it, so it is the same in each."""
        values = torch.tensor(list(reading.values()), dtype=torch.float64, device=self.policy.device)
        return dict(zip(reading, all_reduce(values).tolist(), strict=True))

    def _batch(self, train_batch: TrainBatch, rows: Tensor) -> Minibatch:
        """Some rows as they were sampled and as the policy sees them now."""
        asked = [train_batch.tokens[row] for row in rows.tolist()]
        now = self._read(asked, train_batch.actions[rows])
        width, judges_tokens = now.log_probs.shape[1], self.objective.judges_tokens

        def narrow(column: Tensor) -> Tensor:
            picked = column[rows.to(column.device)]
            return picked[:, :width] if picked.ndim == 2 else picked

        assert not judges_tokens or now.token_values is not None
        return Minibatch(
            log_probs=now.log_probs,
            old_log_probs=narrow(train_batch.log_probs),
            is_reply=narrow(train_batch.is_reply),
            is_action=narrow(train_batch.is_action),
            advantages=narrow(train_batch.advantages),
            values=now.values if now.token_values is None else now.token_values,
            old_values=narrow(train_batch.values),
            returns=None if train_batch.returns is None else narrow(train_batch.returns),
            entropies=now.entropies,
            reference=None if train_batch.reference is None else narrow(train_batch.reference),
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
            "start": dict(self.reader.start),
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
            self.reader.start = {name: torch.as_tensor(value) for name, value in tree["start"].items()}
        self._generator.set_state(torch.as_tensor(tree["generator"]))
        self.num_updates, self._latest = tree["num_updates"], dict(tree["latest"])


def _measure(batch: Minibatch, loss: Loss) -> dict[str, float]:
    """What a minibatch is logged by."""
    with torch.no_grad():
        log_ratio = torch.where(batch.is_reply, batch.log_probs - batch.old_log_probs, 0.0)
        near = log_ratio.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)  # one rare token would decide otherwise
        divergence = (near.exp() - 1 - near).sum(-1).mean()
        error = (log_ratio.exp() - 1).abs().sum() / batch.is_reply.sum().clamp_min(1)
    return {
        metrics.PPO_POLICY_LOSS: float(loss.policy.detach()),
        metrics.PPO_VALUE_LOSS: float(loss.value.detach()),
        metrics.PPO_KL: float(divergence),
        metrics.PPO_CLIPPED: loss.clipped,
        metrics.PPO_FIRST_RATIO_ERROR: float(error),
    }


def _gain(batch: Minibatch) -> Tensor:
    """[B] what the policy gains by the advantages of turns that it has not learned from."""
    with torch.no_grad():
        log_ratio = torch.where(batch.is_reply, batch.log_probs - batch.old_log_probs, 0.0)
        advantages = batch.advantages if batch.advantages.ndim == 2 else batch.advantages.unsqueeze(-1)
        return losses.surrogate_gain(log_ratio, advantages, batch.is_reply, _GAIN_CLIP)


def _plain(value: Tensor) -> Tensor:
    """A copy that a state tree can hold: numpy knows no bfloat16, and float32 holds it exactly."""
    return value.detach().cpu().float() if value.dtype == torch.bfloat16 else value.detach().cpu()
