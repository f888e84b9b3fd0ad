"""The pocket judge's network: Qwen3-VL's architecture, scaled down to a few million parameters.

`train` builds it here once; everybody else loads the saved folder as any Qwen3-VL.
"""

from typing import Any

from transformers import GenerationConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rlvlm.pocket.judge.tokenizer import IMAGE, PAD, STOP, VIDEO, VISION_END, VISION_START

PICTURE_PX = 96
"""Side of the images inside the model; the processor shrinks larger ones to it."""
PATCH_PX = 16
MERGE = 2
"""Patches per side that become one visual token: 96 px are 6 x 6 patches and 9 tokens."""


def build_config(tokenizer: Any, picture_px: int = PICTURE_PX, patch_px: int = PATCH_PX) -> Qwen3VLConfig:
    """Returns the shapes of a pocket model for the ids of `tokenizer`, and for square images and patches."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (IMAGE, VIDEO, VISION_START, VISION_END)}
    vision = {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_heads": 4,
        "patch_size": patch_px,
        "spatial_merge_size": MERGE,
        "out_hidden_size": 128,
        "num_position_embeddings": (picture_px // patch_px) ** 2,
        "deepstack_visual_indexes": [1],
        "initializer_range": 0.05,
    }
    text = {
        "vocab_size": -(-len(tokenizer) // 8) * 8,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "initializer_range": 0.05,
        "pad_token_id": tokenizer.convert_tokens_to_ids(PAD),
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids(STOP),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_interleaved": True,
            "mrope_section": [6, 5, 5],  # time, height, width: together half of head_dim
        },
    }
    return Qwen3VLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=ids[IMAGE],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        tie_word_embeddings=False,
    )


def build_model(
    tokenizer: Any, picture_px: int = PICTURE_PX, patch_px: int = PATCH_PX
) -> Qwen3VLForConditionalGeneration:
    """Returns an untrained float32 pocket model; torch's global seed decides its weights."""
    model = Qwen3VLForConditionalGeneration(build_config(tokenizer, picture_px, patch_px))
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=tokenizer.convert_tokens_to_ids(STOP),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    return model


def build_image_processor(picture_px: int = PICTURE_PX, patch_px: int = PATCH_PX) -> Qwen2VLImageProcessorPil:
    """Returns Qwen-VL's Pillow image processor that makes every image `picture_px` wide and high."""
    pixels = picture_px * picture_px
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": pixels, "longest_edge": pixels},
        patch_size=patch_px,
        merge_size=MERGE,
        temporal_patch_size=2,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
