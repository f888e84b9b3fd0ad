"""What all VLAs have in common: images, an instruction and proprioception in, the action tokens of a chunk out."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlvlm.core.episodes import IntArray, Observations
from rlvlm.core.errors import UsageError
from rlvlm.core.finite import check_finite
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.policies.protocol import Prediction, SeenImages
from rlvlm.policies.vla.tokens import ActionScale, draw_bins, entropy, likeliest_bins, log_probs_of
from rlvlm.policies.weights import Shardable, fill, lent, trained
from rlvlm.vlms.skeleton import device_of

_IMAGE_BYTES = 256 * 2**20
"""Of the images that a rollout looked at, kept for its update."""
_FEW = 64
"""Answers of a minibatch whose entropy is logged where it is not learned from: all cost a sixth of an update."""


class VLAPolicy(nn.Module):
    """A network that gives a distribution over bins for each dimension of each action of a chunk, all at once.

    A member has `forward(images, words, proprio)`: logits [B, L * A, 256], action after action, of images [B, cameras,
    H, W, 3] uint8, H = W = `image_px`, words [B, W] as `read` gives them, and proprio [B, P] float32, in env units.
    """

    image_px: int
    """Side of the square images it looks at."""
    predicts_offsets: bool = False
    """Whether it learns to predict the offsets from the hand to the things of the task, as a pocket VLA may."""
    scale: ActionScale | None = None
    """Of its actions, where it comes trained; None where the run's demonstrations give it one."""

    def __init__(self) -> None:
        super().__init__()
        self.value_head: nn.Module | None = None
        self.images: SeenImages[Frames] = SeenImages(_IMAGE_BYTES)

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return device_of(self)

    @property
    def has_values(self) -> bool:
        """Whether it has a value head."""
        return self.value_head is not None

    def read(self, instructions: Sequence[str]) -> Tensor:
        """`[B, W]` int64: the instructions as the network takes them, on its device."""
        raise NotImplementedError("each VLA has its own words")

    def with_values(self, images: Tensor, words: Tensor, proprio: Tensor, detach: bool) -> tuple[Tensor, Tensor]:
        """The logits, and [B] the value head's values; `detach` keeps its loss from the body."""
        raise NotImplementedError(f"{type(self).__name__} has no value head")

    def draw(self, env: Any, snapshots: FloatArray) -> Frames:
        """[N, cameras, H, W, 3] the images of `snapshots` [N, D] by every camera."""
        return env.draw_cameras(snapshots, self.image_px)

    def show(self, keys: Sequence[bytes], frames: Frames) -> None:
        """Keeps `frames` [N, cameras, H, W, 3] under `keys`."""
        for key, frame in zip(keys, frames, strict=True):
            self.images.add(key, frame)

    def forget_stale_images(self) -> None:
        """Pixels stay what they are, whatever is learned."""

    def inputs(self, obs: Observations) -> tuple[Tensor, Tensor, Tensor]:
        """Images, words and proprioception of `obs`, whose images it was shown, on its device."""
        images = torch.from_numpy(np.stack(self.images.get(obs.images))).to(self.device)
        return images, self.read(obs.texts), torch.from_numpy(obs.proprio).to(self.device)

    @torch.no_grad()
    def sample(
        self,
        obs: Observations,
        *,
        temperature: float | None,
        generator: torch.Generator | None = None,
        shared: int = 1,
        explored: NDArray[np.bool_] | None = None,
    ) -> tuple[IntArray, FloatArray, FloatArray]:
        """Bins [N, L * A] of a chunk for each of `obs`, their log-probs, and values [N].

        Args:
            obs: whose images it was shown.
            temperature: > 0, or None for the likeliest token of each distribution, whose log-prob is then 0.
            generator: of the draws, on the CPU.
            shared: see `draw_bins`.
            explored: [A] dimensions of an action that are drawn; of the others the likeliest is taken. None: all.

        Raises:
            NumericsError: the policy's numbers are not finite.
        """
        inputs, values = self.inputs(obs), torch.zeros(len(obs))
        if self.has_values:
            logits, values = self.with_values(*inputs, detach=True)
        else:
            logits = self(*inputs)
        if temperature is None:
            bins = likeliest_bins(logits)
            log_probs = torch.zeros(bins.shape)
        else:
            # the same dimensions in every step of the chunk
            mask = None if explored is None else torch.from_numpy(np.tile(explored, logits.shape[-2] // len(explored)))
            generator = generator or torch.Generator().manual_seed(0)
            bins, log_probs = draw_bins(logits, temperature, generator, shared, mask)
            # groups of a broken policy may all end alike: nothing would be learned from them, and nobody would know
            check_finite(
                "the policy, sampled", "go on from the last checkpoint: `rlvlm resume`", {"log-probs": log_probs}
            )
        return bins.cpu().numpy(), log_probs.cpu().numpy(), values.cpu().numpy()

    def lengths(self, obs: Observations, tokens: Sequence[IntArray]) -> list[int]:
        """See `TokenPolicy`."""
        return [len(one) for one in tokens]

    def log_probs(
        self,
        obs: Observations,
        tokens: Sequence[IntArray],
        *,
        temperature: float = 1.0,
        detach_values: bool = False,
        with_entropies: bool = False,
        with_token_values: bool = False,
    ) -> Prediction:
        """See `TokenPolicy`; a chunk's tokens share one value, and entropies are of a few answers unless asked for."""
        inputs, values = self.inputs(obs), None
        if self.has_values:
            logits, values = self.with_values(*inputs, detach=detach_values)
        else:
            logits = self(*inputs)
        # kept as int16 between rollout and update, to spare memory
        bins = torch.from_numpy(np.stack(tokens).astype(np.int64)).to(logits.device)
        chosen = log_probs_of(logits, bins, temperature)
        with torch.set_grad_enabled(with_entropies and torch.is_grad_enabled()):
            entropies = entropy(logits if with_entropies else logits[:_FEW], temperature)
        return Prediction(
            log_probs=chosen,
            values=values,
            entropies=entropies,
            token_values=None if values is None or not with_token_values else values[:, None].expand_as(chosen),
        )

    def values(self, obs: Observations) -> Tensor:
        """[B] the value head before any answer."""
        return self.with_values(*self.inputs(obs), detach=True)[1]

    def acting_parameters(self) -> list[nn.Parameter]:
        """What learns, but for the value head."""
        # by identity, for tensors compare by their values
        own = {id(parameter) for parameter in self.value_parameters()}
        return [one for one in self.parameters() if one.requires_grad and id(one) not in own]

    def value_parameters(self) -> list[nn.Parameter]:
        """What learns of the value head."""
        return [] if self.value_head is None else list(self.value_head.parameters())

    def trained_state(self) -> dict[str, Tensor]:
        """The weights that learn, by name: all of a pocket VLA, the adapter of a large one."""
        return trained(self)

    def load_trained_state(self, state: Mapping[str, Any]) -> None:
        """Takes over what `trained_state` of an equal policy gave, as tensors or arrays.

        Raises:
            ValueError: they belong to another policy.
        """
        fill(self.trained_state(), state)

    def with_weights(self, state: Mapping[str, Any]) -> AbstractContextManager[None]:
        """See `TokenPolicy`."""
        return lent(self.trained_state(), state)

    def shardable(self) -> Shardable:
        """See `TokenPolicy`.

        Raises:
            UsageError: it is too small for that.
        """
        raise UsageError("only a large VLA is worth sharding", "leave out --algo.shard, or name a --policy.model")
