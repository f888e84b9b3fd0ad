"""A small random OpenVLA-OFT checkpoint as the published ones lie in a folder: shards, index, statistics, tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from rlvlm.plugins.openvla.network import CheckpointConfig, OpenVLANetwork

WORDS = "In : What action should the robot take to ? Out push red green blue yellow block onto pad".split()
STATISTICS = {
    "action": {
        "q01": [-0.8, -0.9, -0.7, -0.1, -0.2, -0.1, 0.0],
        "q99": [0.8, 0.9, 0.7, 0.1, 0.2, 0.1, 1.0],
        "mask": [True] * 6 + [False],
    },
    "proprio": {"q01": [-1.0, -1.0, 0.0], "q99": [1.0, 1.0, 2.0]},
}
SMALL: dict[str, Any] = {
    "model_type": "openvla",
    "auto_map": {"AutoConfig": "configuration_prismatic.OpenVLAConfig"},
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "image_sizes": [28, 28],
    "vision_towers": [
        {"width": 16, "depth": 3, "heads": 2, "hidden": 24, "registers": 4, "scaled": True},
        {"width": 12, "depth": 3, "heads": 3, "hidden": 20, "pooled": True},
    ],
    "text_config": {
        "model_type": "llama",
        "vocab_size": 32_064,
        "pad_token_id": 32_000,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
}


def write_openvla(folder: Path, *, proprio_size: int = 0, seed: int = 0, **changes: Any) -> Path:
    """A checkpoint in `folder`; a proprioception projector goes into a file of its own, as in OpenVLA-OFT's."""
    torch.manual_seed(seed)
    config = CheckpointConfig.from_dict({**SMALL, **changes})
    config.proprio_size = proprio_size
    network = OpenVLANetwork(config)
    with torch.no_grad():
        for weight in network.parameters():  # what begins at zero or one would hide mistakes
            weight += 0.3 * torch.randn(weight.shape)
    if proprio_size:
        projector: Any = network.proprio_projector
        folder.mkdir(parents=True, exist_ok=True)
        weights = {f"module.{name}": value for name, value in projector.state_dict().items()}
        torch.save(weights, folder / "proprio_projector--150000_checkpoint.pt")
        network.proprio_projector = None
    network.save_pretrained(folder, max_shard_size="2MB")
    (folder / "config.json").write_text(json.dumps({**SMALL, **changes}))
    (folder / "dataset_statistics.json").write_text(json.dumps({"libero_10_no_noops": STATISTICS}))
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "\u2581": 29_871}
    vocabulary |= {word: 100 + place for place, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))  # noqa: S106 - a name, no secret
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
