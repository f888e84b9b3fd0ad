"""Trains the policy on groups of episodes. RLlib builds the learner; the algorithm hands it each update.

Log-probabilities are computed anew from exactly the observations and tokens that were stored. Several learners take
each step together, see `algorithms.base`.
"""
# pyright: reportAttributeAccessIssue=false
# RLlib types configs and modules by their base classes

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor, nn

from rlvlm.algorithms.base import ManualLearner, add_up_gradients, all_reduce, check_weights, local_shard
from rlvlm.algorithms.grpo.config import GRPOConfig
from rlvlm.algorithms.grpo.credit.groups import UpdateBatch
from rlvlm.algorithms.grpo.losses import kl_k3, token_weights, update_loss
from rlvlm.algorithms.grpo.rollouts import ObsProcessor, seen_at_chunks
from rlvlm.core import metrics
from rlvlm.core.errors import NumericsError, UsageError
from rlvlm.envs.chunk_env import ChunkEnv
from rlvlm.envs.registry import make_env
from rlvlm.policies.vla.policy import take_weights, trained_weights
from rlvlm.policies.vla.sampling import entropy, log_probs_of

_FIX = "lower algo.lr in the run's config.yaml, then `rlvlm resume`"
_LR_FACTOR = 1.3
"""By how much the step size changes after an update that moved the policy too little or too far."""
_FEW = 64
"""Chunks of a minibatch of which the entropy is measured: over all of them it costs a sixth of an update."""
_LR_RANGE = (1e-3, 10.0)
"""Bounds of the step size, in units of the first one."""


class VLAModule(TorchRLModule):
    """The policy as an RLlib module: everything that is trained, and nothing else.

    `model_config` holds `make_policy`, which is called without arguments and gives a `VLAPolicy`.
    """

    policy: nn.Module

    def setup(self) -> None:
        """Builds the policy; RLlib calls it once."""
        self.policy = self.model_config["make_policy"]()


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch:
    """The chunks of an update, one row for each, ready to be cut into minibatches."""

    images: Tensor
    """[R, cameras, H, W, 3] uint8, of those rows that this learner goes through."""
    drawn: Tensor
    """[B] which of `images` is the row's; any for a row that others go through."""
    words: Tensor
    """[B, W]."""
    proprio: Tensor
    """[B, P]."""
    bins: Tensor
    """[B, L * A]."""
    old_log_probs: Tensor
    """[B, L * A] when they were drawn."""
    advantages: Tensor
    """[B] of the episode."""
    weights: Tensor
    """[B, L * A] as `losses.token_weights` gives them, and 0 for tokens that were taken and not drawn."""


class GRPOLearner(ManualLearner):
    """The clipped update of GRPO, with a step size that follows how far updates move the policy."""

    policy: nn.Module
    obs_processor: ObsProcessor
    _env: ChunkEnv
    _grpo: GRPOConfig

    def build(self) -> None:
        """Makes the policy and its optimiser."""
        super().build()
        self._grpo = self.config.grpo
        self.policy = self.module[DEFAULT_MODULE_ID].policy
        assert self.config.seed is not None, "VLAGRPOConfig always has a seed"
        self._seed = self.config.seed
        self._order = np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=(4,)))
        self._reference: nn.Module | None = None
        self._latest: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        """Starts anew from the policy as it is now: a fresh optimiser, and a copy of the policy where KL is charged.

        What does not learn is not copied: the two policies share it, 15 GB of an OpenVLA-OFT.
        """
        self._optimizer = torch.optim.Adam(self.policy.parameters(), self._grpo.lr, betas=(0.9, 0.99))
        self.num_updates, self._lr_scale = 0, 1.0
        if self._grpo.loss.kl_weight > 0:
            frozen = {id(weight): weight for weight in self.policy.parameters() if not weight.requires_grad}
            self._reference = copy.deepcopy(self.policy, frozen)

    def watch(self, obs_processor: ObsProcessor, env: ChunkEnv) -> None:
        """Takes what draws what the policy saw, and an env of the task; called once, before anything is learned."""
        self.obs_processor, self._env = obs_processor, env

    def watch_alone(self) -> None:
        """`watch` in a process of its own, with an env of its own."""
        env = make_env(self.config.task, self.config.env_settings, self._seed)
        self.watch(ObsProcessor(cast(Any, self.policy), env), env)

    def weights(self) -> dict[str, np.ndarray]:
        """The policy's, by name: what others act with."""
        return _arrays(self.policy)

    def take_weights(self, weights: Mapping[str, Any]) -> None:
        """Takes over what `weights` of an equal policy gave: all learners begin alike."""
        take_weights(self.policy, weights)

    def _map_module_to_device(self, module: Any) -> None:
        """To the learner's GPU, where RLlib gave it one; otherwise a policy stays where its own config put it."""
        if self.device.type != "cpu":
            super()._map_module_to_device(module)

    def learn(self, update: UpdateBatch, progress: float) -> None:
        """Some passes over the episodes of an update; one that has moved the policy far enough stops.

        Where fewer groups taught something than an update should have, its target is as much smaller, and the step size
        goes with the root of their share, since the divergence grows with its square.

        Args:
            update: episodes and what each was worth.
            progress: share of the run that is done, in [0, 1]; the step size falls with it.

        Raises:
            NumericsError: the loss or the gradient is not finite.
        """
        grpo, chosen = self._grpo, torch.from_numpy(update.rows)
        minibatches = self._minibatches(chosen)
        train_batch = self._train_batch(update, torch.cat([local_shard(rows) for rows in minibatches]).unique())
        warmth = min(1.0, (self.num_updates + 1) / (grpo.warm_up + 1))
        fall = grpo.final_lr + (1 - grpo.final_lr) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
        share, target = 1.0, grpo.kl_target
        if target is not None:
            share = min(1.0, len(update.episodes) / (grpo.groups * grpo.group_size))
            target *= share * fall**2
        for group in self._optimizer.param_groups:
            group["lr"] = grpo.lr * self._lr_scale * warmth * fall * share**0.5
        readings = []
        for rows in minibatches:
            readings.append(self._read(train_batch, rows))
            if target is not None and readings[-1]["kl"] > 2 * target:
                break
            self._optimizer.step()
        self.num_updates += 1
        check_weights(list(self.policy.parameters()), _FIX)
        self._follow([reading["kl"] for reading in readings], target)
        self._note(readings, len(chosen))

    def _minibatches(self, chosen: Tensor) -> list[Tensor]:
        """Rows of each gradient step, in an order drawn anew for each pass."""
        passes = [chosen[torch.from_numpy(self._order.permutation(len(chosen)))] for _ in range(self._grpo.epochs)]
        return [rows for one in passes for rows in one.tensor_split(self._grpo.minibatches) if len(rows)]

    def _read(self, train_batch: TrainBatch, rows: Tensor) -> dict[str, float]:
        """Leaves the gradient of `rows`, of all learners together, in the parameters; returns what it found."""
        self._optimizer.zero_grad()
        sums = self._backward(train_batch, local_shard(rows))
        add_up_gradients([parameter for parameter in self.policy.parameters() if parameter.requires_grad])
        kl, ratio, clipped, total, disorder, disorder_total, loss = all_reduce(sums).tolist()
        norm = float(nn.utils.clip_grad_norm_(self.policy.parameters(), self._grpo.max_grad_norm))
        if not (np.isfinite(loss) and np.isfinite(norm)):
            raise NumericsError(
                f"the loss ({loss}) or its gradient ({norm}) is not finite",
                _FIX,
                {
                    "advantages": train_batch.advantages[rows].cpu().numpy(),
                    "bins": train_batch.bins[rows].cpu().numpy(),
                },
            )
        return {
            "kl": kl / total * float((train_batch.weights > 0).sum(dim=1).amax()),  # of a chunk that is played whole
            "ratio": ratio / total,
            "clipped": clipped / total,
            "entropy": disorder / disorder_total,
            "norm": norm,
            "loss": loss,
        }

    def _backward(self, train_batch: TrainBatch, rows: Tensor) -> Tensor:
        """Leaves the gradient of `rows` in the parameters; returns [7] sums over their tokens, zeros for no rows.

        They are: divergence, distance of ratios from 1, ratios outside the clips, tokens; entropy and tokens of the
        first chunks; loss.
        """
        parts = rows.split(self._grpo.micro_batch or max(1, len(rows)))
        return torch.stack([self._backward_at_once(train_batch, part) for part in parts]).sum(dim=0)

    def _backward_at_once(self, train_batch: TrainBatch, rows: Tensor) -> Tensor:
        """`_backward` of rows that fit into memory together."""
        if not len(rows):
            return torch.zeros(7, device=train_batch.bins.device)
        config, temperature = self._grpo.loss, self._grpo.temperature
        seen = (train_batch.images[train_batch.drawn[rows]], train_batch.words[rows], train_batch.proprio[rows])
        bins, old, weights = train_batch.bins[rows], train_batch.old_log_probs[rows], train_batch.weights[rows]
        logits = self.policy(*seen)
        log_probs = log_probs_of(logits, bins, temperature)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference = log_probs_of(self._reference(*seen), bins, temperature)
        loss = update_loss(
            log_probs, old, train_batch.advantages[rows], weights, config, len(self._env.action_low), reference
        )
        (loss * self._grpo.minibatches).backward()  # minibatches' losses add up to the update's
        with torch.no_grad():
            mask, few = (weights > 0).float(), slice(_FEW)
            ratios = (log_probs - old).exp()
            outside = ((ratios < 1 - config.clip_low) | (ratios > 1 + config.clip_high)).float()
            return torch.stack(
                [
                    (kl_k3(old, log_probs) * mask).sum(),
                    ((ratios - 1).abs() * mask).sum(),
                    (outside * mask).sum(),
                    mask.sum(),
                    (entropy(logits[few], temperature) * mask[few]).sum(),
                    mask[few].sum(),
                    loss.detach(),
                ]
            )

    def _train_batch(self, update: UpdateBatch, own: Tensor | None = None) -> TrainBatch:
        """What is learned from, with the images of rows `own` drawn once; None draws all."""
        obs = seen_at_chunks(update.episodes)
        rows = torch.arange(len(obs)) if own is None else own
        drawn = torch.zeros(len(obs), dtype=torch.long)
        drawn[rows] = torch.arange(len(rows))
        images, _, _ = self.obs_processor.look(obs.at(rows.numpy()))
        words = cast(Any, self.policy).read(obs.instructions)
        device = images.device  # the policy's own, which need not be the learner's
        counts = [len(episode.steps) for episode in update.episodes]
        episodes = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
        steps = torch.from_numpy(np.concatenate([episode.steps for episode in update.episodes]))
        weights = token_weights(
            steps,
            episodes,
            len(counts),
            chunk_steps=self._env.chunk_steps,
            action_size=len(self._env.action_low),
            average=self._grpo.loss.average,
            longest_steps=self._env.episode_steps,
        )
        old_log_probs = torch.from_numpy(np.concatenate([episode.log_probs for episode in update.episodes]))
        weights *= old_log_probs < 0  # what was taken, not drawn, teaches nothing
        return TrainBatch(
            images=images,
            drawn=drawn.to(images.device),
            words=words,
            proprio=torch.from_numpy(obs.proprio).to(device),
            bins=torch.from_numpy(np.concatenate([e.bins for e in update.episodes]).astype(np.int64)).to(device),
            old_log_probs=old_log_probs.to(device),
            advantages=torch.from_numpy(update.advantages).to(device),
            weights=weights.to(device),
        )

    def _follow(self, divergences: list[float], target: float | None) -> None:
        """Sets the next update's step size by how far this one has moved the policy; not while it warms up.

        Args:
            divergences: per chunk, nats, before each gradient step of the update; a single one tells of no step's size.
            target: for the last of them; None leaves the step size alone.
        """
        if target is None or self.num_updates <= self._grpo.warm_up:
            return
        if divergences[-1] > 1.5 * target:
            self._lr_scale /= _LR_FACTOR
        elif divergences[-1] < target / 1.5 and len(divergences) > 1:
            self._lr_scale *= _LR_FACTOR
        self._lr_scale = min(max(self._lr_scale, _LR_RANGE[0]), _LR_RANGE[1])

    def _note(self, readings: list[dict[str, float]], num_chunks: int) -> None:
        first, last = readings[0], readings[-1]
        self._latest = {
            metrics.GRPO_FIRST_RATIO: first["ratio"],
            metrics.GRPO_KL: last["kl"],
            metrics.GRPO_CLIPPED: last["clipped"],
            metrics.GRPO_ENTROPY: float(np.mean([reading["entropy"] for reading in readings])),
            metrics.GRPO_GRADIENT: float(np.mean([reading["norm"] for reading in readings])),
            metrics.GRPO_LR: self._optimizer.param_groups[0]["lr"],
            metrics.GRPO_CHUNKS: float(num_chunks),
        }

    def report(self) -> dict[str, float]:
        """The newest update's numbers, none before the first, and the number of updates so far."""
        return {**self._latest, metrics.GRPO_UPDATES: float(self.num_updates)}

    def save_tree(self) -> dict[str, Any]:
        """Everything a bit-identical continuation needs, as a state tree."""
        named = dict(self.policy.named_parameters())
        adam = {name: self._optimizer.state.get(parameter, {}) for name, parameter in named.items()}
        return {
            "policy": _arrays(self.policy),
            "reference": None if self._reference is None else _arrays(self._reference),
            "adam": {
                name: {key: value.cpu().numpy() for key, value in moments.items()} for name, moments in adam.items()
            },
            "order": self._order.bit_generator.state,
            "num_updates": self.num_updates,
            "lr_scale": self._lr_scale,
            "latest": self._latest,
        }

    def load_tree(self, tree: dict[str, Any]) -> None:
        """Restores what `save_tree` returned.

        Raises:
            UsageError: KL is charged now and was not before.
        """
        take_weights(self.policy, tree["policy"])
        self.begin()
        if self._reference is not None:
            if tree["reference"] is None:
                raise UsageError(
                    f"algo.loss.kl_weight is {self._grpo.loss.kl_weight:g} and was 0 before: the policy that SFT made, "
                    "from which the divergence is measured, was not kept",
                    "put it back to 0, or start a new run with it",
                )
            take_weights(self._reference, tree["reference"])
        for name, parameter in self.policy.named_parameters():
            moments = tree["adam"][name]
            if moments:
                self._optimizer.state[parameter] = {
                    # copied: the tree may lie in memory that other learners read too, and Adam writes in place
                    key: torch.as_tensor(value).clone().to(parameter.device if np.ndim(value) else "cpu")
                    for key, value in moments.items()
                }
        self._order.bit_generator.state = tree["order"]
        self.num_updates, self._lr_scale = tree["num_updates"], tree["lr_scale"]
        self._latest = dict(tree["latest"])


def _arrays(policy: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.cpu().numpy() for name, value in trained_weights(policy).items()}
