"""Chat VLMs of the three Qwen-VL families and two LLaVAs, real classes, a few thousand random weights."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3Processor,
    GenerationConfig,
    Idefics3Config,
    InternVLConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaNextConfig,
    LlavaNextProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    SmolVLMConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

IMAGE, VIDEO, START, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
CHAT_TEMPLATE = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{% for part in turn.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SMOLVLM_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""As the published models have it."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, as Qwen's for digits: `-1` is two tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", START, END, IMAGE, VIDEO],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tiny_vlm(folder: Path, family: str, seed: int = 0) -> Path:
    """Writes a random model of `family` to `folder` as the hub would have it, sampling defaults included."""
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(_config(family, tokenizer))
    for parameter in model.parameters():  # large enough that answers differ from image to image
        parameter.data.mul_(4.0)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_k=20,
        repetition_penalty=1.5,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    patch_px = 16 if family == "qwen3_vl" else 14
    pixels = (2 * patch_px) ** 2
    Qwen2VLImageProcessorPil(
        patch_size=patch_px, size={"shortest_edge": pixels, "longest_edge": 4 * pixels}
    ).save_pretrained(folder)
    return folder


def _config(family: str, tokenizer: PreTrainedTokenizerFast):
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rope_parameters": rope | ({"mrope_interleaved": True} if family == "qwen3_vl" else {}),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    names = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
    }
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    build, vision = {
        "qwen2_vl": (Qwen2VLConfig, {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}),
        "qwen2_5_vl": (
            Qwen2_5_VLConfig,
            {
                "depth": 2,
                "hidden_size": 64,
                "out_hidden_size": 64,
                "num_heads": 2,
                "intermediate_size": 64,
                "fullatt_block_indexes": [1],
                "window_size": 56,
            },
        ),
        "qwen3_vl": (
            Qwen3VLConfig,
            {
                "depth": 2,
                "hidden_size": 64,
                "out_hidden_size": 64,
                "num_heads": 2,
                "intermediate_size": 84,
                "patch_size": 16,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
        ),
    }[family]
    return build(text_config=text, vision_config=vision, **ids)


_LLAVA_SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAVA_PROCESSOR = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_PINPOINTS = [[28, 56], [56, 28], [56, 56]]


def save_tiny_llava(folder: Path, seed: int = 0) -> Path:
    """Writes a random LLaVA: a chat VLM that is not of the Qwen-VL line and has a processor of its own."""
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    return _save_llava(folder, seed, LlavaConfig, {"image_seq_length": 4}, LlavaProcessor, images)


def save_tiny_llava_next(folder: Path, seed: int = 0) -> Path:
    """Writes a random LLaVA-NeXT: images are cut into tiles beside an overview, so they differ in length."""
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=_PINPOINTS
    )
    sizes = {"image_seq_length": 4, "image_grid_pinpoints": _PINPOINTS}
    return _save_llava(folder, seed, LlavaNextConfig, sizes, LlavaNextProcessor, images)


def save_tiny_gemma3(folder: Path, seed: int = 0) -> Path:
    """Writes a random Gemma 3: a begin-of-image mark in the chat, which the processor turns into visual tokens."""
    marks = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = _with_marks(marks, "{{ bos_token }}", "<start_of_image>", bos_token="<bos>")
    text = _TEXT | {"head_dim": 16, "sliding_window": 64, "bos_token_id": tokenizer.bos_token_id}
    config = Gemma3Config(
        text_config=text | _ids(tokenizer),
        vision_config=_VISION | {"image_size": 56, "patch_size": 14},
        mm_tokens_per_image=4,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
    )
    images = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    return _save(folder, seed, config, Gemma3Processor(images, tokenizer, image_seq_length=4), tokenizer)


def save_tiny_internvl(folder: Path, seed: int = 0) -> Path:
    """Writes a random InternVL 3: large images are cut into crops of 4 visual tokens each."""
    marks = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    tokenizer = _with_marks(marks | {"video_token": "<video>"}, "", "<IMG_CONTEXT>")
    config = InternVLConfig(
        text_config=_TEXT | _ids(tokenizer) | {"model_type": "qwen2"},
        vision_config=_VISION | {"image_size": [56, 56], "patch_size": [14, 14]},
        image_token_id=tokenizer.context_image_token_id,
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    return _save(folder, seed, config, GotOcr2ImageProcessorPil(size={"height": 56, "width": 56}), tokenizer)


SMOLVLMS = {
    "idefics3": (Idefics3Config, Idefics3ImageProcessorPil),
    "smolvlm": (SmolVLMConfig, SmolVLMImageProcessorPil),
}
"""SmolVLM and SmolVLM2: the same network and chat format under two names."""


def save_tiny_smolvlm(folder: Path, line: str = "smolvlm", seed: int = 0) -> Path:
    """Writes a random SmolVLM: images above 28 px are cut into tiles, each named by its row and column in the text."""
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    marks = {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"}
    marks |= {"global_image_token": "<global-img>"}
    tokenizer = _with_marks(marks, "<|im_start|>", "<image>", bos_token="<|im_start|>")
    tokenizer.add_tokens(["<end_of_utterance>", *rows], special_tokens=True)
    tokenizer.eos_token, tokenizer.pad_token = "<end_of_utterance>", "<|im_end|>"
    tokenizer.chat_template = SMOLVLM_TEMPLATE
    build, images = SMOLVLMS[line]
    config = build(
        text_config=_TEXT | _ids(tokenizer) | {"model_type": "llama"},
        vision_config=_VISION | {"image_size": 28, "patch_size": 7},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    _save(folder, seed, config, images(size={"longest_edge": 56}, max_image_size={"longest_edge": 28}), tokenizer)
    name = {"idefics3": "Idefics3Processor", "smolvlm": "SmolVLMProcessor"}[line]
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": 4, "processor_class": name}))
    return folder


_TEXT = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096},
}
_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def _save(folder: Path, seed: int, config: Any, *parts: Any) -> Path:
    """Writes a random model of `config`, and its processors."""
    torch.manual_seed(seed)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    for part in parts:
        part.save_pretrained(folder)
    return folder


def _ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    return {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def _with_marks(marks: dict[str, str], begin: str, image: str, **tokens: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose template writes `image` for each image."""
    base = build_tokenizer()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=base.backend_tokenizer, eos_token=base.eos_token, pad_token=base.pad_token,
        extra_special_tokens=marks, **tokens,
    )  # fmt: skip
    tokenizer.chat_template = begin + CHAT_TEMPLATE.replace(START + IMAGE + END, image)
    return tokenizer


def _save_llava(folder: Path, seed: int, config, own: dict, processor, images) -> Path:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    template = CHAT_TEMPLATE.replace(START + IMAGE + END, "<image>")
    tokenizer.chat_template = template
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    whole = config(
        vision_config=CLIPVisionConfig(image_size=28, patch_size=14, **_LLAVA_SIZES),
        text_config=LlamaConfig(vocab_size=len(tokenizer), **_LLAVA_SIZES, **ids),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        **own,
    )
    return _save(folder, seed, whole, processor(images, tokenizer, chat_template=template, **LLAVA_PROCESSOR))
