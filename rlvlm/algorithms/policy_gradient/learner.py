"""Trains a policy on episodes. RLlib builds the learner; the algorithm passes each update's episodes to it.

Log-probs and values are recomputed from exactly the stored observations and tokens. Several learners take each step
together, see `algorithms.learners`.
"""
# pyright: reportAttributeAccessIssue=false
# RLlib types configs and modules by their base classes

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import ray
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor, distributed

from rlvlm.algorithms.checkpoint import ADAM, POLICY, START, Written, in_background, marks, tensor_file, write_parts
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
    gathered,
    is_sharded,
    load_optimizer_tree,
    local,
    own_parts,
    plain,
    put_buckets,
    shard,
)
from rlvlm.core import metrics
from rlvlm.core.episodes import TokenEpisode
from rlvlm.demonstrations.weighting import Weights
from rlvlm.envs.env import ChunkEnv, TurnEnv
from rlvlm.envs.registry import make_env
from rlvlm.policies.buckets import Bucket, fill_from_buckets
from rlvlm.policies.protocol import Imitation, Policy
from rlvlm.policies.vla.policy import Demonstrations, VLAPolicy
from rlvlm.policies.weights import slice_like
from rlvlm.vlms.devices import free_gpu, gpu_id, gradient_settings
from rlvlm.vlms.skeleton import skeleton_of, skeletons

logger = logging.getLogger(__name__)

_LR_FACTOR = 1.3
"""Factor by which the step size changes after an update that moved the policy too little or too far."""
_LR_RANGE = (1e-3, 10.0)
"""Bounds of the step size, in units of the initial one."""


class PolicyModule(TorchRLModule):
    """A `Policy` as an RLlib module: trained weights are sent and saved, a frozen base is not.

    `model_config` contains `make_policy`, and `is_sharded`: whether learners shard the policy, which then has no
    weights until they have.
    """

    policy: Policy

    def setup(self) -> None:
        """Builds the policy; RLlib calls it once."""
        with skeletons(self.model_config.get("is_sharded", False)):
            self.policy = self.model_config["make_policy"]()

    def get_state(self, *args: object, **unused: object) -> dict[str, Any]:
        """Returns the trained weights, as float32 arrays by name; RLlib's own method would copy a frozen base too.

        If sharded, it only works when all learners are asked at once, which RLlib does not do once they play; before
        that it returns nothing.
        """
        state = {} if any(parameter.is_meta for parameter in self.policy.parameters()) else self.policy.trained_state()
        return {name: gathered(value).float().numpy().copy() for name, value in state.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `get_state` returned.

        Raises:
            ValueError: the weights are of another policy.
        """
        self.policy.load_trained_state({name: torch.tensor(np.asarray(value)) for name, value in state.items()})


class TokenLearner(ManualLearner):
    """Clipped updates for any estimator and loss, see `advantages` and `losses`."""

    policy: Policy
    batches: BatchMaker
    gradients: Gradients
    log: Callable[[str], None] = staticmethod(logger.info)
    """Receives progress messages of the supervised start."""
    _algo: PolicyGradientConfig
    _env: Any
    _writing: "Future[dict[str, str]] | None" = None
    """This learner's part of a checkpoint, while it is written."""
    _unwritten: Mapping[str, Mapping[str, Tensor]] = MappingProxyType({})
    """Its part by file, where this machine does not see the checkpoint's folder."""
    _writes_to = ""
    """That folder."""
    imitator: Imitator | None = None
    """The supervised start while it is running."""

    def build(self) -> None:
        """Makes the policy and its optimiser."""
        super().build()
        self._algo = algo = self.config.algo
        self.policy = self.module[DEFAULT_MODULE_ID].policy
        assert self.config.seed is not None, "the config always has a seed"
        seed = self.config.seed
        # equal in all learners, which must split a rollout into the same minibatches; on the CPU, so that a seed gives
        # the same ones on any device
        self._generator = torch.Generator().manual_seed(seed)
        self._order = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(4,)))
        self._has_critic = find_estimator(algo.advantage.estimator).has_critic and algo.advantage.values == "policy"
        self.shrinkage = algo.shrinkage and self._has_critic
        self._latest: dict[str, float] = {}
        self._start_optimizer()

    def watch(self, env: TurnEnv | ChunkEnv | None = None) -> None:
        """Stores an env of the task, or makes one, to draw images the policy has not seen; called before all else.

        Weights are sharded here rather than in `build`, after which RLlib asks only the first learner for all of them.
        """
        if self._algo.shard:
            shard(self.policy, torch.bfloat16 if self._algo.compute_dtype == "bfloat16" else None)
            self._start_optimizer()  # of the slices: `build` made one for weights that no longer exist
        self._env = make_env(self.config.task, self.config.env_settings, self.config.seed or 0) if env is None else env
        self.batches = BatchMaker(self.policy, self._env, self._algo)
        self.gradients = Gradients(self.policy, self._env, self._algo, self._has_critic, self.batches)

    def begin(self) -> None:
        """Starts over from the present policy, which is kept for evaluations and losses to compare with."""
        self.imitator = None  # and with it the images of its demonstrations
        if self._algo.keeps_vision:
            self.policy.stop_training_vision()
        self._start_optimizer()
        self._keep_start(self.policy.trained_state())

    def _keep_start(self, weights: Mapping[str, Tensor]) -> None:
        """Keeps a copy of the initial weights in main memory, to be read when saving.

        A loss with a divergence term swaps slices with them in each update, so these stay on the GPU unless they are
        offloaded.
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
            foreach=False,  # one call cannot handle slices and whole tensors, and needs memory for all of them at once
        )  # fmt: skip
        self.num_updates, self._lr_scale = 0, 1.0

    def learn(self, episodes: Sequence[TokenEpisode], progress: float, images: Sequence[StoredImages] = ()) -> None:
        """Makes some passes over the turns of an update, and stops once it has moved the policy far enough.

        If fewer groups were useful than wanted, the update's target is proportionally smaller, and the step size by the
        root of their share, because the divergence grows with its square.

        Args:
            episodes: episodes of the present policy, with their rewards.
            progress: share of the run that is done, in [0, 1]; step sizes decay with it.
            images: images seen by a policy elsewhere; missing ones are drawn.

        Raises:
            NumericsError: the loss or the gradient is not finite.
        """
        show_images(self.policy, images, episodes)
        with at_hand(self._optimizer, self._algo.offload):
            self._learn(episodes, progress)
        if self.policy.device.type == "cuda":
            self._optimizer.zero_grad()  # frees their memory for the next sampler

    def _learn(self, episodes: Sequence[TokenEpisode], progress: float) -> None:
        algo, batch = self._algo, self.batches.make(episodes)
        # Adam's first steps are as large as its rate, whatever the gradient: the rate rises over some updates
        warmth = min(1.0, (self.num_updates + 1) / (algo.warm_up + 1))
        fall = algo.min_lr_ratio + (1 - algo.min_lr_ratio) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
        share, target = 1.0, algo.kl_target
        if target is not None:
            share = min(1.0, len(episodes) / (algo.groups * algo.group_size))
            # divergence grows with the square of the step size, so `fall` times the step size leads to fall^2 of it
            target *= share * fall**2
        for group, lr in zip(self._optimizer.param_groups, (algo.lr, algo.value_lr), strict=False):
            group["lr"] = lr * self._lr_scale * warmth * fall * share**0.5
        # kept whole, because the share of the update to keep is only known after its last step
        before = [local(parameter.detach()).clone() for parameter in self._acting] if self.shrinkage else []
        gains = torch.zeros(int(batch.slots.max()) + 1, device=self.policy.device)  # of each env
        is_tested = torch.zeros_like(gains, dtype=torch.bool)  # a tested env may have gained exactly 0
        readings: list[dict[str, float]] = []
        for rows, is_test in self._minibatches(batch):
            tested = gains if is_test else None
            with gradient_settings(self.policy.device, algo.deterministic):
                readings.append(self.gradients.backward(batch, rows, self.parameters, self.num_updates, tested))
            is_tested[batch.slots[rows]] |= is_test
            divergence = readings[-1][metrics.UPDATE_KL]
            if target is not None and divergence > 2 * target:
                break  # before the step: earlier steps have moved the policy far enough
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
        self, shown: Sequence[TokenEpisode] | Demonstrations, sft: ReplySFTConfig | ChunkSFTConfig,
        weights: Weights | None = None, tree: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Prepares the supervised start, see `Imitator`; `tree` is the saved state of an earlier one."""
        rng = np.random.default_rng(np.random.SeedSequence(self.config.seed, spawn_key=(sft.stream,)))
        self.imitator = Imitator(
            self.policy, self._env, shown, sft, rng, self.log, weights=weights, at_once=self._at_once
        )
        self.imitator.is_deterministic = self._algo.deterministic
        if tree is not None:
            self.imitator.set_state(tree)

    def held_out_loss(self, episodes: Sequence[TokenEpisode], sft: ReplySFTConfig) -> float:
        """Returns the loss per turn of held-out episodes, with the same micro-batches as in the start."""
        return held_out_loss(self.policy, self._env, episodes, sft, self._at_once)

    def _at_once(self, units: Tensor, prepared: Imitation) -> list[Tensor]:
        """Splits `units` [U, A] of a supervised start into micro-batches."""
        algo, size = self._algo, units.shape[1]
        if algo.microbatch_tokens and prepared.lengths:
            # answers of a unit are padded to its longest
            lengths = [size * max(prepared.lengths[row] for row in unit) for unit in units.tolist()]
            return [units[part] for part in pack(lengths, algo.microbatch_tokens)]
        at_once = max(1, algo.microbatch_turns // size) if algo.microbatch_turns else max(1, len(units))
        return list(units.split(at_once))

    def _minibatches(self, batch: Batch) -> Iterator[tuple[Tensor, bool]]:
        """Yields rows of each step, pass by pass, and whether all learners' update so far can be tested on them.

        If updates are shrunk the first pass goes through some envs at a time: turns of one env share their outcome, so
        an update that was trained on one of them is only tested on other envs.
        """
        algo, num, epochs = self._algo, len(batch.answers), self._algo.epochs
        if algo.minibatches:
            # all passes are drawn before the first step, so that random numbers do not depend on when an update stops
            passes = [torch.from_numpy(self._order.permutation(num)) for _ in range(epochs)]
            for order in passes:
                yield from ((rows, False) for rows in order.tensor_split(algo.minibatches) if len(rows))
            return
        size = algo.minibatch_turns
        if self.shrinkage:
            epochs -= 1
            # some envs at a time: their first minibatch tests the update from the other envs so far
            envs = batch.slots.unique()
            order = envs[torch.randperm(len(envs), generator=self._generator)]
            for part in order.split(max(1, size * len(order) // num)):
                rows = torch.isin(batch.slots, part).nonzero()[:, 0]
                # nothing was learned before the first envs, so there is nothing to test on them
                first, *others = rows[torch.randperm(len(rows), generator=self._generator)].split(size)
                yield first, part[0] != order[0]
                yield from ((rest, False) for rest in others)
        for _ in range(epochs):
            for rows in torch.randperm(num, generator=self._generator).split(size):
                yield rows, False

    @torch.no_grad()
    def _shrink(self, before: Sequence[Tensor], gains: Tensor) -> float:
        """Reverts the part of the update that may be noise; returns the share that is kept.

        Args:
            before: the acting parameters before the update; empty if updates are not shrunk.
            gains: gains of the envs on which the update was tested.
        """
        if not before or self.gradients.is_warming_up(self.num_updates):
            return 1.0
        # theta <- theta_before + kept (theta - theta_before)
        kept = losses.james_stein_share(gains)
        for parameter, old in zip(self._acting, before, strict=True):
            local(parameter).copy_(torch.lerp(old, local(parameter), kept))
        return kept

    def _follow(self, divergences: list[float], target: float | None) -> None:
        """Adapts the next update's step size to how far this one has moved the policy; not during warm-up.

        Args:
            divergences: per answer, nats, before each gradient step; a single one says nothing about the step size.
            target: target of the last of them; None keeps the step size.
        """
        if target is None or self.num_updates <= self._algo.warm_up:
            return
        if divergences[-1] > 1.5 * target:
            self._lr_scale /= _LR_FACTOR
        elif divergences[-1] < target / 1.5 and len(divergences) > 1:
            self._lr_scale *= _LR_FACTOR
        self._lr_scale = min(max(self._lr_scale, _LR_RANGE[0]), _LR_RANGE[1])

    def _note(self, readings: Sequence[Mapping[str, float]], batch: Batch, kept: float) -> None:
        """Stores the update's metrics for `report`: means over its steps, unless defined otherwise."""
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
            # before any step: the remaining difference is between the engine's and the trainer's programs
            metrics.UPDATE_FIRST_RATIO: readings[0][metrics.UPDATE_FIRST_RATIO],
            metrics.UPDATE_STEPS: float(len(readings)),
            metrics.UPDATE_LR: self._optimizer.param_groups[0]["lr"],
            metrics.UPDATE_TURNS: float(len(batch.answers)),
        }
        self._latest |= batch.mismatch
        for name in {name for reading in readings for name in reading if name.startswith(OWN)}:
            self._latest[name] = float(np.mean([reading[name] for reading in readings if name in reading]))
        if follows:  # the last one was the target
            self._latest |= {name: readings[-1][name] for name in (metrics.UPDATE_KL, metrics.UPDATE_CLIPPED)}
        if self._has_critic:
            self._latest |= {metrics.UPDATE_EXPLAINED: batch.explained, metrics.UPDATE_KEPT: kept}

    def put_weights(self, bucket_bytes: int) -> list[Bucket]:
        """Puts all trained weights into Ray's object store, for samplers; see `put_buckets`."""
        return put_buckets(self.policy.trained_state(), bucket_bytes)

    def take_weights(self, buckets: Sequence[Bucket], meta: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Loads the weights in `buckets` of an equal policy, and its `meta`: all learners begin equally."""
        fill_from_buckets(self.policy.trained_state(), buckets, fetch_bucket)
        if meta.get("statistics"):
            self.load_statistics(meta["statistics"])

    def load_statistics(self, text: str) -> None:
        """See `VLAPolicy`; only called for policies with statistics."""
        assert isinstance(self.policy, VLAPolicy)
        self.policy.load_statistics(text)

    def gpu(self) -> tuple[str, str]:
        """Returns the node of this learner in Ray, and its GPU there; empty on a CPU."""
        return ray.get_runtime_context().get_node_id(), gpu_id(self.policy.device)

    def free_gpu(self) -> None:
        """Releases GPU memory that it does not use."""
        free_gpu()

    def forget_images(self) -> None:
        """Drops everything computed from images: a resumed run has none either."""
        self.policy.images.clear()

    def _map_module_to_device(self, module: MultiRLModule) -> None:
        """Moves a VLA to the learner's GPU, if RLlib assigned one; a policy placed by its own config stays there."""
        policy = module[DEFAULT_MODULE_ID].policy
        if self.device.type != "cpu" and not hasattr(policy, "backbone") and skeleton_of(policy) is None:
            super()._map_module_to_device(module)

    def report(self) -> dict[str, float]:
        """Returns the newest update's metrics, none before the first, and the number of updates so far."""
        return {**self._latest, metrics.UPDATES: float(self.num_updates)}

    def begin_writing(self, folder: str, has_start: bool) -> dict[str, Any]:
        """Copies this learner's part of a checkpoint into main memory, and writes it while learning goes on.

        Args:
            folder: where the files go; a learner on a machine without it hands its part over in `written`.
            has_start: whether the weights of the start are in files already.

        Returns:
            Everything else that is needed for a bit-identical continuation, as a state tree that names the tensors.
        """
        if self._writing is not None:
            wait([self._writing])  # given up by the run, and never more than one copy
        own, states = self.policy.trained_state(), self._optimizer.state_dict()["state"]
        adam = {f"{number}.{name}": value for number, state in states.items() for name, value in state.items()}
        slices = {name: self.parameters[int(name.partition(".")[0])] for name in adam}
        parts = {POLICY: own_parts(own, own), ADAM: own_parts(adam, slices)}
        if not has_start:
            parts[START] = own_parts(self.batches.start, own)
        is_split = is_sharded(own.values())
        place = (distributed.get_rank(), distributed.get_world_size()) if is_split else (0, 1)
        files = {tensor_file(kind, *place): part for kind, part in parts.items() if part}
        self._writes_to = folder
        if Path(folder).is_dir():
            self._unwritten, self._writing = {}, in_background(partial(write_parts, Path(folder), files))
        else:
            self._unwritten, self._writing = files, None
        adam_marks = marks(ADAM, adam)
        return {
            "trained": marks(POLICY, own),
            "adam": {str(n): {name: adam_marks[f"{n}.{name}"] for name in state} for n, state in states.items()},
            "start": marks(START, self.batches.start),
            "generator": self._generator.get_state().numpy(),
            "order": self._order.bit_generator.state,
            "num_updates": self.num_updates,
            "lr_scale": self._lr_scale,
            "latest": self._latest,
        }

    def written(self, folder: str, waits: bool) -> Written | None:
        """Returns what came of this learner's part of the checkpoint in `folder`; None if it is still being written,
        with `waits` once it is not.

        Raises:
            NumericsError: a weight of the policy is not finite.
        """
        if folder != self._writes_to:
            return Written(error="another checkpoint was begun before it was written")
        if self._writing is None:
            left, self._unwritten = self._unwritten, {}
            return Written(unwritten=left)
        if not (waits or self._writing.done()):
            return None
        try:
            return Written(digests=self._writing.result())
        except OSError as error:
            return Written(error=str(error), errno=error.errno or 0)

    def load_tree(self, tree: dict[str, Any]) -> None:
        """Restores the tree of a checkpoint; learning rates stay those of the present config."""
        own = self.policy.trained_state()
        self.policy.load_trained_state(
            {name: torch.as_tensor(np.array(value)).to(own[name].dtype) for name, value in tree["trained"].items()}
        )
        self.begin()  # a fresh optimiser, whose state has the shapes to be loaded
        with at_hand(self._optimizer, self._algo.offload):
            load_optimizer_tree(self._optimizer, tree["adam"], self.parameters)
        self._keep_start(
            {name: slice_like(torch.tensor(np.array(value)), own[name]) for name, value in tree["start"].items()}
        )
        self._generator.set_state(torch.as_tensor(tree["generator"]))
        self._order.bit_generator.state = tree["order"]
        self.num_updates, self._lr_scale = tree["num_updates"], tree["lr_scale"]
        self._latest = dict(tree["latest"])
