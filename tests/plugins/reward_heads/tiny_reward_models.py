"""Robometer and RynnValue with a few thousand random weights: the published config keys, weight names and tokens."""

import json
from pathlib import Path
from typing import Any

import torch
from tiny_vlm import save_tiny_vlm
from transformers import AutoTokenizer

from rlvlm.plugins.reward_heads import robometer, rynnvalue

RYNNVALUE: dict[str, Any] = {
    "model_type": "rynn_value_lang",
    "architectures": ["RynnValueLangModel"],
    "attn_implementation": "pred_slot_isolated_eager",
    "num_value_heads": 1,
    "value_token_repeat": 8,
    "relative_value_token_repeat": 8,
    "value_tokenizer_config": {"bins": 256, "min_value": 0.0, "max_value": 512.0, "support_transform": "symlog"},
    "relative_value_tokenizer_config": {
        "bins": 256, "min_value": -256.0, "max_value": 256.0, "support_transform": "symlog",
    },
    "value_head_config": {"head_type": "linear"},
    "relative_value_head_config": {"head_type": "linear"},
}  # fmt: skip


def save_tiny_robometer(folder: Path, bins: int = 10) -> Path:
    """As its authors keep it, apart from size; the tokenizer is Qwen3-VL's own, without Robometer's tokens."""
    save_tiny_vlm(folder, "qwen3_vl")
    content = json.loads((folder / "config.json").read_text())
    content["text_config"]["vocab_size"] = len(AutoTokenizer.from_pretrained(folder)) + len(robometer.TOKENS)
    _save(robometer.RobometerNetwork, folder, {**content, "architectures": ["RBM"]}, progress_bins=bins)
    return folder


def save_tiny_rynnvalue(folder: Path, **changes: Any) -> Path:
    """As its authors keep it, apart from size; the tokenizer knows the model's tokens."""
    save_tiny_vlm(folder, "qwen3_vl")
    content = json.loads((folder / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = [rynnvalue.VALUE, rynnvalue.RELATIVE]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens}, replace_extra_special_tokens=False)
    tokenizer.save_pretrained(folder)
    content["text_config"]["vocab_size"] = len(tokenizer)
    _save(rynnvalue.RynnValueNetwork, folder, {**content, **RYNNVALUE, **changes})
    return folder


def _save(network_class: Any, folder: Path, fields: dict[str, Any], progress_bins: int = 0) -> None:
    (folder / "model.safetensors").unlink()
    torch.manual_seed(0)
    if progress_bins:
        from transformers import Qwen3VLConfig

        config: Any = Qwen3VLConfig.from_dict(fields)
        config.progress_bins = progress_bins
    else:
        config = network_class.settings(folder, fields)
    network = network_class(config)
    with torch.no_grad():
        for weight in network.parameters():
            weight += 0.1 * torch.randn(weight.shape)
    network.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(fields))
