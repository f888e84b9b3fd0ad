"""OpenVLA-OFT's network: two image encoders, a projector, and Llama 2, which predicts a chunk in one forward pass.

Sources: Kim et al. 2024, arXiv:2406.09246 (OpenVLA); Kim et al. 2025, arXiv:2502.19645 (OFT: parallel decoding,
proprioception as one more token). The sequence is: start token, patches of every camera, proprioception, the prompt,
one empty position for each action token, the stop token; every token attends to every other. As in any language model,
the prediction for a position is read at the position before it.
"""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from rlvlm.plugins.openvla.vision import TOWERS, FusedVision, TowerSize
from rlvlm.policies.vla.tokens import NUM_BINS, ids_of_bins
from rlvlm.vlms.skeleton import device_of

STOP_ID = 2
"""Token id that ends a reply in Llama 2's vocabulary."""


class CheckpointConfig(PreTrainedConfig):
    """A checkpoint's `config.json`, as far as the network needs it.

    Args:
        timm_model_ids: names of the two image encoders in `vision.TOWERS`.
        image_sizes: sides of their images, twice the same.
        pad_to_multiple_of: number to a multiple of which the vocabulary is padded.
        text_config: config of the language model, as transformers writes it; defaults are Llama 2's with 7 billion.
        vision_towers: sizes of the encoders that replace those of their names, for small models.
        proprio_size: numbers of proprioception; 0: the model takes none.
        rest: further content of the file.
    """

    model_type = "openvla"
    sub_configs = {"text_config": LlamaConfig}  # noqa: RUF012  # pyright: ignore - as transformers declares it

    def __init__(
        self,
        timm_model_ids: list[str] | None = None,
        image_sizes: list[int] | None = None,
        pad_to_multiple_of: int = 64,
        text_config: Any = None,
        vision_towers: list[dict[str, Any]] | None = None,
        proprio_size: int = 0,
        **rest: Any,
    ) -> None:
        self.timm_model_ids = timm_model_ids or list(TOWERS)
        self.image_sizes = image_sizes or [224, 224]
        self.pad_to_multiple_of = pad_to_multiple_of
        # published files leave out Llama 2's defaults; 64 rows pad its vocabulary of 32,000
        if not isinstance(text_config, LlamaConfig):
            text_config = LlamaConfig(**{"vocab_size": 32_064, "pad_token_id": 32_000, **(text_config or {})})
        self.text_config = text_config
        self.vision_towers = vision_towers
        self.proprio_size = proprio_size
        super().__init__(**rest)

    @property
    def towers(self) -> tuple[TowerSize, TowerSize]:
        """Sizes of both image encoders.

        Raises:
            ValueError: there are not two, or one of them is unknown.
        """
        if self.vision_towers is not None:
            first, second = (TowerSize(**size) for size in self.vision_towers)
        else:
            unknown = [name for name in self.timm_model_ids if name not in TOWERS]
            if unknown or len(self.timm_model_ids) != 2:
                raise ValueError(f"the image encoders must be {' and '.join(TOWERS)}, got {self.timm_model_ids}")
            first, second = (TOWERS[name] for name in self.timm_model_ids)
        if self.image_sizes[0] != self.image_sizes[1]:
            raise ValueError(f"both image encoders must take images of one size, got {self.image_sizes}")
        return first, second

    @property
    def num_words(self) -> int:
        """Number of the tokenizer's tokens, the last 256 of which are the action tokens."""
        return self.text_config.vocab_size - self.pad_to_multiple_of


class OpenVLANetwork(PreTrainedModel):
    """The network, with the published checkpoints' weight names."""

    config_class = CheckpointConfig
    config: CheckpointConfig
    base_model_prefix = "model"
    _no_split_modules = ["LlamaDecoderLayer"]  # noqa: RUF012 - as transformers declares it
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: CheckpointConfig) -> None:
        super().__init__(config)
        towers = config.towers
        width = config.text_config.hidden_size
        self.vision_backbone = FusedVision(towers, config.image_sizes[0])
        self.projector = _Projector(towers[0].width + towers[1].width, width)
        self.language_model = LlamaForCausalLM(config.text_config)
        self.proprio_projector = _Proprio(config.proprio_size, width) if config.proprio_size else None
        self.post_init()

    def add_proprio(self, weights: dict[str, Tensor]) -> None:
        """Loads the proprioception projector from a checkpoint's separate file."""
        # the file is float32, whatever the dtype of the rest
        kind = self.projector.fc1.weight
        self.proprio_projector = _Proprio(weights["fc1.weight"].shape[1], self.config.text_config.hidden_size)
        self.proprio_projector.load_state_dict(weights)
        self.proprio_projector.to(device_of(self), kind.dtype)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialises missing weights with small random numbers; only tests need it."""
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
            if isinstance(bias := getattr(module, "bias", None), Tensor):
                nn.init.zeros_(bias)

    def forward(
        self,
        pixels: Tensor,
        token_ids: Tensor,
        is_token: Tensor,
        proprio: Tensor | None,
        *,
        num_tokens: int,
        has_stop: bool = True,
    ) -> Tensor:
        """Returns logits of the action tokens, one row for each position of the chunk.

        Args:
            pixels: [B, cameras, 2, 3, H, W] from `images.to_pixels`.
            token_ids: [B, W] ids of the prompt, the start token first, padded after it.
            is_token: [B, W] whether `token_ids` holds a token of the prompt.
            proprio: [B, P] normalised to [-1, 1]; None if the model takes none.
            num_tokens: L * A positions of a chunk.
            has_stop: whether the stop token follows them.

        Returns:
            [B, num_tokens, 256], in the order of bins: the first is the token that decodes to -1.
        """
        seen = self.projector(self.vision_backbone(pixels.to(self.projector.fc1.weight.dtype)))
        if self.proprio_projector is not None:
            assert proprio is not None, "the policy hands it to a network that takes it"
            seen = torch.cat([seen, self.proprio_projector(proprio.to(seen.dtype))[:, None]], dim=1)
        table: Any = self.language_model.get_input_embeddings()
        said = table(token_ids)
        # parallel decoding (OFT): these positions stay empty, so one pass gives all tokens of the chunk
        blanks = torch.zeros_like(said[:, :1]).expand(-1, num_tokens, -1)
        ends = [table(torch.full_like(token_ids[:, :1], STOP_ID))] if has_stop else []
        # in the order of training: start, patches, proprioception, prompt, chunk, stop
        sequence = torch.cat([said[:, :1], seen, said[:, 1:], blanks, *ends], dim=1)
        there = torch.ones_like(is_token[:, :1])
        num_after = num_tokens + len(ends)
        mask = torch.cat([there.expand(-1, 1 + seen.shape[1]), is_token[:, 1:], there.expand(-1, num_after)], dim=1)
        # additive, over all pairs: transformers uses a four-dimensional mask unchanged, and it is not causal
        closed = torch.zeros(mask.shape, dtype=sequence.dtype, device=sequence.device).masked_fill(
            ~mask, torch.finfo(sequence.dtype).min
        )
        hidden = self.language_model.model(
            inputs_embeds=sequence,
            attention_mask=closed[:, None, None, :].expand(-1, 1, mask.shape[1], -1),
            # padding has no position, so a short prompt has the same positions as on its own
            position_ids=mask.cumsum(dim=1) - 1,
            use_cache=False,
        ).last_hidden_state
        first = hidden.shape[1] - num_after  # of the chunk's positions; the last prompt token predicts it
        before = hidden[:, first - 1 : first - 1 + num_tokens]
        logits = cast(Tensor, self.language_model.lm_head(before))
        # bins count downwards from the last token: row 0 is the most negative action's
        return logits[..., ids_of_bins(np.arange(NUM_BINS), self.config.num_words)]


class _Projector(nn.Module):
    """Projects features of patches to tokens of the language model."""

    def __init__(self, seen: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(seen, 4 * seen)
        self.fc2 = nn.Linear(4 * seen, width)
        self.fc3 = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        return self.fc3(functional.gelu(self.fc2(functional.gelu(self.fc1(features)))))


class _Proprio(nn.Module):
    """Projects proprioception to one token of the language model."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, proprio: Tensor) -> Tensor:
        return self.fc2(functional.gelu(self.fc1(proprio)))
