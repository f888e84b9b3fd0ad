"""VLAs that denoise a chunk of actions: makes any network with a velocity a policy for policy gradients.

Source: Black et al. 2024, arXiv:2410.24164 (pi0); Chen et al. 2025, arXiv:2510.25889 (pi_RL). Departures: noise is only
added to elements with a log-prob, because noise in padded or unexecuted ones moves the others in later steps; densities
are kept per element, and the loss (`algo.loss.ratio`) combines them to a ratio.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlvlm.core.episodes import Answer, Observations
from rlvlm.core.finite import check_finite
from rlvlm.core.steps import FloatArray
from rlvlm.envs.env import ChunkEnv
from rlvlm.policies.protocol import READING, Imitation, Prediction, Reading
from rlvlm.policies.vla.flow.config import FlowConfig
from rlvlm.policies.vla.flow.kernels import (
    KERNELS,
    Denoiser,
    bounded_std,
    entropy,
    flow_matching_loss,
    noised,
    noisy_steps,
    training_times,
)
from rlvlm.policies.vla.flow.scale import Scale, read_scales, write_scales
from rlvlm.policies.vla.offsets import OffsetLoss
from rlvlm.policies.vla.policy import Demonstrations, SampledChunks, Sampling, VLAPolicy

Prefix = TypeVar("Prefix")
"""An encoded observation, in a network's own form."""


class VelocityNetwork(nn.Module, Generic[Prefix]):
    """Network of a flow policy; inputs are images [B, cameras, height, width, 3] uint8, token_ids [B, W] from `read`,
    and normalised proprioception [B, P].
    """

    horizon: int
    """H, the steps of the chunk that it denoises; an env may only execute the first of them."""
    action_width: int
    """D, the dimensions of its actions; an env may have fewer, which are then the first."""
    value_head: nn.Module | None
    """Head of a critic, or None. No default here: a class attribute would hide the module of that name."""
    predicts_offsets: bool = False
    """Whether it learns to predict the offsets from the hand to the things of the task, see `offsets`."""

    def read(self, instructions: Sequence[str]) -> Tensor:
        """Returns [B, W] int64, the instructions in the network's form."""
        raise NotImplementedError("each network has its own tokens")

    def prefix(self, images: Tensor, token_ids: Tensor, proprio: Tensor) -> Prefix:
        """Encodes an observation, once per chunk; every denoising step uses the result."""
        raise NotImplementedError("each network has its own body")

    def velocity(self, cache: Prefix, x: Tensor, t: Tensor) -> Tensor:
        """Returns [B, H, D], the velocity at x [B, H, D] and times t [B], after `prefix`."""
        raise NotImplementedError("each network has its own flow head")

    def noise(self, cache: Prefix, x: Tensor, t: Tensor) -> Tensor:
        """Returns [B, H, D], unbounded numbers from which the standard deviations of learned noise are computed."""
        raise NotImplementedError(f"{type(self).__name__} has no head for learned noise; use policy.flow.kernel sde")

    def state_values(self, cache: Prefix, detach: bool) -> Tensor:
        """Returns [B] values; `detach` stops the value head's loss at the head."""
        raise NotImplementedError(f"{type(self).__name__} has no value head")

    def predict_offsets(self, cache: Prefix) -> Tensor:
        """Returns [B, W], the predicted offsets."""
        raise NotImplementedError(f"{type(self).__name__} predicts no offsets")


class FlowPolicy(VLAPolicy):
    """A VLA whose answer is K' consecutive denoising steps: `states` [K' + 1, H, D] x before, between and after them,
    `first` [] index of the first, and `drawn` [A] the dimensions with noise.

    Elements of an answer are (K' steps) x (L env steps) x (A dimensions). x and log-densities are in normalised units.

    Args:
        network: network with the velocity.
        flow: settings of denoising.
        chunk_steps: L <= H, steps of a chunk that the env executes.
        action_size: A <= D, dimensions of the env's actions.
    """

    def __init__(self, network: VelocityNetwork, flow: FlowConfig, *, chunk_steps: int, action_size: int) -> None:
        super().__init__()
        for what, runs, has in (
            ("steps", chunk_steps, network.horizon), ("dimensions", action_size, network.action_width)
        ):  # fmt: skip
            if runs > has:
                raise ValueError(
                    f"the network's chunks have {has} {what} and the env runs {runs}; take a checkpoint with as many"
                )
        self.network, self.flow, self.horizon = network, flow, network.horizon
        self.own_steps = flow.steps
        """Denoising steps with which it is played from noise."""
        self.scales: dict[str, Scale] = {}
        self.relative: NDArray[np.intp] = np.arange(0)
        """Action dimensions that the network predicts relative to the same number of the proprioception before the
        chunk."""
        self._size = chunk_steps, action_size
        is_real = torch.zeros(network.horizon, network.action_width, dtype=torch.bool)
        is_real[:chunk_steps, :action_size] = True
        self.is_real: Tensor
        self.register_buffer("is_real", is_real, persistent=False)

    @property
    def has_values(self) -> bool:
        """Whether it has a value head."""
        return self.network.value_head is not None

    def value_parameters(self) -> list[nn.Parameter]:
        """Returns parameters of the value head that learn."""
        return [] if self.network.value_head is None else list(self.network.value_head.parameters())

    def read(self, instructions: Sequence[str]) -> Tensor:
        return self.network.read(instructions).to(self.device)

    def normalised(self, images: Tensor, token_ids: Tensor, proprio: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the network's inputs, with proprioception normalised by the demonstrations' scale."""
        felt = self.scales["proprio"].normalised(proprio.cpu().numpy())
        return images, token_ids, torch.from_numpy(felt).to(proprio.device)

    def origin(self, proprio: FloatArray) -> FloatArray:
        """Returns [B, 1, A] float32, the origin of the network's actions in the env's units, for `proprio` [B, P]."""
        origin = np.zeros((len(proprio), 1, self._size[1]), np.float32)
        origin[:, 0, self.relative] = proprio[:, self.relative]
        return origin

    def _prefixes(self, obs: Observations) -> tuple[object, object]:
        """Returns the network's `prefix` of `obs` as asked when it plays, and of the instructions as they are, which is
        None without guidance.
        """
        images, token_ids, proprio = self.normalised(*self.inputs(obs))
        is_guided = self.config.guidance != 1
        plain = self.network.prefix(images, self.read(obs.texts), proprio) if is_guided else None
        return self.network.prefix(images, token_ids, proprio), plain

    def denoiser(self, cache: object, plain: object, temperature: float) -> Denoiser:
        """Returns a denoiser for two `_prefixes`, whose noise is multiplied by `temperature`."""
        flow, network = self.flow, self.network
        level = flow.noise * temperature
        level = min(level, 1.0) if flow.kernel == "cps" else level  # at most all of the noise can be replaced

        def noise(x: Tensor, t: Tensor) -> Tensor:
            if flow.kernel != "learned":
                return torch.full((), level, device=x.device)
            return temperature * bounded_std(network.noise(cache, x, t).float(), flow.min_std, flow.max_std)

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            return self.guided(network.velocity(cache, x, t), lambda: network.velocity(plain, x, t))

        return Denoiser(velocity=velocity, noise=noise, kernel=KERNELS[flow.kernel], num_steps=flow.steps)

    @torch.no_grad()
    def sample(self, obs: Observations, sampling: Sampling) -> SampledChunks:
        """See `VLAPolicy`; without a temperature the ODE starts at the middle of the noise, 0, or from noise."""
        flow, num, (length, size) = self.flow, len(obs), self._size
        shape = (num, *self.is_real.shape)
        drawn = torch.zeros(size, dtype=torch.bool)
        start, generator = torch.zeros(shape), sampling.generator or torch.Generator().manual_seed(0)
        if sampling.temperature is not None:
            drawn = torch.ones_like(drawn) if sampling.explored is None else torch.from_numpy(sampling.explored)
            start = flow.start_std * torch.randn(shape, generator=generator)
        steps = noisy_steps(num, flow.steps, flow.learn, flow.num_candidates < flow.steps, generator)
        if sampling.temperature is None and sampling.from_noise:
            start = torch.randn(shape, generator=generator)
            steps = torch.zeros(num, self.own_steps, dtype=torch.bool)
        noise_shape = (num, 1, shape[2]) if sampling.noise_per == "chunk" else shape

        def draw() -> Tensor:
            return torch.randn(noise_shape, generator=generator).to(self.device)

        cache, plain = self._prefixes(obs)
        is_noisy = steps.to(self.device)[:, :, None, None] & self._has_noise(drawn.expand(num, -1))
        denoiser = replace(self.denoiser(cache, plain, sampling.temperature or 0.0), num_steps=steps.shape[1])
        chain = denoiser.sample(start.to(self.device), is_noisy, draw)
        # the trained steps are consecutive: one of them, or all from the first on
        first = torch.zeros(num, dtype=torch.long) if flow.learn == "all" else steps.int().argmax(dim=1)
        rows, learned = torch.arange(num)[:, None], first[:, None] + torch.arange(flow.num_learned)
        learned = learned.clamp(max=steps.shape[1] - 1)  # from noise there may be fewer
        states = chain.states[rows, torch.cat([learned, learned[:, -1:] + 1], dim=1)].cpu()
        log_probs, mask = (
            part[rows, learned][..., :length, :size].flatten(1).cpu() for part in (chain.log_probs, chain.is_drawn)
        )
        actions = chain.states[:, -1, :length, :size].cpu().numpy()
        values = self.network.state_values(cache, detach=True).cpu() if self.has_values else torch.zeros(num)
        # groups of a broken policy may all end equally: training would silently learn nothing
        found = {"actions": actions, "log-probs": log_probs}
        check_finite("the policy, sampled", "go on from the last checkpoint: `rlvlm resume`", found)
        return SampledChunks(
            actions=self.scales["action"].restored(actions) + self.origin(obs.proprio),
            # copied, so that no answer keeps the arrays of all alive
            answers=[
                {"states": state.numpy().copy(), "first": np.array(number), "drawn": drawn.numpy().copy()}
                for state, number in zip(states, first.tolist(), strict=True)
            ],
            log_probs=log_probs.numpy(),
            mask=mask.numpy(),
            steps=np.tile(np.arange(length).repeat(size), flow.num_learned),
            values=values.float().numpy(),
        )

    def _has_noise(self, drawn: Tensor) -> Tensor:
        """Returns [B, 1, H, D] bool, real elements of the dimensions `drawn` [B, A]."""
        every = nn.functional.pad(drawn.to(self.device), (0, self.network.action_width - drawn.shape[1]))
        return (every[:, None, :] & self.is_real)[:, None]

    def log_probs(self, obs: Observations, answers: Sequence[Answer], reading: Reading = READING) -> Prediction:
        (length, size), device = self._size, self.device
        states, first, drawn = (
            torch.from_numpy(np.stack([answer[name] for answer in answers])) for name in ("states", "first", "drawn")
        )
        cache, plain = self._prefixes(obs)
        is_noisy = self._has_noise(drawn).expand(-1, states.shape[1] - 1, -1, -1)
        denoiser = self.denoiser(cache, plain, reading.temperature)
        found, std = denoiser.evaluate(states.to(device), first.to(device), is_noisy)
        found, std = (part[..., :length, :size].flatten(1) for part in (found, std))
        with torch.set_grad_enabled(reading.with_entropies and torch.is_grad_enabled()):
            entropies = entropy(std)
        values = self.network.state_values(cache, reading.detach_values) if self.has_values else None
        return Prediction(
            log_probs=found,
            values=values,
            entropies=entropies,
            token_values=values[:, None].expand_as(found) if values is not None and reading.with_token_values else None,
        )

    def values(self, obs: Observations) -> Tensor:
        """Returns [B] values before any answer; the head sees the observation, not the noise."""
        return self.network.state_values(self.network.prefix(*self.normalised(*self.inputs(obs))), detach=True)

    def learn_statistics(self, shown: Demonstrations, env: ChunkEnv) -> None:
        actions = shown.actions.reshape(-1, shown.actions.shape[-1])
        features = {"action": actions, "proprio": shown.obs.proprio}
        self.scales = {name: Scale.measure(values, self.flow.normalisation) for name, values in features.items()}

    @property
    def statistics(self) -> str:
        """Returns the scales of its actions and its proprioception."""
        return write_scales(self.scales) if self.scales else ""

    def load_statistics(self, text: str) -> None:
        scales = read_scales(text)
        if scales.keys() != {"action", "proprio"} or len(scales["action"].mean) != self._size[1]:
            raise ValueError(
                f"statistics need action with {self._size[1]} dimensions and proprio, got "
                + ", ".join(f"{name} with {len(scale.mean)}" for name, scale in scales.items())
            )
        self.scales = scales

    def explored(self, env: ChunkEnv, min_range: float) -> NDArray[np.bool_]:
        """See `VLAPolicy`; noise in a constant dimension would only blur what is learned."""
        scale = self.scales["action"]
        used = scale.range
        # a chunk moves such a dimension a little, while demonstrations use its whole range
        used[self.relative] = self.scales["proprio"].range[self.relative]
        return (scale.spread != 0) & (used / (env.action_high - env.action_low) >= min_range)

    def imitation(
        self, shown: Demonstrations, env: ChunkEnv, sft: Any, rng: np.random.Generator, log: Callable[[str], None]
    ) -> Imitation:
        """See `VLAPolicy`: flow matching, the mean squared error of the velocity in normalised units.

        All demonstrated steps of the network's chunk are learned, run by the env or not: where they attend to each
        other, those that are run depend on the rest. Steps of a run chunk after an episode's end are learned too: they
        are what the script would do.
        """
        (_, size), network = self._size, self.network
        actions = torch.zeros(len(shown.actions), *self.is_real.shape)
        is_learned = torch.zeros_like(actions, dtype=torch.bool)
        own = shown.actions - self.origin(shown.obs.proprio)
        known = np.ones(own.shape[:2], bool) if shown.known is None else shown.known
        actions[:, : own.shape[1], :size] = torch.from_numpy(self.scales["action"].normalised(own))
        is_learned[:, : own.shape[1], :size] = torch.from_numpy(known)[..., None]
        images, token_ids, proprio = self.normalised(*self.shown_inputs(env, shown.obs, shown.images))
        offsets = None
        if network.predicts_offsets and shown.images is None:
            offsets = OffsetLoss(self, env, shown.obs, shown.begins, sft.scenes, rng, log)

        def loss(rows: Tensor, weights: Tensor | None) -> Tensor:
            cache, total = (
                network.prefix(images[rows], token_ids[rows], proprio[rows]),
                torch.zeros((), device=self.device),
            )
            target, is_there = actions[rows].to(self.device), is_learned[rows].to(self.device)
            weight = torch.ones(len(rows)) if weights is None else weights
            for _ in range(self.flow.draws):
                eps = torch.from_numpy(rng.standard_normal(target.shape, np.float32)).to(self.device)
                t = training_times(torch.from_numpy(rng.random(len(rows), np.float32))).to(self.device)
                velocity = network.velocity(cache, noised(target, eps, t), t)
                errors = flow_matching_loss(velocity, target, eps, is_there)
                total = total + (errors * weight.to(errors)).mean() / self.flow.draws
            if offsets is not None:
                total = total + offsets.loss(network.predict_offsets(cache), rows, rng)
            return total

        return Imitation(loss=loss, shown=np.arange(len(actions)))

    def predict_offsets(self, images: Tensor, token_ids: Tensor, proprio: Tensor) -> Tensor:
        """Returns [B, W], offsets from the hand to the things of the task, for inputs in the env's units."""
        return self.network.predict_offsets(self.network.prefix(*self.normalised(images, token_ids, proprio)))
