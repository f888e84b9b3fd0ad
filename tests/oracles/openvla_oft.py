"""OpenVLA-OFT's forward pass once more, one observation at a time, in float64 and by weight name alone.

Written from the papers and the published checkpoints' names (OpenVLA 2406.09246, OFT 2502.19645, DINOv2 with registers
2309.16588, SigLIP 2303.15343, Llama 2 2307.09288); shares no code with `rlvlm.plugins.openvla`.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = Mapping[str, Array]


def logits(
    weights: Weights,
    images: Sequence[tuple[Array, Array]],
    prompt: Sequence[int],
    proprio: Array | None,
    *,
    heads: tuple[int, int],
    language_heads: int,
    num_tokens: int,
    has_stop: bool,
    epsilon: float,
) -> Array:
    """[num_tokens, vocabulary] of one observation.

    Args:
        weights: by the checkpoint's names; `proprio_projector.*` too where there is proprioception.
        images: of each camera, [3, H, W] as DINOv2 and as SigLIP take it.
        prompt: ids, the start token first.
        proprio: [P] normalised.
        heads: of the two image encoders.
        language_heads: of the language model.
        num_tokens: places of the chunk.
        has_stop: whether the stop token follows.
        epsilon: of the language model's norms.
    """
    seen = []
    for for_dino, for_siglip in images:
        left = tower(weights, "vision_backbone.featurizer", for_dino, heads[0])
        right = tower(weights, "vision_backbone.fused_featurizer", for_siglip, heads[1])
        for row in np.concatenate([left, right], axis=1):
            hidden = gelu(linear(weights, "projector.fc1", row))
            seen.append(linear(weights, "projector.fc3", gelu(linear(weights, "projector.fc2", hidden))))
    if proprio is not None:
        seen.append(linear(weights, "proprio_projector.fc2", gelu(linear(weights, "proprio_projector.fc1", proprio))))
    table = weights["language_model.model.embed_tokens.weight"]
    tokens = [table[prompt[0]], *seen, *(table[one] for one in prompt[1:])]
    first = len(tokens)
    tokens += [np.zeros(table.shape[1])] * num_tokens
    if has_stop:
        tokens.append(table[2])
    states = llama(weights, np.stack(tokens), language_heads, epsilon)
    head = weights["language_model.lm_head.weight"]
    return np.stack([head @ states[first + place - 1] for place in range(num_tokens)])


def tower(weights: Weights, name: str, image: Array, heads: int) -> Array:
    """[patches, width] before the last block."""
    kernel, bias = weights[f"{name}.patch_embed.proj.weight"], weights[f"{name}.patch_embed.proj.bias"]
    side = kernel.shape[-1]
    rows = []
    for top in range(0, image.shape[1], side):
        for left in range(0, image.shape[2], side):
            patch = image[:, top : top + side, left : left + side]
            rows.append((kernel * patch).sum(axis=(1, 2, 3)) + bias)
    states = np.stack(rows) + weights[f"{name}.pos_embed"][0]
    extra = [weights[f"{name}.{token}"][0] for token in ("cls_token", "reg_token") if f"{name}.{token}" in weights]
    num_extra = sum(map(len, extra))
    states = np.concatenate([*extra, states])
    depth = 1 + max(int(key.split(".")[3]) for key in weights if key.startswith(f"{name}.blocks."))
    for number in range(depth - 1):
        block = f"{name}.blocks.{number}"
        normal = np.stack([layer_norm(weights, f"{block}.norm1", row) for row in states])
        packed = np.stack([linear(weights, f"{block}.attn.qkv", row) for row in normal])
        query, key, value = np.split(packed, 3, axis=1)
        mixed = attend(query, key, value, heads)
        branch = np.stack([linear(weights, f"{block}.attn.proj", row) for row in mixed])
        states = states + branch * weights.get(f"{block}.ls1.scale_factor", np.ones(1))
        branch = np.stack(
            [
                linear(
                    weights,
                    f"{block}.mlp.fc2",
                    gelu(linear(weights, f"{block}.mlp.fc1", layer_norm(weights, f"{block}.norm2", row))),
                )
                for row in states
            ]
        )
        states = states + branch * weights.get(f"{block}.ls2.scale_factor", np.ones(1))
    return states[num_extra:]


def llama(weights: Weights, states: Array, heads: int, epsilon: float) -> Array:
    """[N, width] behind the last norm; every token attends to every other."""
    depth = 1 + max(int(key.split(".")[3]) for key in weights if key.startswith("language_model.model.layers."))
    for number in range(depth):
        layer = f"language_model.model.layers.{number}"
        normal = np.stack([rms_norm(weights[f"{layer}.input_layernorm.weight"], row, epsilon) for row in states])
        query, key, value = (normal @ weights[f"{layer}.self_attn.{one}_proj.weight"].T for one in "qkv")
        mixed = attend(rotated(query, heads), rotated(key, heads), value, heads)
        states = states + mixed @ weights[f"{layer}.self_attn.o_proj.weight"].T
        normal = np.stack(
            [rms_norm(weights[f"{layer}.post_attention_layernorm.weight"], row, epsilon) for row in states]
        )
        gate = normal @ weights[f"{layer}.mlp.gate_proj.weight"].T
        up = normal @ weights[f"{layer}.mlp.up_proj.weight"].T
        states = states + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{layer}.mlp.down_proj.weight"].T
    return np.stack([rms_norm(weights["language_model.model.norm.weight"], row, epsilon) for row in states])


def attend(query: Array, key: Array, value: Array, heads: int) -> Array:
    """[N, width]: softmax attention of all rows to all rows, head by head."""
    out = np.zeros_like(query)
    size = query.shape[1] // heads
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        scores = query[:, part] @ key[:, part].T / math.sqrt(size)
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, part] = shares / shares.sum(axis=1, keepdims=True) @ value[:, part]
    return out


def rotated(rows: Array, heads: int) -> Array:
    """[N, width] with each head's halves turned by the row's position."""
    out = np.empty_like(rows)
    size = rows.shape[1] // heads
    half = size // 2
    for position, row in enumerate(rows):
        for head in range(heads):
            for pair in range(half):
                angle = position / 10_000 ** (2 * pair / size)
                left, right = row[head * size + pair], row[head * size + half + pair]
                out[position, head * size + pair] = left * math.cos(angle) - right * math.sin(angle)
                out[position, head * size + half + pair] = right * math.cos(angle) + left * math.sin(angle)
    return out


def linear(weights: Weights, name: str, row: Array) -> Array:
    """A linear layer with bias."""
    return weights[f"{name}.weight"] @ row + weights[f"{name}.bias"]


def layer_norm(weights: Weights, name: str, row: Array) -> Array:
    """Of one row, with 1e-6."""
    return (row - row.mean()) / math.sqrt(row.var() + 1e-6) * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def rms_norm(weight: Array, row: Array, epsilon: float) -> Array:
    """Of one row."""
    return row / math.sqrt((row**2).mean() + epsilon) * weight


def gelu(row: Array) -> Array:
    """The exact one, by the error function."""
    return row * np.array([0.5 * (1 + math.erf(one / math.sqrt(2))) for one in row.ravel()]).reshape(row.shape)
