"""Small random chat VLMs in the layouts in which the real ones are published: files, settings and names of weights."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests import tiny_vlm

SAVE: dict[str, Callable[[Path], Path]] = {
    "qwen2_vl": lambda folder: tiny_vlm.save_tiny_vlm(folder, "qwen2_vl"),
    "qwen2_5_vl": lambda folder: tiny_vlm.save_tiny_vlm(folder, "qwen2_5_vl"),
    "qwen3_vl": lambda folder: tiny_vlm.save_tiny_vlm(folder, "qwen3_vl"),
    "llava": tiny_vlm.save_tiny_llava,
    "llava_next": tiny_vlm.save_tiny_llava_next,
    "internvl": tiny_vlm.save_tiny_internvl,
    "gemma3": tiny_vlm.save_tiny_gemma3,
    "idefics3": lambda folder: tiny_vlm.save_tiny_smolvlm(folder, "idefics3"),
    "smolvlm": lambda folder: tiny_vlm.save_tiny_smolvlm(folder, "smolvlm"),
}
"""By `model_type`."""
_FLAT = ("qwen2_vl", "qwen2_5_vl")
"""Whose config.json has the language model's settings at the top."""
_OLD_NAMES = {
    **dict.fromkeys(_FLAT, {r"^model\.language_model\.": "model.", r"^model\.visual\.": "visual."}),
    **dict.fromkeys(
        ("llava", "llava_next", "internvl", "gemma3"),
        {
            r"^model\.language_model\.": "language_model.model.",
            r"^lm_head\.": "language_model.lm_head.",
            r"^model\.(vision_tower|multi_modal_projector|image_newline)": r"\1",
        },
    ),
}
"""Names of weights before transformers 4.52; others have kept theirs."""
_TEMPLATES = {"qwen2_5_vl": "tokenizer", "smolvlm": "tokenizer", "internvl": "jinja", "idefics3": "jinja"}
"""Where the chat template lies; else in a chat_template.json."""
_IMAGE_PROCESSORS = {
    "qwen2_vl": "Qwen2VLImageProcessor", "qwen2_5_vl": "Qwen2VLImageProcessor", "qwen3_vl": "Qwen2VLImageProcessorFast",
    "llava": "CLIPImageProcessor", "llava_next": "LlavaNextImageProcessor", "internvl": "GotOcr2ImageProcessorFast",
    "gemma3": "Gemma3ImageProcessor", "idefics3": "Idefics3ImageProcessor", "smolvlm": "SmolVLMImageProcessor",
}  # fmt: skip
_PROCESSORS: dict[str, dict[str, Any]] = {
    "llava": {"processor_class": "LlavaProcessor"} | tiny_vlm.LLAVA_PROCESSOR,
    "llava_next": {"processor_class": "LlavaNextProcessor"} | tiny_vlm.LLAVA_PROCESSOR,
    "gemma3": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
    "internvl": {"processor_class": "InternVLProcessor", "image_seq_length": 4},
    "idefics3": {"processor_class": "Idefics3Processor", "image_seq_len": 4},
    "smolvlm": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
}
"""What processor_config.json holds; the Qwen-VLs have none."""
_NO_PAD = ("llava", "qwen3_vl")
"""Whose tokenizer is given no token for padding."""


def save_published(folder: Path, family: str) -> Path:
    """Writes a random model of `family` to `folder` as it lies on the hub."""
    SAVE[family](folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    _write_shards(folder, {old_name(name, family): value for name, value in weights.items()})
    config = json.loads((folder / "config.json").read_text())
    if family in _FLAT:
        text = config.pop("text_config")
        text.pop("model_type", None)
        rope = text.pop("rope_parameters")
        text |= {"rope_theta": rope["rope_theta"]}
        text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        config = text | config
    config["torch_dtype"] = config.pop("dtype", "float32")
    (folder / "config.json").write_text(json.dumps(config))
    _write_processor(folder, family)
    generation = {"do_sample": True, "temperature": 0.1, "top_p": 0.001, "repetition_penalty": 1.05}
    stops = _stops(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": stops}))
    return folder


def old_name(name: str, family: str) -> str:
    """The name of a weight before transformers 4.52."""
    for pattern, other in _OLD_NAMES.get(family, {}).items():
        name = re.sub(pattern, other, name)
    return name


def _write_shards(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    names = sorted(weights)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    parts = {files[0]: names[::2], files[1]: names[1::2]}
    for file, those in parts.items():
        save_file({name: weights[name].contiguous() for name in those}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, those in parts.items() for name in those}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_processor(folder: Path, family: str) -> None:
    file = folder / "preprocessor_config.json"
    if file.is_file():
        images = json.loads(file.read_text())
    else:  # in the newer layout
        images = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    images["image_processor_type"] = _IMAGE_PROCESSORS[family]
    if family in _FLAT:
        size = images.pop("size")
        images |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    file.write_text(json.dumps(images))
    if family in _PROCESSORS:
        (folder / "processor_config.json").write_text(json.dumps(_PROCESSORS[family]))
    template = (folder / "chat_template.jinja").read_text()
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    if _TEMPLATES.get(family) != "jinja":
        (folder / "chat_template.jinja").unlink()
    if _TEMPLATES.get(family) == "tokenizer":
        tokenizer["chat_template"] = template
    if family not in _TEMPLATES:
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    if family in _NO_PAD:
        tokenizer.pop("pad_token")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))


def _stops(folder: Path) -> list[int]:
    """The end of a text, and the end of a turn where that is another token, as in Gemma 3."""
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    added = {
        token["content"]: token["id"] for token in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    }
    names = [tokenizer["eos_token"], "<|im_end|>"]
    return list(dict.fromkeys(added[name] for name in names if name in added))
