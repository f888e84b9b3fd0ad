"""SmolVLA's network: a small VLM reads images, words and state, and an action expert denoises a chunk of actions.

Source: Shukor et al. 2025, arXiv:2506.01844 (SmolVLA); the numbers are those of LeRobot 0.6.1. The prefix is the
patches of every camera, the prompt, and one token for the state. Images and words see each other, the state sees all of
them, and none of them ever sees an action, so the body runs once a chunk and its keys and values serve every denoising
step. The expert has a layer for each of the body's. Joint layers attend to the body's keys and values and to the
actions up to their own; the other layers attend to the body's alone, through projections of their own.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, SmolVLMConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.smolvlm.modeling_smolvlm import (
    SmolVLMConnector,
    SmolVLMVisionEmbeddings,
    SmolVLMVisionTransformer,
)

from rlvlm.plugins.lerobot.checkpoint import ExpertSizes, Sizes
from rlvlm.plugins.lerobot.images import to_pixels
from rlvlm.plugins.lerobot.layers import Block, time_features
from rlvlm.plugins.lerobot.network import LeRobotNetwork, Prefix
from rlvlm.plugins.lerobot.prompts import NO_TOKEN


class SmolVLANetworkConfig(PreTrainedConfig):
    """Sizes from which the network is built.

    Args:
        vlm: SmolVLM's config of the body, as transformers writes it.
        sizes: fields of `checkpoint.Sizes`.
        expert_sizes: fields of `checkpoint.ExpertSizes`.
        cameras: for each image feature, the index of the env's camera.
        has_shifted_patches: whether patches have positions one too small, see `LeRobotConfig.faults`.
        rest: further settings of transformers.
    """

    model_type = "smolvla"
    sub_configs = {"vlm": SmolVLMConfig}  # noqa: RUF012  # pyright: ignore - as transformers declares it

    def __init__(
        self,
        vlm: Any = None,
        sizes: dict[str, Any] | None = None,
        expert_sizes: dict[str, Any] | None = None,
        cameras: list[int] | None = None,
        has_shifted_patches: bool = False,
        **rest: Any,
    ) -> None:
        self.vlm: Any = vlm if isinstance(vlm, SmolVLMConfig) else SmolVLMConfig(**(vlm or {}))
        self.sizes, self.expert_sizes = sizes or {}, expert_sizes or {}
        self.cameras = cameras or [0]
        self.has_shifted_patches = has_shifted_patches
        super().__init__(**rest)

    @property
    def body(self) -> Any:
        """Llama's config of the VLM's language model."""
        return self.vlm.text_config

    @property
    def expert(self) -> Any:
        """Llama's config of the action expert: the body's, narrower."""
        expert = copy.deepcopy(self.vlm.text_config)
        # a new config would require the width to be a multiple of the heads; these have a size of their own
        expert.hidden_size = width = int(expert.hidden_size * ExpertSizes(**self.expert_sizes).width)
        # two thirds of four times the width, up to the next multiple of 256: Llama's own rule
        expert.intermediate_size = 256 * math.ceil(4 * int(2 * width / 3) / 256)
        return expert


class SmolVLANetwork(LeRobotNetwork):
    """The network, with LeRobot's weight names."""

    config_class = SmolVLANetworkConfig
    config: SmolVLANetworkConfig

    def __init__(self, config: SmolVLANetworkConfig) -> None:
        sizes, depths = Sizes(**config.sizes), ExpertSizes(**config.expert_sizes)
        super().__init__(config, sizes)
        text, expert = config.body, config.expert
        read_width = text.num_key_value_heads * text.head_dim
        vision = SmolVLMVisionTransformer._from_config(config.vlm.vision_config)
        vision.embeddings = _Patches(vision.config, config.has_shifted_patches)
        body = {
            "vision_model": vision,
            "connector": SmolVLMConnector(config.vlm),
            "text_model": nn.ModuleDict(
                {
                    "embed_tokens": nn.Embedding(text.vocab_size, text.hidden_size),
                    "layers": nn.ModuleList(_block(text) for _ in range(depths.num_layers)),
                    "norm": LlamaRMSNorm(text.hidden_size, text.rms_norm_eps),
                }
            ),
        }
        # the output head is not used: it exists so that checkpoints are read and written whole
        head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        layers = [_block(expert, 0 if is_joint else read_width) for is_joint in depths.are_joint]
        parts = {
            "vlm": nn.ModuleDict({"model": nn.ModuleDict(body), "lm_head": head}),
            "lm_expert": nn.ModuleDict(
                {"layers": nn.ModuleList(layers), "norm": LlamaRMSNorm(expert.hidden_size, expert.rms_norm_eps)}
            ),
        }
        width = expert.hidden_size
        self.model = nn.ModuleDict(
            {
                "vlm_with_expert": nn.ModuleDict(parts),
                "state_proj": nn.Linear(sizes.state_dims, text.hidden_size),
                "action_in_proj": nn.Linear(sizes.action_dims, width),
                "action_out_proj": nn.Linear(width, sizes.action_dims),
                "action_time_mlp_in": nn.Linear(2 * width, width),
                "action_time_mlp_out": nn.Linear(width, width),
            }
        )
        for name, part in self.model.items():
            (parts["lm_expert"] if name == "vlm_with_expert" else part).float()
        # an image encoder's patches are joined in squares of scale_factor x scale_factor
        side = sizes.image_px // (config.vlm.vision_config.patch_size * config.vlm.scale_factor)
        self.num_other_tokens = len(config.cameras) * side**2 + 1
        self.post_init()

    def _prefix(self, images: Tensor, token_ids: Tensor, proprio: Tensor) -> Prefix:
        body: Any = self.model["vlm_with_expert"]["vlm"]["model"]  # pyright: ignore[reportIndexIssue]
        text = body["text_model"]
        pixels = to_pixels(images[:, self.config.cameras], self._sizes.image_px).flatten(0, 1)
        seen = body["connector"](body["vision_model"](pixels.to(body["vision_model"].dtype)).last_hidden_state)
        seen = seen.unflatten(0, (len(images), -1)).flatten(1, 2)  # [B, cameras * patches, W]
        said = text["embed_tokens"](token_ids.clamp(min=0))
        state = self.state_token(proprio).to(said.dtype)
        # Gemma's scale, inherited from pi0; the state has none
        tokens = torch.cat([seen * seen.shape[-1] ** 0.5, said * said.shape[-1] ** 0.5, state], dim=1)
        is_there = self.sees(seen.shape[1], token_ids != NO_TOKEN)
        is_there = torch.cat([is_there, is_there.new_ones(len(token_ids), 1)], dim=1)
        # only the state itself, in the last position, attends to the state
        return self.read_tokens(text, tokens, is_there, num_last=1, state=state.new_empty(len(token_ids), 0, 0))

    def velocity(self, cache: Prefix, x: Tensor, t: Tensor) -> Tensor:
        model: Any = self.model
        expert = model["vlm_with_expert"]["lm_expert"]
        action = model["action_in_proj"](x.float())
        time = time_features(t, action.shape[-1], self._sizes.min_period, self._sizes.max_period)
        time = time[:, None].expand_as(action)
        tokens = functional.silu(model["action_time_mlp_in"](torch.cat([action, time], dim=-1)))
        tokens = model["action_time_mlp_out"](tokens)
        steps = torch.arange(x.shape[1], device=x.device)[None]
        sees_prefix = cache.is_there[:, None, None].expand(-1, 1, x.shape[1], -1)
        sees_earlier = (steps[0][None] <= steps[0][:, None]).expand(len(x), 1, -1, -1)
        sees_both = torch.cat([sees_prefix, sees_earlier], dim=-1)
        # positions of actions continue after the prefix; if only the prefix is read, they begin at 0 again
        after = cache.is_there.sum(dim=1, keepdim=True) + steps
        between = len(cache.keys) // len(expert["layers"])
        for layer, key, value in zip(expert["layers"], cache.keys[::between], cache.values[::between], strict=True):
            past = (key, value)
            if layer.reads:
                tokens, _, _ = layer(tokens, steps, sees_prefix, past)
            else:
                tokens, _, _ = layer(tokens, after, sees_both, past)
        return model["action_out_proj"](expert["norm"](tokens))


def _block(config: Any, reads: int = 0) -> Block:
    norms = (LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2))
    return Block(config, tuple(norms), LlamaMLP(config), reads)  # pyright: ignore[reportArgumentType] - it is two


class _Patches(SmolVLMVisionEmbeddings):
    """Patches of an image with their positions, in integer arithmetic: transformers' fractions round to another
    position in some versions and precisions (transformers issue 41190).
    """

    def __init__(self, config: Any, is_shifted: bool) -> None:
        super().__init__(config)
        self._shift = int(is_shifted)

    def forward(self, pixel_values: Tensor, patch_attention_mask: Tensor) -> Tensor:
        patches = self.patch_embedding(pixel_values)  # [B, W, rows, columns]
        rows, columns = (
            # positions of a larger or smaller image are spread over those of the encoder
            (torch.arange(count, device=patches.device) * self.num_patches_per_side - self._shift) // count
            for count in patches.shape[-2:]
        )
        ids = rows.clamp(min=0)[:, None] * self.num_patches_per_side + columns.clamp(min=0)
        return patches.flatten(2).transpose(1, 2) + self.position_embedding(ids.flatten())
