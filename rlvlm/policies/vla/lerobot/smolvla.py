"""SmolVLA's network: a small VLM reads images, words and state, and an action expert denoises a chunk of actions.

Source: Shukor et al. 2025, arXiv:2506.01844 (SmolVLA); the numbers are those of LeRobot 0.4.4. The prefix is the
patches of every camera, the prompt, and one token for the state. Images and words see each other, the state sees all of
them, and none of them ever sees an action, so the body runs once a chunk and its keys and values serve every denoising
step. The expert has a layer for each of the body's. Joint layers attend to the body's keys and values and to the
actions up to their own; the other layers attend to the body's alone, through projections of their own.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel, SmolVLMConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.smolvlm.modeling_smolvlm import (
    SmolVLMConnector,
    SmolVLMVisionEmbeddings,
    SmolVLMVisionTransformer,
)

from rlvlm.policies.vla.lerobot.checkpoint import Sizes
from rlvlm.policies.vla.lerobot.images import to_pixels
from rlvlm.policies.vla.lerobot.prompts import NO_WORD, Prompts
from rlvlm.vlms.skeleton import device_of

EXPERT_PARTS = (
    *("lm_expert", "state_proj", "action_in_proj", "action_out_proj", "action_time_mlp_in", "action_time_mlp_out"),
)
"""Names of the parts that are not the VLM's: what LeRobot fine-tunes."""
_ROPE_BASE = 10_000.0
"""Base of the rotary positions; the VLM was made with another one, and SmolVLA was trained with this."""


class NetworkConfig(PreTrainedConfig):
    """Sizes that the network is built from.

    Args:
        vlm: config of the body, as transformers writes it; SmolVLM's.
        sizes: fields of `checkpoint.Sizes`.
        cameras: of each image feature, which of the env's cameras feeds it, by index.
        has_shifted_patches: whether patches have positions one too small, see `LeRobotConfig.patches`.
        rest: further settings of transformers.
    """

    model_type = "smolvla"
    sub_configs = {"vlm": SmolVLMConfig}  # noqa: RUF012  # pyright: ignore - as transformers declares it

    def __init__(
        self,
        vlm: Any = None,
        sizes: dict[str, Any] | None = None,
        cameras: list[int] | None = None,
        has_shifted_patches: bool = False,
        **rest: Any,
    ) -> None:
        self.vlm: Any = vlm if isinstance(vlm, SmolVLMConfig) else SmolVLMConfig(**(vlm or {}))
        self.sizes = sizes or {}
        self.cameras = cameras or [0]
        self.has_shifted_patches = has_shifted_patches
        super().__init__(**rest)

    @property
    def expert(self) -> Any:
        """Llama's config of the action expert: the body's, narrower."""
        expert = copy.deepcopy(self.vlm.text_config)
        # a new config would insist on a width that the heads share evenly; these have a size of their own
        expert.hidden_size = width = int(expert.hidden_size * Sizes(**self.sizes).expert_width)
        # two thirds of four times the width, up to the next multiple of 256: Llama's own rule
        expert.intermediate_size = 256 * math.ceil(4 * int(2 * width / 3) / 256)
        return expert


class Prefix(NamedTuple):
    """The body's encoding of B observations: all that a denoising step needs of them."""

    keys: tuple[Tensor, ...]
    """[B, heads, N, size of a head] for each layer of the body, already rotated to their positions."""
    values: tuple[Tensor, ...]
    """The same for values, which have no rotation."""
    is_there: Tensor
    """[B, N] whether a place holds a token, and is no filling."""
    features: Tensor
    """[B, W] float32 mean of the last layer's output over all tokens, for the value head."""


class SmolVLANetwork(PreTrainedModel):
    """The network, with LeRobot's weight names."""

    config_class = NetworkConfig
    config: NetworkConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True
    # log-probs are made of its output, and its steps are small: bfloat16 is too coarse
    _keep_in_fp32_modules_strict = set(EXPERT_PARTS)  # noqa: RUF012 - as transformers declares it
    at_once = 32
    """Observations that go through the body at once where nothing is learned."""
    prompts: Prompts
    """The checkpoint's; loading sets them."""
    predicts_offsets = False

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__(config)
        sizes, text, expert = Sizes(**config.sizes), config.vlm.text_config, config.expert
        read_width = text.num_key_value_heads * text.head_dim
        vision = SmolVLMVisionTransformer._from_config(config.vlm.vision_config)
        vision.embeddings = _Patches(vision.config, config.has_shifted_patches)
        body = {
            "vision_model": vision,
            "connector": SmolVLMConnector(config.vlm),
            "text_model": nn.ModuleDict(
                {
                    "embed_tokens": nn.Embedding(text.vocab_size, text.hidden_size),
                    "layers": nn.ModuleList(_Layer(text) for _ in range(sizes.num_layers)),
                    "norm": LlamaRMSNorm(text.hidden_size, text.rms_norm_eps),
                }
            ),
        }
        # nothing here computes with the output head: it is there so that checkpoints are read and written whole
        head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        layers = [_Layer(expert, 0 if is_joint else read_width) for is_joint in sizes.are_joint]
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
        self._shape = sizes
        self.horizon, self.action_width = sizes.chunk_steps, sizes.action_dims
        self.value_head: nn.Module | None = None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Leaves weights as torch makes them; every checkpoint brings its own."""

    def read(self, instructions: Sequence[str]) -> Tensor:
        """[B, W] int64: the instructions as `prefix` takes them."""
        return self.prompts.read(instructions)

    def num_prefix_tokens(self, instruction: str) -> int:
        """Tokens that the body reads of an observation: patches of all cameras, words and state."""
        vlm = self.config.vlm
        side = self._shape.image_px // (vlm.vision_config.patch_size * vlm.scale_factor)
        return len(self.config.cameras) * side**2 + self.read([instruction]).shape[1] + 1

    def prefix(self, images: Tensor, words: Tensor, proprio: Tensor) -> Prefix:
        """Encodes B observations; once a chunk.

        Args:
            images: [B, cameras of the env, H, W, 3] uint8.
            words: [B, W] ids of the prompts, filled up behind them with `NO_WORD`.
            proprio: [B, P] normalised, P <= `Sizes.state_dims`.
        """
        if not torch.is_grad_enabled() and len(images) > self.at_once:
            rows = (tensor.split(self.at_once) for tensor in (images, words, proprio))
            parts = [self._prefix(*part) for part in zip(*rows, strict=True)]
            return Prefix(
                keys=tuple(torch.cat(layer) for layer in zip(*(part.keys for part in parts), strict=True)),
                values=tuple(torch.cat(layer) for layer in zip(*(part.values for part in parts), strict=True)),
                is_there=torch.cat([part.is_there for part in parts]),
                features=torch.cat([part.features for part in parts]),
            )
        return self._prefix(images, words, proprio)

    def _prefix(self, images: Tensor, words: Tensor, proprio: Tensor) -> Prefix:
        body: Any = self.model["vlm_with_expert"]["vlm"]["model"]  # pyright: ignore[reportIndexIssue]
        text = body["text_model"]
        pixels = to_pixels(images[:, self.config.cameras], self._shape.image_px).flatten(0, 1)
        seen = body["connector"](body["vision_model"](pixels.to(body["vision_model"].dtype)).last_hidden_state)
        seen = seen.unflatten(0, (len(images), -1)).flatten(1, 2)  # [B, cameras * patches, W]
        said = text["embed_tokens"](words.clamp(min=0))
        padded = functional.pad(proprio.float(), (0, self._shape.state_dims - proprio.shape[1]))
        state = self.model["state_proj"](padded)[:, None].to(said.dtype)
        # Gemma's scale, which came from pi0; the state has none
        tokens = torch.cat([seen * seen.shape[-1] ** 0.5, said * said.shape[-1] ** 0.5, state], dim=1)
        is_word = words != NO_WORD
        is_there = torch.cat([is_word.new_ones(seen.shape[:2]), is_word, is_word.new_ones(len(words), 1)], dim=1)
        indices = torch.arange(tokens.shape[1], device=tokens.device)
        # filling is seen by none; the state, in the last place, by itself alone
        sees = is_there[:, None] & ((indices[None] < indices[-1]) | (indices[:, None] == indices[-1]))
        positions = is_there.cumsum(dim=1) - 1
        keys, values = [], []
        for layer in text["layers"]:
            tokens, key, value = layer(tokens, positions, sees[:, None])
            keys.append(key)
            values.append(value)
        features = text["norm"](tokens).float() * is_there[..., None]
        mean = features.sum(dim=1) / is_there.sum(dim=1, keepdim=True)
        return Prefix(keys=tuple(keys), values=tuple(values), is_there=is_there, features=mean)

    def velocity(self, cache: Prefix, x: Tensor, t: Tensor) -> Tensor:
        """Velocity, noise less action, of noisy chunks.

        Args:
            cache: of B observations.
            x: [B, H, D] noisy chunks, H and D as in `Sizes`; what is in padded dimensions is read too.
            t: [B] times in [0, 1], 1 is noise.

        Returns:
            [B, H, D] float32.
        """
        model: Any = self.model
        expert = model["vlm_with_expert"]["lm_expert"]
        action = model["action_in_proj"](x.float())
        time = self._time(t, action.shape[-1])[:, None].expand_as(action)
        tokens = functional.silu(model["action_time_mlp_in"](torch.cat([action, time], dim=-1)))
        tokens = model["action_time_mlp_out"](tokens)
        steps = torch.arange(x.shape[1], device=x.device)[None]
        sees_prefix = cache.is_there[:, None, None].expand(-1, 1, x.shape[1], -1)
        sees_earlier = (steps[0][None] <= steps[0][:, None]).expand(len(x), 1, -1, -1)
        sees_both = torch.cat([sees_prefix, sees_earlier], dim=-1)
        # actions go on counting where the prefix ends; where only the prefix is read, they begin at 0 again
        after = cache.is_there.sum(dim=1, keepdim=True) + steps
        between = self._shape.num_layers // len(expert["layers"])
        for layer, key, value in zip(expert["layers"], cache.keys[::between], cache.values[::between], strict=True):
            past = (key, value)
            if layer.reads:
                tokens, _, _ = layer(tokens, steps, sees_prefix, past)
            else:
                tokens, _, _ = layer(tokens, after, sees_both, past)
        return model["action_out_proj"](expert["norm"](tokens))

    def add_values(self) -> None:
        """Gives it a value head, 0 everywhere at first, of what the body makes of an observation."""
        width, device = self.config.vlm.text_config.hidden_size, device_of(self)
        last = nn.Linear(256, 1, bias=False, device=device)
        self.value_head = nn.Sequential(nn.Linear(width, 256, device=device), nn.SiLU(), last)
        nn.init.zeros_(last.weight)

    def state_values(self, cache: Prefix, detach: bool) -> Tensor:
        """[B] the value head's values; `detach` keeps their loss from the body."""
        assert self.value_head is not None, "asked of a network with one"
        return self.value_head(cache.features.detach() if detach else cache.features)[:, 0]

    def _time(self, t: Tensor, width: int) -> Tensor:
        """[B, width] sines and cosines of times [B], at periods even in the logarithm."""
        low, high = self._shape.min_period, self._shape.max_period
        shares = torch.linspace(0, 1, width // 2, dtype=torch.float64, device=t.device)
        turns = t.double()[:, None] / (low * (high / low) ** shares)
        return torch.cat([(2 * math.pi * turns).sin(), (2 * math.pi * turns).cos()], dim=-1).float()


class _Patches(SmolVLMVisionEmbeddings):
    """Patches of an image with their positions, by whole numbers: transformers' fractions round to another position in
    some versions and precisions (transformers issue 41190).
    """

    def __init__(self, config: Any, is_shifted: bool) -> None:
        super().__init__(config)
        self._shift = int(is_shifted)

    def forward(self, pixel_values: Tensor, patch_attention_mask: Tensor) -> Tensor:
        patches = self.patch_embedding(pixel_values)  # [B, W, rows, columns]
        rows, columns = (
            # positions of a larger or smaller image are spread over those that the encoder has
            (torch.arange(count, device=patches.device) * self.num_patches_per_side - self._shift) // count
            for count in patches.shape[-2:]
        )
        ids = rows.clamp(min=0)[:, None] * self.num_patches_per_side + columns.clamp(min=0)
        return patches.flatten(2).transpose(1, 2) + self.position_embedding(ids.flatten())


class _Layer(nn.Module):
    """A block of the body or of the expert.

    Args:
        config: Llama's.
        reads: numbers in a token's keys of the body, where it attends to these alone; 0 where it has keys of its own.
    """

    def __init__(self, config: Any, reads: int = 0) -> None:
        super().__init__()
        self.reads = reads
        width, size, bias = config.hidden_size, config.head_dim, config.attention_bias
        own = config.num_key_value_heads * size
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(width, config.num_attention_heads * size, bias=bias),
                "k_proj": nn.Linear(reads or width, own, bias=bias),
                "v_proj": nn.Linear(reads or width, own, bias=bias),
                "o_proj": nn.Linear(config.num_attention_heads * size, width, bias=bias),
            }
        )
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(width, config.rms_norm_eps)
        self._head_size = size
        self._groups = config.num_attention_heads // config.num_key_value_heads

    def forward(
        self, tokens: Tensor, positions: Tensor, sees: Tensor, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens after this block, and the keys and values that it attended to.

        Args:
            tokens: [B, N, W].
            positions: [B, N] of queries and own keys; whole, since sharded learners may cast what is not to bfloat16.
            sees: [B, 1, N, S] whether a token sees a key.
            past: keys and values [B, heads, M, size of a head] of the body.
        """
        attention: Any = self.self_attn
        normal = self.input_layernorm(tokens)
        query = _rotated(self._heads(attention["q_proj"](normal)), positions)
        if self.reads:
            assert past is not None
            # the body's keys have been rotated already, before they are projected
            read = [part.transpose(1, 2).flatten(2).to(normal.dtype) for part in past]
            key, value = self._heads(attention["k_proj"](read[0])), self._heads(attention["v_proj"](read[1]))
        else:
            key = _rotated(self._heads(attention["k_proj"](normal)), positions)
            value = self._heads(attention["v_proj"](normal))
            if past is not None:
                key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        mixed = functional.scaled_dot_product_attention(
            query.float(),
            key.float().repeat_interleave(self._groups, dim=1),
            value.float().repeat_interleave(self._groups, dim=1),
            attn_mask=sees,
        )
        tokens = tokens + attention["o_proj"](mixed.transpose(1, 2).flatten(2).to(tokens.dtype))
        return tokens + self.mlp(self.post_attention_layernorm(tokens)), key, value

    def _heads(self, numbers: Tensor) -> Tensor:
        """[B, heads, N, size of a head] of [B, N, heads * size]."""
        return numbers.unflatten(-1, (-1, self._head_size)).transpose(1, 2)


def _rotated(heads: Tensor, positions: Tensor) -> Tensor:
    """`heads` [B, heads, N, D] turned to `positions` [B, N]: every two numbers that lie D / 2 apart by an angle of
    their own, computed in float32.
    """
    left, right = heads.float().chunk(2, dim=-1)
    shares = torch.arange(left.shape[-1], dtype=torch.float32, device=heads.device) / left.shape[-1]
    angles = (positions[..., None].float() / _ROPE_BASE**shares)[:, None]
    sin, cos = angles.sin(), angles.cos()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(heads.dtype)
