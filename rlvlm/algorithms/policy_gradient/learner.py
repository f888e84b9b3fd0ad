"""Trains a policy on episodes. RLlib builds the learner; the algorithm hands it each update's episodes.

Log-probs and values are computed anew from exactly the observations and tokens that were stored. Several learners take
each step together, see `algorithms.learners`.
"""
# pyright: reportAttributeAccessIssue=false
# RLlib types configs and modules by their base classes

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import ray
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from torch import Tensor

from rlvlm.algorithms.learners import ManualLearner, all_reduce, check_weights
from rlvlm.algorithms.policy_gradient import losses
from rlvlm.algorithms.policy_gradient.advantages import find_estimator
from rlvlm.algorithms.policy_gradient.batch import Batch, BatchMaker, pack
from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig
from rlvlm.algorithms.policy_gradient.gradients import FIX, OWN, Gradients
from rlvlm.algorithms.policy_gradient.images import StoredImages, show_images
from rlvlm.algorithms.sft import Imitator
from rlvlm.algorithms.sft_config import ChunkSFTConfig, ReplySFTConfig
from rlvlm.algorithms.sft_replies import held_out_loss
from rlvlm.algorithms.sharding import (
    at_hand,
    fetch_bucket,
    is_sharded,
    load_optimizer_tree,
    local,
    optimizer_tree,
    plain,
    put_buckets,
    rejoined,
    shard,
)
from rlvlm.core import metrics
from rlvlm.core.episodes import TokenEpisode
from rlvlm.demonstrations.weighting import Weights
from rlvlm.envs.registry import make_env
from rlvlm.policies.buckets import Bucket, fill_from_buckets
from rlvlm.policies.protocol import Imitation, Policy
from rlvlm.policies.weights import slice_like
from rlvlm.vlms.devices import free_gpu, gpu_id, repeatable
from rlvlm.vlms.skeleton import skeleton_of

logger = logging.getLogger(__name__)

_LR_FACTOR = 1.3
"""By how much the step size changes after an update that moved the policy too little or too far."""
_LR_RANGE = (1e-3, 10.0)
"""Bounds of the step size, in units of the first one."""


class TokenLearner(ManualLearner):
    """Clipped updates for any estimator and loss, see `advantages` and `losses`."""

    policy: Policy
    batches: BatchMaker
    gradients: Gradients
    log: Callable[[str], None] = staticmethod(logger.info)
    """Takes a line on the supervised start."""
    _algo: PolicyGradientConfig
    _env: Any
    imitator: Imitator | None = None
    """The supervised start, while it is under way."""

    def build(self) -> None:
        """Makes the policy and its optimiser."""
        super().build()
        self._algo = algo = self.config.algo
        self.policy = self.module[DEFAULT_MODULE_ID].policy
        assert self.config.seed is not None, "the config always has a seed"
        seed = self.config.seed
        # alike in all learners, which must cut a rollout into the same minibatches; on the CPU, so that a seed gives
        # the same ones on any device
        self._generator = torch.Generator().manual_seed(seed)
        self._order = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(4,)))
        self._has_critic = find_estimator(algo.advantage.estimator).has_critic and algo.advantage.values == "policy"
        self.shrinkage = algo.shrinkage and self._has_critic
        self._latest: dict[str, float] = {}
        self._start_optimizer()

    def watch(self, env: Any = None) -> None:
        """Takes an env of the task, to draw what the policy has not seen, or makes one; called before all else.

        Weights are shared out here and not in `build`, after which RLlib asks the first learner alone for all of them.
        """
        if self._algo.shard:
            shard(self.policy, torch.bfloat16 if self._algo.compute_dtype == "bfloat16" else None)
            self._start_optimizer()  # of the slices: what `build` made was of weights that are no longer there
        self._env = make_env(self.config.task, self.config.env_settings, self.config.seed or 0) if env is None else env
        self.batches = BatchMaker(self.policy, self._env, self._algo)
        self.gradients = Gradients(self.policy, self._env, self._algo, self._has_critic, self.batches)

    def begin(self) -> None:
        """Starts anew from the policy as it is now, which is kept: evaluations and losses compare with it."""
        self.imitator = None  # and the images of its demonstrations
        if self._algo.keeps_vision:
            self.policy.stop_training_vision()
        self._start_optimizer()
        self._keep_start(self.policy.trained_state())

    def _keep_start(self, weights: Mapping[str, Tensor]) -> None:
        """Keeps a copy of the weights that learning starts from, in main memory: they are read when they are saved.

        A loss that charges for divergence has slices change places with them in each update, so these stay on the GPU
        unless they are offloaded.
        """
        is_swapped = self._algo.loss.kl_weight > 0 and not self._algo.offload
        self.batches.start = {
            name: value.clone() if is_sharded([value]) and is_swapped
            else local(value).to("cpu", copy=True) if is_sharded([value])
            else plain(value).clone()
            for name, value in weights.items()
        }  # fmt: skip

    def _start_optimizer(self) -> None:
        algo = self._algo
        self._acting, own_values = self.policy.acting_parameters(), self.policy.value_parameters()
        self.parameters = [*self._acting, *own_values]
        groups = [{"params": self._acting, "lr": algo.lr}, {"params": own_values, "lr": algo.value_lr}]
        self._optimizer = torch.optim.Adam(
            [group for group in groups if group["params"]], betas=algo.betas, eps=algo.adam_eps,
            foreach=False,  # one call cannot take slices and whole tensors, and takes memory for all of them at once
        )  # fmt: skip
        self.num_updates, self._lr_scale = 0, 1.0

    def learn(self, episodes: Sequence[TokenEpisode], progress: float, images: Sequence[StoredImages] = ()) -> None:
        """Some passes over the turns of an update; one that has moved the policy far enough stops.

        Where fewer groups taught something than an update should have, its target is as much smaller, and the step size
        goes with the root of their share, since the divergence grows with its square.

        Args:
            episodes: by the policy as it is now, with their rewards.
            progress: share of the run that is done, in [0, 1]; step sizes fall with it.
            images: that a policy elsewhere has looked at; what is not among them is drawn.

        Raises:
            NumericsError: the loss or the gradient is not finite.
        """
        show_images(self.policy, images, episodes)
        with at_hand(self._optimizer, self._algo.offload):
            self._learn(episodes, progress)
        if self.policy.device.type == "cuda":
            self._optimizer.zero_grad()  # who samples next has their memory

    def _learn(self, episodes: Sequence[TokenEpisode], progress: float) -> None:
        algo, batch = self._algo, self.batches.make(episodes)
        # Adam's first steps are as large as its rate says, whatever the gradient: the rate rises over some updates
        warmth = min(1.0, (self.num_updates + 1) / (algo.warm_up + 1))
        fall = algo.min_lr_ratio + (1 - algo.min_lr_ratio) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
        share, target = 1.0, algo.kl_target
        if target is not None:
            share = min(1.0, len(episodes) / (algo.groups * algo.group_size))
            # divergence goes with the square of the step size, so a step of `fall` times the size comes to fall^2 of it
            target *= share * fall**2
        for group, lr in zip(self._optimizer.param_groups, (algo.lr, algo.value_lr), strict=False):
            group["lr"] = lr * self._lr_scale * warmth * fall * share**0.5
        # kept whole, since how much of the update stays is known only after its last step
        before = [local(parameter.detach()).clone() for parameter in self._acting] if self.shrinkage else []
        gains = torch.zeros(int(batch.slots.max()) + 1, device=self.policy.device)  # of each env
        is_tested = torch.zeros_like(gains, dtype=torch.bool)  # an env that was tested may have gained exactly 0
        readings: list[dict[str, float]] = []
        for rows, is_test in self._minibatches(batch):
            tested = gains if is_test else None
            with repeatable(self.policy.device, algo.deterministic):
                readings.append(self.gradients.backward(batch, rows, self.parameters, self.num_updates, tested))
            is_tested[batch.slots[rows]] |= is_test
            divergence = readings[-1][metrics.UPDATE_KL]
            if target is not None and divergence > 2 * target:
                break  # before the step: the policy has gone far enough by the ones before
            self._optimizer.step()
            if algo.max_kl and divergence > algo.max_kl:
                break
        kept = self._shrink(before, all_reduce(gains)[is_tested])
        self.policy.forget_stale_images()
        self.num_updates += 1
        check_weights(self.parameters, FIX)
        self._follow([reading[metrics.UPDATE_KL] for reading in readings], target)
        self._note(readings, batch, kept)

    def begin_imitation(
        self, shown: Any, sft: ReplySFTConfig | ChunkSFTConfig, weights: Weights | None = None,
        tree: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Gets the supervised start ready, see `Imitator`; `tree` is what another one was saved as."""
        rng = np.random.default_rng(np.random.SeedSequence(self.config.seed, spawn_key=(sft.stream,)))
        self.imitator = Imitator(
            self.policy, self._env, shown, sft, rng, self.log, weights=weights, at_once=self._at_once
        )
        self.imitator.is_deterministic = self._algo.deterministic
        if tree is not None:
            self.imitator.set_state(tree)

    def held_out_loss(self, episodes: Sequence[TokenEpisode], sft: ReplySFTConfig) -> float:
        """The loss per turn of held-out episodes, of which no more go through the policy at once than in the start."""
        policy: Any = self.policy
        return held_out_loss(policy, self._env, episodes, sft, self._at_once)

    def _at_once(self, units: Tensor, prepared: Imitation) -> list[Tensor]:
        """Cuts `units` [U, A] of a supervised start into what goes through the policy at once."""
        algo, size = self._algo, units.shape[1]
        if algo.microbatch_tokens and prepared.lengths:
            # answers of a unit are padded to its longest
            lengths = [size * max(prepared.lengths[row] for row in unit) for unit in units.tolist()]
            return [units[part] for part in pack(lengths, algo.microbatch_tokens)]
        at_once = max(1, algo.microbatch_turns // size) if algo.microbatch_turns else max(1, len(units))
        return list(units.split(at_once))

    def _minibatches(self, batch: Batch) -> Iterator[tuple[Tensor, bool]]:
        """Rows of each step, pass by pass, and whether all learners' update so far can be tested on them.

        Where updates are shrunk the first pass goes through the envs, some at a time: turns of one env share what came
        of them, so an update that has seen one of them is tested on other envs only.
        """
        algo, num, epochs = self._algo, len(batch.answers), self._algo.epochs
        if algo.minibatches:
            # all passes are drawn before the first step: the draws do not depend on when an update stops
            passes = [torch.from_numpy(self._order.permutation(num)) for _ in range(epochs)]
            for order in passes:
                yield from ((rows, False) for rows in order.tensor_split(algo.minibatches) if len(rows))
            return
        size = algo.minibatch_turns
        if self.shrinkage:
            epochs -= 1
            # some envs at a time: their first minibatch tests what was learned from the other envs so far
            envs = batch.slots.unique()
            order = envs[torch.randperm(len(envs), generator=self._generator)]
            for part in order.split(max(1, size * len(order) // num)):
                rows = torch.isin(batch.slots, part).nonzero()[:, 0]
                # nothing was learned before the first envs' turn, so there is nothing to test on them
                first, *others = rows[torch.randperm(len(rows), generator=self._generator)].split(size)
                yield first, part[0] != order[0]
                yield from ((rest, False) for rest in others)
        for _ in range(epochs):
            for rows in torch.randperm(num, generator=self._generator).split(size):
                yield rows, False

    @torch.no_grad()
    def _shrink(self, before: Sequence[Tensor], gains: Tensor) -> float:
        """Takes back the part of the update that may be chance; returns the share that stays.

        Args:
            before: of what acts before the update; none where updates are not shrunk.
            gains: of the envs on which the update was tested.
        """
        if not before or self.gradients.is_warming_up(self.num_updates):
            return 1.0
        # theta <- theta_before + kept (theta - theta_before)
        kept = losses.james_stein_share(gains)
        for parameter, old in zip(self._acting, before, strict=True):
            local(parameter).copy_(torch.lerp(old, local(parameter), kept))
        return kept

    def _follow(self, divergences: list[float], target: float | None) -> None:
        """Sets the next update's step size by how far this one has moved the policy; not while it warms up.

        Args:
            divergences: per answer, nats, before each gradient step; a single one says nothing of a step's size.
            target: for the last of them; None leaves the step size alone.
        """
        if target is None or self.num_updates <= self._algo.warm_up:
            return
        if divergences[-1] > 1.5 * target:
            self._lr_scale /= _LR_FACTOR
        elif divergences[-1] < target / 1.5 and len(divergences) > 1:
            self._lr_scale *= _LR_FACTOR
        self._lr_scale = min(max(self._lr_scale, _LR_RANGE[0]), _LR_RANGE[1])

    def _note(self, readings: Sequence[Mapping[str, float]], batch: Batch, kept: float) -> None:
        """Keeps the update's numbers for `report`: means over its steps, but for what is defined otherwise."""
        names = (metrics.UPDATE_POLICY_LOSS, metrics.UPDATE_GRADIENT, metrics.UPDATE_CLIPPED)
        if self._has_critic:
            names += (metrics.UPDATE_VALUE_LOSS,)
        if any(reading["entropy_tokens"] for reading in readings):
            names += (metrics.UPDATE_ENTROPY,)
        means = {
            name: sum(reading[name] for reading in readings) / len(readings) for name in (*names, metrics.UPDATE_KL)
        }
        follows = self._algo.kl_target is not None
        self._latest = means | {
            # before any step: what is left is the difference between the engine's and the trainer's programs
            metrics.UPDATE_FIRST_RATIO: readings[0][metrics.UPDATE_FIRST_RATIO],
            metrics.UPDATE_STEPS: float(len(readings)),
            metrics.UPDATE_LR: self._optimizer.param_groups[0]["lr"],
            metrics.UPDATE_TURNS: float(len(batch.answers)),
        }
        self._latest |= batch.mismatch
        for name in {name for reading in readings for name in reading if name.startswith(OWN)}:
            self._latest[name] = float(np.mean([reading[name] for reading in readings if name in reading]))
        if follows:  # what was aimed at is the last
            self._latest |= {name: readings[-1][name] for name in (metrics.UPDATE_KL, metrics.UPDATE_CLIPPED)}
        if self._has_critic:
            self._latest |= {metrics.UPDATE_EXPLAINED: batch.explained, metrics.UPDATE_KEPT: kept}

    def put_weights(self, bucket_bytes: int) -> list[Bucket]:
        """Everything that learns, in Ray's object store, for others to act with; see `put_buckets`."""
        return put_buckets(self.policy.trained_state(), bucket_bytes)

    def take_weights(self, buckets: Sequence[Bucket], meta: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Takes over what lies in `buckets` of an equal policy, and what its `meta` says: all learners begin alike."""
        fill_from_buckets(self.policy.trained_state(), buckets, fetch_bucket)
        if meta.get("statistics"):
            self.load_statistics(meta["statistics"])

    def load_statistics(self, text: str) -> None:
        """See `VLAPolicy`; only policies that have them are given any."""
        policy: Any = self.policy
        policy.load_statistics(text)

    def gpu(self) -> tuple[str, str]:
        """The node of this learner in Ray, and its GPU there; empty on a CPU."""
        return ray.get_runtime_context().get_node_id(), gpu_id(self.policy.device)

    def free_gpu(self) -> None:
        """Gives back what it holds of its GPU without using it."""
        free_gpu()

    def forget_images(self) -> None:
        """Forgets everything computed from images: a run that resumes from a checkpoint has none either."""
        self.policy.images.clear()

    def _map_module_to_device(self, module: Any) -> None:
        """A VLA to the learner's GPU, where RLlib gave it one; a policy whose own config places it stays there."""
        policy = module[DEFAULT_MODULE_ID].policy
        if self.device.type != "cpu" and not hasattr(policy, "backbone") and skeleton_of(policy) is None:
            super()._map_module_to_device(module)

    def report(self) -> dict[str, float]:
        """The newest update's numbers, none before the first, and the number of updates so far."""
        return {**self._latest, metrics.UPDATES: float(self.num_updates)}

    def save_tree(self) -> dict[str, Any]:
        """Everything a bit-identical continuation needs, as a state tree."""
        own = self.policy.trained_state()
        with at_hand(self._optimizer, self._algo.offload):
            adam = optimizer_tree(self._optimizer)
        return {
            "trained": {name: plain(value) for name, value in own.items()},
            "adam": adam,
            "start": {name: plain(rejoined(value, own[name])) for name, value in self.batches.start.items()},
            "generator": self._generator.get_state().numpy(),
            "order": self._order.bit_generator.state,
            "num_updates": self.num_updates,
            "lr_scale": self._lr_scale,
            "latest": self._latest,
        }

    def load_tree(self, tree: dict[str, Any]) -> None:
        """Restores what `save_tree` returned; learning rates stay those of the present config."""
        own = self.policy.trained_state()
        self.policy.load_trained_state(
            {name: torch.as_tensor(np.array(value)).to(own[name].dtype) for name, value in tree["trained"].items()}
        )
        self.begin()  # a fresh optimiser, whose state has the shape of what is loaded into it
        with at_hand(self._optimizer, self._algo.offload):
            load_optimizer_tree(self._optimizer, tree["adam"], self.parameters)
        self._keep_start(
            {name: slice_like(torch.tensor(np.array(value)), own[name]) for name, value in tree["start"].items()}
        )
        self._generator.set_state(torch.as_tensor(tree["generator"]))
        self._order.bit_generator.state = tree["order"]
        self.num_updates, self._lr_scale = tree["num_updates"], tree["lr_scale"]
        self._latest = dict(tree["latest"])
