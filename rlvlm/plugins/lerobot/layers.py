"""Parts of the networks of LeRobot's flow policies: a transformer block for body and expert, and time features.

Body and expert use the same class of block: the expert attends to the cached keys and values of the body's block of the
same depth. Llama (SmolVLA) and Gemma (pi0, pi0.5) differ in their norms and in the activation of the MLP.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROPE_BASE = 10_000.0
"""Base of the rotary positions in all of them; SmolVLA's VLM was trained with another, SmolVLA with this one."""


class GemmaNorm(nn.Module):
    """Gemma's RMSNorm; with a condition, pi0.5's adaptive one, which also gates the addition to the residual stream.

    Args:
        width: W, width of the tokens.
        eps: added to the mean square.
        condition_width: C, width of the condition; 0 without one.
    """

    def __init__(self, width: int, eps: float, condition_width: int = 0) -> None:
        super().__init__()
        self._eps = eps
        if condition_width:
            self.dense = nn.Linear(condition_width, 3 * width)
        else:
            self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, tokens: Tensor, condition: Tensor | None = None) -> tuple[Tensor, Tensor | float]:
        """Returns normalised tokens [B, N, W], and the gate [B, 1, W] of an adaptive norm, otherwise 1.

        Args:
            tokens: [B, N, W].
            condition: [B, C] condition of an adaptive norm.
        """
        normal = tokens.float() * torch.rsqrt(tokens.float().square().mean(-1, keepdim=True) + self._eps)
        if condition is None:
            return (normal * (1 + self.weight.float())).to(tokens.dtype), 1.0
        scale, shift, gate = self.dense(condition)[:, None].chunk(3, dim=-1)
        return (normal * (1 + scale) + shift).to(tokens.dtype), gate.to(tokens.dtype)


class Block(nn.Module):
    """A transformer block of the body or of the expert.

    Args:
        config: config of Llama or Gemma.
        norms: the norm before attention, and the one before the MLP.
        mlp: MLP from W to W.
        reads: width of a body token's keys, if it attends only to these; 0 if it has keys of its own.
    """

    def __init__(self, config: Any, norms: tuple[nn.Module, nn.Module], mlp: nn.Module, reads: int = 0) -> None:
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
        self.mlp = mlp
        self.input_layernorm, self.post_attention_layernorm = norms
        self._head_size = size
        self._groups = config.num_attention_heads // config.num_key_value_heads

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        sees: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
        condition: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the tokens after this block, and the keys and values that it attended to.

        Args:
            tokens: [B, N, W].
            positions: [B, N] of queries and own keys; integers, because sharded learners may cast floats to bfloat16.
            sees: [B, 1, N, S] whether a token sees a key.
            past: keys and values [B, heads, M, size of a head] of the body.
            condition: [B, C] condition of adaptive norms.
        """
        attention: Any = self.self_attn
        normal, gate = normed(self.input_layernorm, tokens, condition)
        query = _rotated(self._heads(attention["q_proj"](normal)), positions)
        if self.reads:
            assert past is not None
            # the body's keys are rotated before this projection
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
        tokens = tokens + attention["o_proj"](mixed.transpose(1, 2).flatten(2).to(tokens.dtype)) * gate
        normal, gate = normed(self.post_attention_layernorm, tokens, condition)
        return tokens + self.mlp(normal) * gate, key, value

    def _heads(self, numbers: Tensor) -> Tensor:
        """Returns [B, heads, N, size of a head] for [B, N, heads * size]."""
        return numbers.unflatten(-1, (-1, self._head_size)).transpose(1, 2)


def normed(norm: nn.Module, tokens: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | float]:
    """Returns normalised tokens, and the gate of the next layer's output; Llama's norms have none."""
    return norm(tokens, condition) if isinstance(norm, GemmaNorm) else (norm(tokens), 1.0)


def _rotated(heads: Tensor, positions: Tensor) -> Tensor:
    """Rotates `heads` [B, heads, N, D] to `positions` [B, N]: each pair of numbers D / 2 apart by an angle of its own,
    computed in float32.
    """
    left, right = heads.float().chunk(2, dim=-1)
    shares = torch.arange(left.shape[-1], dtype=torch.float32, device=heads.device) / left.shape[-1]
    angles = (positions[..., None].float() / ROPE_BASE**shares)[:, None]
    sin, cos = angles.sin(), angles.cos()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(heads.dtype)


def time_features(t: Tensor, width: int, min_period: float, max_period: float) -> Tensor:
    """Returns [B, width] float32 sines and cosines of times [B], at periods uniform in the logarithm."""
    shares = torch.linspace(0, 1, width // 2, dtype=torch.float64, device=t.device)
    turns = t.double()[:, None] / (min_period * (max_period / min_period) ** shares)
    return torch.cat([(2 * math.pi * turns).sin(), (2 * math.pi * turns).cos()], dim=-1).float()
