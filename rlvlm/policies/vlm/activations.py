"""Memory that a chat VLM needs to sample and learn, counted on tensors without memory (the meta device).

The model itself runs, forwards and backwards, including adapter, gradient checkpointing and casts, and the size of
every tensor is counted. So no numbers are fitted to a family or a size. Used by `runs.start.memory_plan`.
"""

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlvlm.policies.reply_policy import draw
from rlvlm.policies.vlm.backbone import slice_tokens, table_of
from rlvlm.vlms.lora import cast_adapters

_ROWS, _TOKENS = 8, 512
"""Rows and tokens of the counted batch; large enough that constant parts are negligible."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes besides the weights while a model is used, each per token or per row."""

    update: float
    """Peak of a forward and backward pass, per token."""
    kept: float
    """Memory kept from forward to backward pass, per token; part of `update`."""
    logits: float = 0.0
    """Memory of log-probs and their gradient, per token of a reply."""
    slice_tokens: int = 0
    """Tokens whose log-probs are computed at once; 0: all."""
    cast: float = 0.0
    """Copies of an adapter for sampling (`cast_adapters`), in total."""
    prefill: float = 0.0
    """Peak while prompts are processed, per token, including `cache`."""
    cache: float = 0.0
    """Keys and values, per token."""
    drawing: float = 0.0
    """Memory for sampling one token, per reply."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors allocated while the context is open, each storage once.

    Args:
        known: existing tensors, which do not count.
    """

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}
        self.now, self.peak = 0, 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
        found = func(*args, **(kwargs or {}))
        for tensor in (found,) if isinstance(found, Tensor) else tree_leaves(found):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self._seen:
                self._seen.add(key)
                self.now += tensor.untyped_storage().nbytes()
                weakref.finalize(tensor.untyped_storage(), self._forget, key, tensor.untyped_storage().nbytes())
        self.peak = max(self.peak, self.now)
        return found

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)  # a later storage may have the same address
        self.now -= size


def activations_of(model: Any, *, recomputes: bool) -> Activations:
    """Returns the memory of `model` besides its weights.

    Args:
        model: an `AutoModelForImageTextToText` on the meta device, in the precision in which it computes, perhaps with
            an adapter. Its trained parameters get gradients.
        recomputes: whether its blocks use `recompute_blocks`; log-probs are then computed in slices.
    """
    from transformers import DynamicCache

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    language = getattr(base.model, "language_model", None) or base.model.text_model
    config, head = base.config.get_text_config(), base.get_output_embeddings()
    num_tokens, vocabulary = _ROWS * _TOKENS, head.weight.shape[0]
    size = slice_tokens(vocabulary)
    with torch.device("meta"), mock.patch.object(functional, "scaled_dot_product_attention", _flash_attention):
        for parameter in model.parameters():
            if parameter.requires_grad:  # the learner counts gradients
                parameter.grad = torch.empty_like(parameter)
        embedded = torch.empty(_ROWS, _TOKENS, config.hidden_size, dtype=head.weight.dtype)
        states = torch.empty(size, config.hidden_size, dtype=head.weight.dtype)
        banned, positions = torch.zeros(1, dtype=torch.long), torch.zeros(1, _TOKENS, dtype=torch.long)
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        known = [*model.parameters(), *model.buffers(), *grads, embedded, states, positions, banned]

        def read(inputs: Tensor, cache: Any = None) -> Tensor:
            return language(
                inputs_embeds=inputs, position_ids=positions, attention_mask=None, past_key_values=cache,
                use_cache=cache is not None,
            ).last_hidden_state  # fmt: skip

        with LiveBytes(*known) as update:
            hidden = read(embedded.requires_grad_())
            kept = update.now
            hidden.backward(torch.empty_like(hidden))
        del hidden
        with LiveBytes(*known) as logits:
            output = partial(functional.linear, weight=head.weight.detach(), bias=head.bias)
            chosen = table_of(output, banned, states.requires_grad_(), 1.0).gather(-1, banned.expand(size, 1))
            chosen.backward(torch.empty_like(chosen))
        with torch.no_grad():
            with LiveBytes(*known) as prefill, cast_adapters(model):
                cast, cache = prefill.now, DynamicCache(config=config)
                read(embedded, cache)
                in_cache = prefill.now - cast
            with LiveBytes(*known) as drawing:
                draw(table_of(head, banned, states, 1.0), torch.zeros(size, dtype=torch.float64))
    return Activations(
        update=update.peak / num_tokens,
        kept=kept / num_tokens,
        logits=logits.peak / size,
        slice_tokens=size if recomputes else 0,
        cast=cast,
        prefill=(prefill.peak - cast) / num_tokens,
        cache=in_cache / num_tokens,
        drawing=drawing.peak / size,
    )


class _FlashAttention(torch.autograd.Function):
    """Attention with the shapes of fused kernels, which every GPU has: [tokens, tokens] is never stored. The meta
    device would choose the kernel that stores it.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, sums = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG004
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _flash_attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **unused: object) -> Tensor:
    return _FlashAttention.apply(query, key, value)  # pyright: ignore[reportReturnType]
