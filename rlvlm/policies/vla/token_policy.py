"""VLAs that answer in action tokens: a distribution over 256 bins for each dimension of each action, all at once.

Source: Kim et al. 2024, arXiv:2406.09246 (OpenVLA); 2025, arXiv:2502.19645 (OpenVLA-OFT: chunks, parallel decoding).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlvlm.core.episodes import Answer, Observations
from rlvlm.core.finite import check_finite
from rlvlm.envs.env import ChunkEnv
from rlvlm.policies.protocol import READING, Imitation, Prediction, Reading
from rlvlm.policies.vla.offsets import OffsetLoss
from rlvlm.policies.vla.policy import Demonstrations, SampledChunks, Sampling, VLAPolicy
from rlvlm.policies.vla.tokens import (
    NUM_BINS,
    ActionScale,
    decode,
    draw_bins,
    encode,
    entropy,
    likeliest_bins,
    log_probs_of,
)

_FEW = 64
"""Answers per minibatch whose entropy is logged if it is not part of the loss: all would cost a sixth of an update."""
_KEY = "task"
"""Name of the data set in the statistics of a policy that was trained here."""


class TokenVLA(VLAPolicy):
    """A VLA whose answer is the bin of each dimension of each action: `bins` [L * A], action after action.

    A subclass has `forward(images, token_ids, proprio)`, which returns logits [B, L * A, 256] for images [B, cameras,
    H, W, 3] uint8, H = W = `image_px`, token_ids [B, W] from `read`, and proprio [B, P] float32, in env units.
    """

    predicts_offsets: bool = False
    """Whether it learns to predict the offsets from the hand to the things of the task, see `offsets`."""
    scale: ActionScale | None = None
    """Scale of its actions; None until demonstrations, or a checkpoint, define it."""

    def with_values(self, images: Tensor, token_ids: Tensor, proprio: Tensor, detach: bool) -> tuple[Tensor, Tensor]:
        """Returns the logits, and [B] values; `detach` stops the value head's loss at the head."""
        raise NotImplementedError(f"{type(self).__name__} has no value head")

    @torch.no_grad()
    def sample(self, obs: Observations, sampling: Sampling) -> SampledChunks:
        """Samples a chunk for each of `obs`; without a temperature takes the most likely bin of each distribution."""
        assert self.scale is not None, "there is a policy that can act"
        logits, values = self._read(obs, detach=True)
        size = len(self.scale.low)
        steps = np.arange(logits.shape[-2]) // size
        mask = np.zeros(logits.shape[:-1], bool)
        if sampling.temperature is None:
            bins, log_probs = likeliest_bins(logits), torch.zeros(mask.shape)
        else:
            # the same dimensions in every step of the chunk
            every = np.ones(size, bool) if sampling.explored is None else sampling.explored
            explored = np.tile(every, len(steps) // size)
            shared = len(steps) // size if sampling.noise_per == "chunk" else 1
            generator = sampling.generator or torch.Generator().manual_seed(0)
            chosen = torch.from_numpy(explored)
            bins, log_probs = draw_bins(logits, sampling.temperature, generator, shared, chosen)
            mask[:] = explored
            # groups of a broken policy may all end equally: training would silently learn nothing
            check_finite(
                "the policy, sampled", "go on from the last checkpoint: `rlvlm resume`", {"log-probs": log_probs}
            )
        numbers = bins.cpu().numpy()
        actions = self.scale.to_env(decode(numbers).reshape(len(numbers), -1, size))
        # int16 between rollout and update, to save memory; copied, so that no answer keeps the arrays of all alive
        answers = [{"bins": row.astype(np.int16)} for row in numbers]
        return SampledChunks(
            actions=actions, answers=answers, log_probs=log_probs.cpu().numpy(), mask=mask, steps=steps,
            values=np.zeros(len(obs), np.float32) if values is None else values.cpu().numpy(),
        )  # fmt: skip

    def _read(self, obs: Observations, detach: bool) -> tuple[Tensor, Tensor | None]:
        """Returns the logits that it plays by, and values [B] if it has a head for them, see `with_values`."""
        images, token_ids, proprio = self.inputs(obs)
        values = None
        if self.has_values:
            logits, values = self.with_values(images, token_ids, proprio, detach=detach)
        else:
            logits = self(images, token_ids, proprio)
        return self.guided(logits, lambda: self(images, self.read(obs.texts), proprio)), values

    def log_probs(self, obs: Observations, answers: Sequence[Answer], reading: Reading = READING) -> Prediction:
        logits, values = self._read(obs, reading.detach_values)
        bins = torch.from_numpy(np.stack([answer["bins"] for answer in answers]).astype(np.int64)).to(logits.device)
        chosen = log_probs_of(logits, bins, reading.temperature)
        with torch.set_grad_enabled(reading.with_entropies and torch.is_grad_enabled()):
            entropies = entropy(logits if reading.with_entropies else logits[:_FEW], reading.temperature)
        return Prediction(
            log_probs=chosen,
            values=values,
            entropies=entropies,
            token_values=None if values is None or not reading.with_token_values else values[:, None].expand_as(chosen),
        )

    def values(self, obs: Observations) -> Tensor:
        """Returns [B] the value head before any answer."""
        return self.with_values(*self.inputs(obs), detach=True)[1]

    def lengths(self, obs: Observations, answers: Sequence[Answer]) -> list[int]:
        return [len(answer.get("bins", ())) for answer in answers]

    def learn_statistics(self, shown: Demonstrations, env: ChunkEnv) -> None:
        """Sets the range of bins to that of the demonstrations: no bin is spent on actions that never occur."""
        self.scale = ActionScale.of_actions(shown.actions.reshape(-1, shown.actions.shape[-1]), env.scaled_actions)

    @property
    def statistics(self) -> str:
        """Returns the scale of its actions, in the form of OpenVLA's `dataset_statistics.json`."""
        return "" if self.scale is None else self.scale.write(_KEY)

    def load_statistics(self, text: str) -> None:
        self.scale = ActionScale.read(text, _KEY)

    def explored(self, env: ChunkEnv, min_range: float) -> NDArray[np.bool_]:
        """See `VLAPolicy`; dimensions that are not scaled (grippers) always are."""
        assert self.scale is not None, "there is a policy that can act"
        return self.scale.share_used(env.action_low, env.action_high) >= min_range

    def imitation(
        self, shown: Demonstrations, env: ChunkEnv, sft: Any, rng: np.random.Generator, log: Callable[[str], None]
    ) -> Imitation:
        """See `VLAPolicy`: cross-entropy of the demonstrated bins, in nats per token.

        The steps of a chunk after an episode's end are learned too: they are what the script would do. A policy that
        predicts offsets also learns these, if the demonstrations have snapshots: at the demonstrated moments, and in
        `sft.scenes` rearranged scenes.

        Raises:
            UsageError: the env cannot rearrange its scenes.
        """
        assert self.scale is not None, "it has learned the statistics"
        scale, bins = self.scale, torch.from_numpy(encode(self.scale.from_env(shown.actions)))  # [M, L, A]
        targets = soft_targets(sft.label_width).to(self.device)
        # a bell around a bin treats its neighbours as nearly as good, which is wrong for a gripper's two positions
        is_soft = torch.tensor(scale.scaled) & (torch.tensor(scale.high) > torch.tensor(scale.low))
        images, token_ids, proprio = self.shown_inputs(env, shown.obs, shown.images)
        offsets = None
        if self.predicts_offsets and shown.images is None:
            offsets = OffsetLoss(self, env, shown.obs, shown.begins, sft.scenes, rng, log)
        elif self.predicts_offsets:
            log("the demonstrations keep images and no states: the policy does not learn to predict offsets from them")

        def loss(rows: Tensor, weights: Tensor | None) -> Tensor:
            seen = images[rows], token_ids[rows], proprio[rows]
            if offsets is None:
                logits, beside = self(*seen), 0.0
            else:
                logits, predicted = offsets.policy.forward_with_offsets(*seen)
                beside = offsets.loss(predicted, rows, rng)
            logits = logits.view(*bins[rows].shape, -1)
            return token_loss(logits, bins[rows].to(logits.device), targets, is_soft, weights) + beside

        return Imitation(loss=loss, shown=np.arange(len(bins)))


def soft_targets(width: float) -> Tensor:
    """Returns [256, 256], whose row b is the target of bin b: a bell around it, cut at the range's ends; sums to 1.

    Args:
        width: standard deviation in units of normalised actions, which span 2; 0 gives single bins.
    """
    if width == 0:
        return torch.eye(NUM_BINS)
    # softmax of a Gaussian's exponent: cut at the ends, it still sums to 1
    bins = torch.arange(NUM_BINS, dtype=torch.float32)
    width_bins = width * (NUM_BINS - 1) / 2
    return torch.softmax(-0.5 * ((bins[:, None] - bins) / width_bins) ** 2, dim=1)


def token_loss(logits: Tensor, bins: Tensor, targets: Tensor, is_soft: Tensor, weights: Tensor | None = None) -> Tensor:
    """Returns the cross-entropy, nats per token.

    Args:
        logits: [B, L, A, 256] logits.
        bins: [B, L, A] demonstrated bins.
        targets: [256, 256] target of each bin in the dimensions of `is_soft`.
        is_soft: [A]; in the other dimensions the target is the single bin.
        weights: [B] weight of each chunk; None: all 1.
    """
    # -sum_b q(b) log p(b), with q a bell around the demonstrated bin, or a single bin
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    if weights is not None:
        log_probs = log_probs * weights.to(log_probs)[:, None, None, None]
    soft = -(targets[bins[..., is_soft]] * log_probs[..., is_soft, :]).sum()
    hard = -log_probs[..., ~is_soft, :].gather(-1, bins[..., ~is_soft, None]).sum()
    return (soft + hard) / bins.numel()
