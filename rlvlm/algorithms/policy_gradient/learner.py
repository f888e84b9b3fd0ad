"""Trains a policy on episodes. RLlib builds the learner; the algorithm hands it each update's episodes.

Log-probs and values are computed anew from exactly the observations and tokens that were stored. Several learners take
each step together, see `algorithms.learners`.
"""
# pyright: reportAttributeAccessIssue=false
# RLlib types configs and modules by their base classes

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import ray
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor

from rlvlm.algorithms.learners import ManualLearner, add_up_gradients, all_reduce, check_weights, largest, local_shard
from rlvlm.algorithms.policy_gradient import losses
from rlvlm.algorithms.policy_gradient.advantages import find_estimator
from rlvlm.algorithms.policy_gradient.batch import Batch, BatchMaker
from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig
from rlvlm.algorithms.policy_gradient.images import StoredImages, show_images
from rlvlm.algorithms.sft import Imitator
from rlvlm.algorithms.sft_config import ChunkSFTConfig, ReplySFTConfig
from rlvlm.algorithms.sft_replies import held_out_loss
from rlvlm.algorithms.sharding import (
    clip_gradients,
    fetch_bucket,
    gathered,
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
from rlvlm.core.episodes import Answer, Observations, TokenEpisode
from rlvlm.core.errors import NumericsError, UsageError
from rlvlm.demonstrations.weighting import Weights
from rlvlm.envs.registry import make_env
from rlvlm.policies.buckets import Bucket, fill_from_buckets
from rlvlm.policies.protocol import SHOWN_AT_ONCE, Imitation, Policy, Prediction, look
from rlvlm.policies.weights import slice_like
from rlvlm.vlms.devices import card_of, free_card
from rlvlm.vlms.skeleton import skeleton_of, skeletons

logger = logging.getLogger(__name__)

_LOG_RATIO_BOUND = 2.0
"""Log-ratios of replies are clipped to this when an update's divergence is measured, or one rare token decides."""
_GAIN_CLIP = 0.2
"""Ratios are clipped to this distance from 1 when an update is tested."""
_LR_FACTOR = 1.3
"""By how much the step size changes after an update that moved the policy too little or too far."""
_LR_RANGE = (1e-3, 10.0)
"""Bounds of the step size, in units of the first one."""
_FIX = "lower algo.lr and algo.value_lr in the run's config.yaml, then `rlvlm resume`"
_OWN = "loss/"
"""Before the names of what a loss itself measures."""
_SUMS = (
    metrics.UPDATE_POLICY_LOSS, metrics.UPDATE_VALUE_LOSS, metrics.UPDATE_KL, metrics.UPDATE_CLIPPED,
    metrics.UPDATE_FIRST_RATIO, metrics.UPDATE_ENTROPY, "tokens", "turns", "entropy_tokens", "loss",
)  # fmt: skip
"""Figures that micro-batches and learners add up."""


class PolicyModule(TorchRLModule):
    """A `Policy` as an RLlib module: trained weights travel and are saved, a frozen base does not.

    `model_config` holds `make_policy`, and `is_sharded`: whether learners share the policy out. It then has no weights
    until they have.
    """

    policy: Any

    def setup(self) -> None:
        """Builds the policy; RLlib calls it once."""
        with skeletons(self.model_config.get("is_sharded", False)):
            self.policy = self.model_config["make_policy"]()

    def get_state(self, *args: Any, **unused: Any) -> dict[str, Any]:
        """The trained weights, as float32 arrays by name; RLlib's own way would copy a frozen base too.

        Sharded, it answers only where all learners are asked at once, as RLlib does not once they play; before that it
        has nothing.
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
        self._value_warm_up = algo.value_warm_up if self._has_critic else 0
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

    def begin(self) -> None:
        """Starts anew from the policy as it is now, which is kept: evaluations and losses compare with it."""
        self.imitator = None  # and the images of its demonstrations
        if self._algo.keeps_vision and hasattr(self.policy, "stop_training_vision"):
            self.policy.stop_training_vision()
        self._start_optimizer()
        self._keep_start(self.policy.trained_state())

    def _keep_start(self, weights: Mapping[str, Tensor]) -> None:
        """Keeps a copy of the weights that learning starts from, in main memory: they are read when they are saved.

        A loss that charges for divergence has slices change places with them in each update, so these stay on the GPU.
        """
        is_swapped = self._algo.loss.kl_weight > 0
        self.batches.start = {
            name: value.clone() if is_sharded([value]) and is_swapped
            else local(value).to("cpu", copy=True) if is_sharded([value])
            else plain(value).clone()
            for name, value in weights.items()
        }  # fmt: skip

    def _start_optimizer(self) -> None:
        algo = self._algo
        self._acting, own_values = self.policy.acting_parameters(), self.policy.value_parameters()
        self._parameters = [*self._acting, *own_values]
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
            readings.append(self._backward(batch, rows, gains if is_test else None))
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
        check_weights(self._parameters, _FIX)
        self._follow([reading[metrics.UPDATE_KL] for reading in readings], target)
        self._note(readings, batch, kept)

    def begin_imitation(
        self, shown: Any, sft: ReplySFTConfig | ChunkSFTConfig, weights: Weights | None = None,
        tree: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Gets the supervised start ready, see `Imitator`; `tree` is what another one was saved as."""

        def at_once(units: Tensor, prepared: Imitation) -> list[Tensor]:
            algo, size = self._algo, units.shape[1]
            if algo.microbatch_tokens and prepared.lengths:
                # answers of a unit are padded to its longest
                lengths = [size * max(prepared.lengths[row] for row in unit) for unit in units.tolist()]
                return [units[part] for part in pack(lengths, algo.microbatch_tokens)]
            at_once = max(1, algo.microbatch_turns // size) if algo.microbatch_turns else max(1, len(units))
            return list(units.split(at_once))

        rng = np.random.default_rng(np.random.SeedSequence(self.config.seed, spawn_key=(sft.stream,)))
        self.imitator = Imitator(self.policy, self._env, shown, sft, rng, self.log, weights=weights, at_once=at_once)
        if tree is not None:
            self.imitator.load_tree(tree)

    def held_out_loss(self, episodes: Sequence[TokenEpisode], sft: ReplySFTConfig) -> float:
        """See `sft_replies`."""
        policy: Any = self.policy
        return held_out_loss(policy, self._env, episodes, sft.batch_size)

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

    def _backward(self, batch: Batch, rows: Tensor, gains: Tensor | None = None) -> dict[str, float]:
        """Leaves the gradient of `rows`, of all learners together, in the parameters; returns what it found.

        Args:
            batch: of the update.
            rows: of this step, which go through the policy in micro-batches; each learner goes through its share.
            gains: of each env, where the policy before the step is tested on these rows: its gain is added.
        """
        algo = self._algo
        self._optimizer.zero_grad()
        sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=self.policy.device)
        own_sums: dict[str, Tensor] = {}  # what the loss itself measures on this learner's share
        is_warming_up = self.num_updates < self._value_warm_up
        # Weights are of the whole update, of which a minibatch is an estimate.
        # The mean over turns is taken anew of each minibatch; a sum over the update is split between its minibatches.
        scale = len(batch.answers) / len(rows) if algo.loss.average == "turn" else algo.minibatches or 1.0
        parts = self._micro_batches(batch, local_shard(rows))
        num_parts = self._agree(len(parts))
        for number in range(num_parts):
            # Learners that gather weights together make equally many passes: the last of some count for nothing.
            part = parts[number] if number < len(parts) else rows[:1]
            obs, answers = batch.obs.at(part.tolist()), [batch.answers[row] for row in part.tolist()]
            now = self._predict(obs, answers, int(batch.lengths[part.tolist()].max()))
            own = partial(narrow, rows=part, width=now.log_probs.shape[1])
            old_log_probs, weights, advantages = own(batch.log_probs), own(batch.weights) * scale, own(batch.advantages)
            mini = losses.MiniBatch(
                log_probs=now.log_probs,
                old_log_probs=old_log_probs,
                weights=weights,
                is_action=own(batch.is_action),
                advantages=advantages,
                action_size=batch.action_size,
                values=now.values if now.token_values is None else now.token_values,
                old_values=own(batch.values),
                returns=own(batch.returns) if self._has_critic and batch.returns is not None else None,
                entropies=now.entropies,
                reference=None if batch.reference is None else own(batch.reference),
                obs=obs,
                answers=answers,
                extras={name: own(column) for name, column in batch.extras.items()},
            )
            policy_loss, value_loss, rest, clipped, measured = losses.total_loss(algo.loss, mini)
            value_loss = value_loss * (len(part) / len(rows))  # a mean over the part, the policy's is a sum
            # a critic that knows nothing yet would have the policy learn its mistakes
            total = value_loss if is_warming_up else policy_loss + value_loss + rest
            if number >= len(parts):  # a backward pass gathers weights too
                (total * 0.0).backward()
                continue
            total.backward()
            with torch.no_grad():
                is_token = weights > 0
                log_ratio = torch.where(is_token, now.log_probs - old_log_probs, 0.0)
                if gains is not None:
                    gain = losses.surrogate_gain(log_ratio, advantages.view(len(part), -1), is_token, _GAIN_CLIP)
                    gains.index_add_(0, batch.slots[part].to(gains.device), gain)
                # KL(old || new) at each sampled token by k3: r - 1 - log r, r = new / old
                bound = math.inf if batch.chunk_elements else _LOG_RATIO_BOUND
                near = log_ratio.clamp(-bound, bound)
                entropies = log_ratio[:0] if now.entropies is None else now.entropies.detach()
                looked_at = is_token[: len(entropies)]
                found = (
                    policy_loss, value_loss, (near.exp() - 1 - near).sum(), clipped * is_token.sum(),
                    (log_ratio.exp() - 1).abs().sum(), (entropies * looked_at).sum(), is_token.sum(), len(part),
                    looked_at.sum(), total,
                )  # fmt: skip
                sums += torch.stack([torch.as_tensor(term, device=sums.device).double() for term in found])
                for name, mean in measured.items():
                    own_sums[name] = own_sums.get(name, 0.0) + mean * len(part)
        add_up_gradients(self._parameters)
        reading = dict(zip(_SUMS, all_reduce(sums).tolist(), strict=True))
        norm = clip_gradients(self._parameters, algo.max_grad_norm)  # of the sum: each learner's own would differ
        if not (math.isfinite(reading["loss"]) and math.isfinite(norm)):
            raise NumericsError(
                f"the loss ({reading['loss']}; algo.loss.policy {algo.loss.policy}) or its gradient ({norm}) is not "
                f"finite after {self.num_updates} updates",
                _FIX,
                {"advantages": batch.advantages[rows.to(batch.advantages.device)].float().cpu().numpy()},
            )
        tokens = max(reading["tokens"], 1.0)
        answers = (
            tokens / batch.chunk_elements if batch.chunk_elements else reading["turns"]
        )  # the last chunk may be cut
        return reading | {
            metrics.UPDATE_KL: reading[metrics.UPDATE_KL] / answers,
            metrics.UPDATE_CLIPPED: reading[metrics.UPDATE_CLIPPED] / tokens,
            metrics.UPDATE_FIRST_RATIO: reading[metrics.UPDATE_FIRST_RATIO] / tokens,
            metrics.UPDATE_ENTROPY: reading[metrics.UPDATE_ENTROPY] / max(reading["entropy_tokens"], 1.0),
            metrics.UPDATE_GRADIENT: norm,
            # not added up: a small minibatch leaves some learners without rows, and so without names to add up
            **{f"{_OWN}{name}": float(total) / max(1, sum(map(len, parts))) for name, total in own_sums.items()},
        }

    def _predict(self, obs: Observations, answers: Sequence[Answer], longest: int) -> Prediction:
        """The policy's present prediction of some answers, the longest of which has so many elements.

        Raises:
            UsageError: it says something of another shape.
        """
        look(self.policy, self._env, obs, self._agree)  # others may have played
        found = self.policy.log_probs(
            obs,
            answers,
            temperature=self._algo.temperature,
            detach_values=self._algo.is_value_detached,
            with_entropies=self._algo.loss.entropy_weight > 0,
            with_token_values=self.batches.has_token_values,
        )
        if list(found.log_probs.shape) != [len(answers), longest]:
            raise UsageError(
                f"the policy {type(self.policy).__name__} gave log-probs of shape {list(found.log_probs.shape)} for "
                f"{len(answers)} answers of {longest} elements at most",
                "give one for each element that it sampled, [B, N]",
            )
        return found

    def _agree(self, count: int) -> int:
        """`count`, or the largest of all learners' where they gather weights together."""
        return largest(count) if self._algo.shard else count

    def _micro_batches(self, batch: Batch, rows: Tensor) -> list[Tensor]:
        """`rows` in the parts that go through the policy at once."""
        algo = self._algo
        if not algo.microbatch_tokens:
            return [part for part in rows.split(algo.microbatch_turns or max(1, len(rows))) if len(part)]
        lengths: list[int] = []
        parts = [part.tolist() for part in rows.split(SHOWN_AT_ONCE) if len(part)]
        for number in range(self._agree(len(parts))):
            part = parts[number] if number < len(parts) else []
            # how many tokens an image makes is known once it was looked at
            look(self.policy, self._env, batch.obs.at(part or [0]), self._agree)
            lengths += self.policy.lengths(batch.obs.at(part), [batch.answers[row] for row in part]) if part else []
        return [rows[part] for part in pack(lengths, algo.microbatch_tokens)]

    @torch.no_grad()
    def _shrink(self, before: Sequence[Tensor], gains: Tensor) -> float:
        """Takes back the part of the update that may be chance; returns the share that stays.

        Args:
            before: of what acts before the update; none where updates are not shrunk.
            gains: of the envs on which the update was tested.
        """
        if not before or self.num_updates < self._value_warm_up:
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
        for name in {name for reading in readings for name in reading if name.startswith(_OWN)}:
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

    def card(self) -> tuple[str, str]:
        """The node of this learner in Ray, and its GPU there; empty on a CPU."""
        return ray.get_runtime_context().get_node_id(), card_of(self.policy.device)

    def free_card(self) -> None:
        """Gives back what it holds of its GPU without using it."""
        free_card()

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
        return {
            "trained": {name: plain(value) for name, value in own.items()},
            "adam": optimizer_tree(self._optimizer),
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
        load_optimizer_tree(self._optimizer, tree["adam"], self._parameters)
        self._keep_start(
            {name: slice_like(torch.tensor(np.array(value)), own[name]) for name, value in tree["start"].items()}
        )
        self._generator.set_state(torch.as_tensor(tree["generator"]))
        self._order.bit_generator.state = tree["order"]
        self.num_updates, self._lr_scale = tree["num_updates"], tree["lr_scale"]
        self._latest = dict(tree["latest"])


def narrow(column: Tensor, rows: Tensor, width: int) -> Tensor:
    """[B] or [B, N] the `rows` of a batch's column, which is padded to the longest answer of the rollout: of those that
    have tokens the first `width`, as many as the longest answer of these rows has.
    """
    column = column[rows.to(column.device)]
    return column[:, :width] if column.ndim == 2 else column


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
