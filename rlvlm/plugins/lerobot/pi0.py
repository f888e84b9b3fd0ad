"""pi0's and pi0.5's network: PaliGemma reads images and words, and a smaller Gemma denoises a chunk of actions.

Source: Black et al. 2024, arXiv:2410.24164 (pi0); Physical Intelligence 2025, arXiv:2504.16054 (pi0.5); the numbers are
those of LeRobot 0.6.1. The prefix is the patches of every camera and the prompt, which see each other and never the
state or an action, so PaliGemma runs once a chunk. The expert has a block for each of PaliGemma's, which attends to
that one's keys and values and to the whole chunk, earlier steps and later ones alike. pi0 puts a token of the state
before the actions and the time into each action; pi0.5 writes the state into the prompt, and the time sets scale, shift
and gate of every norm of the expert.
"""

import re
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GemmaConfig, PreTrainedConfig, SiglipVisionConfig, SiglipVisionModel
from transformers.models.gemma.modeling_gemma import GemmaMLP

from rlvlm.plugins.lerobot.checkpoint import Sizes
from rlvlm.plugins.lerobot.images import to_pixels
from rlvlm.plugins.lerobot.layers import Block, GemmaNorm, normed, time_features
from rlvlm.plugins.lerobot.network import LeRobotNetwork, Prefix
from rlvlm.plugins.lerobot.prompts import NO_TOKEN

GEMMA: dict[str, dict[str, Any]] = {
    "gemma_2b": {"hidden_size": 2048, "intermediate_size": 16_384},
    "gemma_300m": {"hidden_size": 1024, "intermediate_size": 4096},
}
"""Widths of the two Gemmas that LeRobot supports, by the names in config.json."""
HEADS: dict[str, Any] = {
    "num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 257_152
}  # fmt: skip
"""Sizes common to both of them."""
VISION: dict[str, Any] = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16, "patch_size": 14
}  # fmt: skip
"""Sizes of SigLIP So400m."""
_PALIGEMMA = "model.paligemma_with_expert.paligemma"


class Pi0NetworkConfig(PreTrainedConfig):
    """Sizes from which the network is built.

    Args:
        vision: SigLIP's config.
        body: Gemma's config of PaliGemma's language model.
        expert: Gemma's config of the action expert.
        sizes: fields of `checkpoint.Sizes`.
        cameras: for each image feature, the index of the env's camera.
        is_adaptive: whether the time sets the expert's norms and the state is text: pi0.5.
        border: brightness of an image's padding, where -1 is black and 1 is white.
        rest: further settings of transformers.
    """

    model_type = "pi0"
    sub_configs = {"vision": SiglipVisionConfig, "body": GemmaConfig, "expert": GemmaConfig}  # noqa: RUF012  # pyright: ignore - as transformers declares it

    def __init__(
        self,
        *,
        vision: Any = None,
        body: Any = None,
        expert: Any = None,
        sizes: dict[str, Any] | None = None,
        cameras: list[int] | None = None,
        is_adaptive: bool = False,
        border: float = -1.0,
        **rest: Any,
    ) -> None:
        made = {"vision": vision, "body": body, "expert": expert}
        for name, kind in self.sub_configs.items():
            setattr(self, name, made[name] if isinstance(made[name], kind) else kind(**(made[name] or {})))
        self.sizes = sizes or {}
        self.cameras = cameras or [0]
        self.is_adaptive, self.border = is_adaptive, border
        super().__init__(**rest)


class Pi0Network(LeRobotNetwork):
    """The network of pi0 or pi0.5, with LeRobot's weight names."""

    config_class = Pi0NetworkConfig
    config: Pi0NetworkConfig
    # two unused output heads of 790 million numbers in all
    unread = ("model.paligemma_with_expert.gemma_expert.lm_head.weight",)
    tied = MappingProxyType({f"{_PALIGEMMA}.lm_head.weight": f"{_PALIGEMMA}.model.language_model.embed_tokens.weight"})
    # otherwise transformers reports them as weights of another architecture
    _keys_to_ignore_on_load_unexpected = [re.escape(name.removeprefix("model.")) for name in (*unread, *tied)]  # noqa: RUF012 - as transformers declares it

    def __init__(self, config: Pi0NetworkConfig) -> None:
        sizes = Sizes(**config.sizes)
        super().__init__(config, sizes)
        settings: Any = config
        text, expert, vision = settings.body, settings.expert, settings.vision
        width = expert.hidden_size
        language_model = _gemma(text)
        language_model["embed_tokens"] = nn.Embedding(text.vocab_size, text.hidden_size)
        paligemma = {
            "vision_tower": nn.ModuleDict({"vision_model": SiglipVisionModel._from_config(vision)}),
            "multi_modal_projector": nn.ModuleDict({"linear": nn.Linear(vision.hidden_size, text.hidden_size)}),
            "language_model": language_model,
        }
        gemma_expert = nn.ModuleDict({"model": _gemma(expert, width if config.is_adaptive else 0)}).float()
        time = (
            {"time_mlp_in": nn.Linear(width, width), "time_mlp_out": nn.Linear(width, width)}
            if config.is_adaptive
            else {
                "state_proj": nn.Linear(sizes.state_dims, width),
                "action_time_mlp_in": nn.Linear(2 * width, width),
                "action_time_mlp_out": nn.Linear(width, width),
            }
        )
        heads = {
            "action_in_proj": nn.Linear(sizes.action_dims, width),
            "action_out_proj": nn.Linear(width, sizes.action_dims),
            **time,
        }
        both = {"paligemma": nn.ModuleDict({"model": nn.ModuleDict(paligemma)}), "gemma_expert": gemma_expert}
        self.model = nn.ModuleDict(
            {"paligemma_with_expert": nn.ModuleDict(both), **{name: head.float() for name, head in heads.items()}}
        )
        self.num_other_tokens = len(config.cameras) * (sizes.image_px // vision.patch_size) ** 2
        self.num_other_tokens += not config.is_adaptive
        self.post_init()

    def _prefix(self, images: Tensor, token_ids: Tensor, proprio: Tensor) -> Prefix:
        body: Any = self.model["paligemma_with_expert"]["paligemma"]["model"]  # pyright: ignore[reportIndexIssue]
        text, vision = body["language_model"], body["vision_tower"]["vision_model"]
        pixels = to_pixels(
            images[:, self.config.cameras], self._sizes.image_px, is_centred=True, border=self.config.border
        ).flatten(0, 1)
        seen = body["multi_modal_projector"]["linear"](vision(pixels.to(vision.dtype)).last_hidden_state)
        seen = seen.unflatten(0, (len(images), -1)).flatten(1, 2)  # [B, cameras * patches, W]
        said = text["embed_tokens"](token_ids.clamp(min=0))
        # Gemma's scale, for text only: PaliGemma divides image features by it, and pi0 was trained without either
        tokens = torch.cat([seen, said * said.shape[-1] ** 0.5], dim=1)
        is_there = self.sees(seen.shape[1], token_ids != NO_TOKEN)
        if self.config.is_adaptive:
            nothing = tokens.new_empty(len(token_ids), 0, 0, dtype=torch.float32)
            return self.read_tokens(text, tokens, is_there, num_last=0, state=nothing)
        read = self.read_tokens(text, tokens, is_there, num_last=0, state=self.state_token(proprio))
        # PaliGemma does not read the state, and a critic of what it reads alone could not tell states apart.
        # Departure: RLinf's critic reads the expert's output instead, averaged over the denoising steps
        return read._replace(features=torch.cat([read.features, self.padded_state(proprio)], dim=1))

    @property
    def num_features(self) -> int:
        """See `LeRobotNetwork`."""
        return super().num_features + (0 if self.config.is_adaptive else self._sizes.state_dims)

    def velocity(self, cache: Prefix, x: Tensor, t: Tensor) -> Tensor:
        model: Any = self.model
        expert = model["paligemma_with_expert"]["gemma_expert"]["model"]
        tokens = model["action_in_proj"](x.float())
        time = time_features(t, tokens.shape[-1], self._sizes.min_period, self._sizes.max_period)
        condition, num_first = None, cache.state.shape[1]
        if self.config.is_adaptive:
            condition = functional.silu(model["time_mlp_out"](functional.silu(model["time_mlp_in"](time))))
        else:
            both = torch.cat([tokens, time[:, None].expand_as(tokens)], dim=-1)
            actions = model["action_time_mlp_out"](functional.silu(model["action_time_mlp_in"](both)))
            tokens = torch.cat([cache.state, actions], dim=1)
        indices = torch.arange(tokens.shape[1], device=x.device)
        # actions see everything; the state sees itself and the visible part of the observation
        sees_own = (indices < num_first)[None] | (indices >= num_first)[:, None]
        sees_prefix = cache.is_there[:, None, None].expand(-1, 1, len(indices), -1)
        sees = torch.cat([sees_prefix, sees_own.expand(len(x), 1, -1, -1)], dim=-1)
        positions = cache.is_there.sum(dim=1, keepdim=True) + indices
        for block, key, value in zip(expert["layers"], cache.keys, cache.values, strict=True):
            tokens, _, _ = block(tokens, positions, sees, (key, value), condition)
        last, _ = normed(expert["norm"], tokens[:, num_first:], condition)
        return model["action_out_proj"](last)


def _gemma(config: Any, condition_width: int = 0) -> nn.ModuleDict:
    """Makes Gemma's blocks and its last norm, adaptive if a condition has a width."""

    def norm() -> GemmaNorm:
        return GemmaNorm(config.hidden_size, config.rms_norm_eps, condition_width)

    blocks = [Block(config, (norm(), norm()), GemmaMLP(config)) for _ in range(config.num_hidden_layers)]
    return nn.ModuleDict({"layers": nn.ModuleList(blocks), "norm": norm()})
