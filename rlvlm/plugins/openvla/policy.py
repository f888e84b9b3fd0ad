"""OpenVLA-OFT as a `TokenVLA`: its images, its prompt and its actions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from rlvlm.core.episodes import Answer, Observations
from rlvlm.plugins.openvla.config import OpenVLAConfig
from rlvlm.plugins.openvla.images import to_pixels
from rlvlm.policies.vla.token_policy import TokenVLA
from rlvlm.policies.vla.tokens import ActionScale
from rlvlm.policies.weights import Shardable
from rlvlm.vlms.files import copy_settings, locate
from rlvlm.vlms.lora import merged_weights

PROJECTOR = "proprio_projector"
"""Name of the projector of proprioception in files and weights."""
PROMPT = "In: What action should the robot take to {instruction}?\nOut:"
START_ID = 1
"""Token id that begins a text in Llama 2's vocabulary."""
EMPTY_ID = 29_871
"""Id of Llama 2's empty word, with which every prompt ended in training."""
_PAD = -1
"""Padding in `token_ids` after a prompt that is shorter than others."""


class OpenVLAPolicy(TokenVLA):
    """A network with its tokenizer and scales.

    Args:
        network: an `OpenVLANetwork`; with an adapter, PEFT's wrapper around one.
        tokenizer: tokenizer of the checkpoint.
        config: settings with its inputs.
        scale: scale of its actions.
        proprio_scale: scale of its proprioception; None if the network takes none.
        encoder_px: side of its image encoders' images, pixels.
        num_tokens: L * A action tokens of a chunk.
    """

    comes_trained = True

    def __init__(
        self,
        network: Any,
        tokenizer: Tokenizer,
        config: OpenVLAConfig,
        *,
        scale: ActionScale,
        proprio_scale: ActionScale | None,
        encoder_px: int,
        num_tokens: int,
    ) -> None:
        super().__init__()
        self.network = network
        self.image_px = config.image_px
        self.scale = scale
        self._proprio_scale = proprio_scale
        self._tokenizer = tokenizer
        self._config = config
        self._encoder_px = encoder_px
        self._num_tokens = num_tokens
        self._prompts: dict[str, list[int]] = {}

    def shardable(self) -> Shardable:
        """See `Policy`: the whole network, because each pass uses all of it."""
        return Shardable(root=self.network)

    def export(self, folder: Path) -> str:
        """See `Policy`: OpenVLA-OFT's layout, with an adapter merged into the weights."""
        source, _ = locate(self.config.model, self.config.revision, "policy")
        weights = merged_weights(getattr(self.network, "get_base_model", lambda: self.network)())
        # published checkpoints have the projector of proprioception in a torch file of its own
        for file in source.glob(f"{PROJECTOR}--*_checkpoint.pt"):
            names = [name for name in weights if name.startswith(f"{PROJECTOR}.")]
            own = {f"module.{name.removeprefix(f'{PROJECTOR}.')}": weights.pop(name) for name in names}
            torch.save(own, folder / file.name)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        copy_settings(source, folder)
        return "OpenVLA-OFT's"

    def read(self, instructions: Sequence[str]) -> Tensor:
        """Returns [B, W] ids of the prompts, the start token first; shorter ones are padded after it with -1."""
        rows = [self._ids(instruction) for instruction in instructions]
        longest = max(map(len, rows), default=1)
        # after the start token: all prompts then end in one column, right before the chunk
        filled = [[row[0], *[_PAD] * (longest - len(row)), *row[1:]] for row in rows]
        return torch.tensor(filled, dtype=torch.int64, device=self.device).view(len(rows), longest)

    def lengths(self, obs: Observations, answers: Sequence[Answer]) -> list[int]:
        """See `Policy`; the longest determines the cost: prompt, patches of all cameras, proprioception and chunk."""
        side = self._encoder_px // self.network.config.towers[0].patch_px
        others = self._config.cameras * side**2 + (self._proprio_scale is not None) + self._config.has_stop
        return [len(self._ids(text)) + others + self._num_tokens for text in self.asked(obs)]

    def _ids(self, instruction: str) -> list[int]:
        if instruction not in self._prompts:
            # tokenizers of different exports add these two or leave them out
            ids = self._tokenizer.encode(PROMPT.format(instruction=instruction.lower())).ids
            start = [] if ids[:1] == [START_ID] else [START_ID]
            end = [] if ids[-1:] == [EMPTY_ID] else [EMPTY_ID]
            self._prompts[instruction] = [*start, *ids, *end]
        return self._prompts[instruction]

    def forward(self, images: Tensor, token_ids: Tensor, proprio: Tensor) -> Tensor:
        """Returns logits [B, L * A, 256] for `images` [B, C, H, W, 3], `token_ids` [B, W] and `proprio` [B, P]."""
        # an update splits its batches itself; rollouts and evaluations pass those of all their envs
        if not torch.is_grad_enabled() and len(images) > self._config.at_once:
            parts = (tensor.split(self._config.at_once) for tensor in (images, token_ids, proprio))
            return torch.cat([self(*part) for part in zip(*parts, strict=True)])
        pixels = to_pixels(images[:, : self._config.cameras], self._config.images, self._encoder_px)
        felt = None
        if self._proprio_scale is not None:
            normal = self._proprio_scale.from_env(proprio.detach().cpu().numpy().astype(np.float32))
            felt = torch.from_numpy(normal).to(proprio.device)
        is_token = token_ids != _PAD
        return self.network(
            pixels,
            token_ids.clamp(min=0),
            is_token,
            felt,
            num_tokens=self._num_tokens,
            has_stop=self._config.has_stop,
        )
