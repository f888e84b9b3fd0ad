"""Base of the networks of LeRobot's flow policies: a body that encodes an observation once per chunk, a cache of its
keys and values for every denoising step, and a value head on its output.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from rlvlm.plugins.lerobot.checkpoint import Sizes
from rlvlm.plugins.lerobot.layers import normed
from rlvlm.plugins.lerobot.prompts import NO_TOKEN, Prompts
from rlvlm.vlms.skeleton import device_of

NO_CAMERA = -1
"""In place of the index of an env's camera: it is not there, and its patches are masked."""
EXPERT_PARTS = (
    *("lm_expert", "gemma_expert", "state_proj", "action_in_proj", "action_out_proj"),
    *("action_time_mlp_in", "action_time_mlp_out", "time_mlp_in", "time_mlp_out"),
)
"""Names of the parts outside the VLM, which LeRobot fine-tunes."""


class Prefix(NamedTuple):
    """The body's encoding of B observations: everything that a denoising step needs of them."""

    keys: tuple[Tensor, ...]
    """[B, heads, N, size of a head] for each layer of the body, already rotated to their positions."""
    values: tuple[Tensor, ...]
    """Values in the same form, without rotation."""
    is_there: Tensor
    """[B, N] whether a position holds a token rather than padding."""
    features: Tensor
    """[B, F] float32 mean of the last layer's output over all tokens, for the value head; behind it the state, if the
    body does not read it."""
    state: Tensor
    """[B, 1, W] float32 token of the state that the expert reads before the actions; [B, 0, W] if the body reads the
    state."""


class LeRobotNetwork(PreTrainedModel):
    """A network with LeRobot's weight names."""

    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True
    # log-probs are computed from its output, and its steps are small: bfloat16 is too coarse
    _keep_in_fp32_modules_strict = set(EXPERT_PARTS)  # noqa: RUF012 - as transformers declares it
    unread: tuple[str, ...] = ()
    """Names of unused weights in a checkpoint: they are not loaded, but written back."""
    tied: Mapping[str, str] = MappingProxyType({})
    """Names of unused weights that are written as a copy of another one, with the name of that one."""
    at_once = 32
    """Maximum observations per forward pass of the body without gradients."""
    prompts: Prompts
    """Prompts of the checkpoint; set when it is loaded."""
    num_other_tokens: int
    """Number of tokens before the actions that are not text."""
    predicts_offsets = False

    def __init__(self, config: Any, sizes: Sizes) -> None:
        super().__init__(config)
        self._sizes = sizes
        self.horizon, self.action_width = sizes.chunk_steps, sizes.action_dims
        self.value_head: nn.Module | None = None

    def _init_weights(self, module: nn.Module) -> None:
        """Leaves weights as torch initialises them; every checkpoint has its own."""

    def read(self, instructions: Sequence[str]) -> Tensor:
        """Returns [B, W] int64, the instructions in the form of `prefix`."""
        return self.prompts.read(instructions)

    def num_tokens(self, token_ids: Tensor, proprio: Tensor) -> list[int]:
        """Returns the number of tokens before the actions for each of B observations: patches, text and state.

        Args:
            token_ids: [B, W] from `read`.
            proprio: [B, P] normalised.
        """
        is_token = self.prompts.completed(token_ids, proprio) != NO_TOKEN
        return (self.num_other_tokens + is_token.sum(dim=1)).tolist()

    def prefix(self, images: Tensor, token_ids: Tensor, proprio: Tensor) -> Prefix:
        """Encodes B observations, once per chunk.

        Args:
            images: [B, cameras of the env, H, W, 3] uint8.
            token_ids: [B, W] from `read`.
            proprio: [B, P] normalised, P <= `Sizes.state_dims`.
        """
        token_ids = self.prompts.completed(token_ids, proprio)
        if torch.is_grad_enabled() or len(images) <= self.at_once:
            return self._prefix(images, token_ids, proprio)
        rows = (tensor.split(self.at_once) for tensor in (images, token_ids, proprio))
        parts = [self._prefix(*part) for part in zip(*rows, strict=True)]
        return Prefix(
            keys=tuple(torch.cat(layer) for layer in zip(*(part.keys for part in parts), strict=True)),
            values=tuple(torch.cat(layer) for layer in zip(*(part.values for part in parts), strict=True)),
            is_there=torch.cat([part.is_there for part in parts]),
            features=torch.cat([part.features for part in parts]),
            state=torch.cat([part.state for part in parts]),
        )

    def _prefix(self, images: Tensor, token_ids: Tensor, proprio: Tensor) -> Prefix:
        raise NotImplementedError("each network has its own prefix")

    def sees(self, num_patches: int, is_token: Tensor) -> Tensor:
        """Returns [B, patches + W], whether the patches of each camera and the text tokens `is_token` [B, W] are there;
        `num_patches` of all cameras.
        """
        cameras = torch.tensor([camera != NO_CAMERA for camera in self.config.cameras], device=is_token.device)
        patches = cameras.repeat_interleave(num_patches // len(cameras))
        return torch.cat([patches.expand(len(is_token), -1), is_token], dim=1)

    @property
    def num_features(self) -> int:
        """F, the numbers in `Prefix.features`."""
        return self.config.body.hidden_size

    def padded_state(self, proprio: Tensor) -> Tensor:
        """Returns [B, S] float32, normalised `proprio` [B, P] padded with 0."""
        return functional.pad(proprio.float(), (0, self._sizes.state_dims - proprio.shape[1]))

    def state_token(self, proprio: Tensor) -> Tensor:
        """Returns [B, 1, W], the token of normalised `proprio` [B, P]."""
        model: Any = self.model
        return model["state_proj"](self.padded_state(proprio))[:, None]

    def read_tokens(self, text: Any, tokens: Tensor, is_there: Tensor, num_last: int, state: Tensor) -> Prefix:
        """Encodes `tokens` by the language model `text`.

        Args:
            text: language model with `layers` and `norm`.
            tokens: [B, N, W].
            is_there: [B, N] whether a position holds a token rather than padding.
            num_last: number of tokens at the end that only these attend to; all others are visible to all.
            state: see `Prefix`.
        """
        is_early = torch.arange(tokens.shape[1], device=tokens.device) < tokens.shape[1] - num_last
        # padding is visible to none
        sees = is_there[:, None] & (is_early[None] | ~is_early[:, None])
        positions = is_there.cumsum(dim=1) - 1
        keys, values = [], []
        for layer in text["layers"]:
            tokens, key, value = layer(tokens, positions, sees[:, None])
            keys.append(key)
            values.append(value)
        last, _ = normed(text["norm"], tokens, None)
        mean = (last.float() * is_there[..., None]).sum(dim=1) / is_there.sum(dim=1, keepdim=True)
        return Prefix(keys=tuple(keys), values=tuple(values), is_there=is_there, features=mean, state=state)

    def velocity(self, cache: Prefix, x: Tensor, t: Tensor) -> Tensor:
        """Returns the velocity, noise minus action, of noisy chunks.

        Args:
            cache: encoding of B observations.
            x: [B, H, D] noisy chunks, H and D as in `Sizes`; padded dimensions are used too.
            t: [B] times in [0, 1], 1 is noise.

        Returns:
            [B, H, D] float32.
        """
        raise NotImplementedError("each network has its own expert")

    def add_values(self) -> None:
        """Adds a value head on the body's encoding, initially 0 everywhere."""
        width, device = self.num_features, device_of(self)
        last = nn.Linear(256, 1, bias=False, device=device)
        self.value_head = nn.Sequential(nn.Linear(width, 256, device=device), nn.SiLU(), last)
        nn.init.zeros_(last.weight)

    def state_values(self, cache: Prefix, detach: bool) -> Tensor:
        """Returns [B] values; `detach` stops their loss at the head."""
        assert self.value_head is not None, "asked of a network with one"
        return self.value_head(cache.features.detach() if detach else cache.features)[:, 0]
