"""Activations that an update keeps: `python benchmarks/update_memory.py`, with and without gradient checkpointing.

Counts the bytes that autograd saves for the backward pass of one language model layer, at the real widths of
Qwen2.5-VL with random weights, per token; no GPU is needed, for bytes saved do not depend on the device. Storages are
counted once, and weights not at all. Run it on a machine with 8 GB of free memory.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from rlvlm.vlms.blocks import recompute_blocks

WIDTHS: dict[str, dict[str, int]] = {
    "qwen2.5-vl-3b": {
        "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_key_value_heads": 2
    },
    "qwen2.5-vl-7b": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4
    },
}  # fmt: skip
"""Sizes of a layer, from the published configs."""


@dataclass(frozen=True, kw_only=True)
class Config:
    width: Literal["all", "qwen2.5-vl-3b", "qwen2.5-vl-7b"] = "all"
    tokens: int = 64
    dtype: Literal["float32", "bfloat16"] = "float32"
    out: Path | None = None


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    report = {
        f"{width}, {'recomputed' if recompute else 'kept'}": round(
            bytes_per_token_and_layer(
                width, recompute=recompute, tokens=config.tokens, dtype=getattr(torch, config.dtype)
            )
        )
        for width in (WIDTHS if config.width == "all" else [config.width])
        for recompute in (False, True)
    }
    print(json.dumps(report, indent=2))
    if config.out:
        config.out.write_text(json.dumps(report, indent=2) + "\n")


def bytes_per_token_and_layer(
    width: str, *, recompute: bool, tokens: int = 64, dtype: torch.dtype = torch.float32
) -> float:
    """Bytes that a second layer adds to what one keeps, per token.

    Args:
        width: a name in `WIDTHS`.
        recompute: with gradient checkpointing.
        tokens: of one sequence.
        dtype: of weights and activations.
    """
    kept: list[int] = []
    for layers in (1, 2):
        model = _language_model(WIDTHS[width], layers, dtype)
        recompute_blocks(model, recompute)
        embedded = torch.randn(1, tokens, WIDTHS[width]["hidden_size"], dtype=dtype, requires_grad=True)
        kept.append(
            saved_bytes(lambda m=model, e=embedded: m(inputs_embeds=e, use_cache=False).last_hidden_state, model)
        )
    return (kept[1] - kept[0]) / tokens


def saved_bytes(compute: Callable[[], Tensor], network: nn.Module | None = None) -> int:
    """Bytes that autograd keeps of `compute` for its backward pass; a storage counts once, `network`'s weights not."""
    weights = set() if network is None else {param.untyped_storage().data_ptr() for param in network.parameters()}
    storages: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage  # held, or its address would be another's
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute()
    return sum(storage.nbytes() for place, storage in storages.items() if place not in weights)


def _language_model(width: dict[str, int], layers: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    small = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    config = Qwen2_5_VLConfig(
        text_config={
            **width, "num_hidden_layers": layers, "vocab_size": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        vision_config={**small, "out_hidden_size": width["hidden_size"]},
    )  # fmt: skip
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return Qwen2_5_VLForConditionalGeneration(config).model.language_model.eval()
    finally:
        torch.set_default_dtype(default)


if __name__ == "__main__":
    main()
