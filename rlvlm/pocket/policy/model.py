"""The pocket policy's network: that of the pocket judge with finer eyes. `train` builds it once."""

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rlvlm.disk import replace_folder
from rlvlm.pocket.judge.model import MERGE, build_config
from rlvlm.pocket.judge.tokenizer import PAD, STOP

PICTURE_PX = 144
"""Side of the pictures inside the model: the 16-point formula of points24 stays legible."""
PATCH_PX = 24
"""6 x 6 patches, 9 visual tokens. A tile of a 6 x 6 MiniGrid is one patch."""


def build_model(tokenizer: Any) -> Qwen3VLForConditionalGeneration:
    """An untrained float32 pocket policy; torch's global seed decides its weights."""
    config = build_config(tokenizer)
    eyes: Any = config.vision_config
    eyes.patch_size = PATCH_PX
    eyes.num_position_embeddings = (PICTURE_PX // PATCH_PX) ** 2
    model = Qwen3VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=tokenizer.convert_tokens_to_ids(STOP),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    return model


def build_image_processor() -> Qwen2VLImageProcessorPil:
    """Qwen-VL's Pillow picture processor with the pocket policy's sizes."""
    pixels = PICTURE_PX * PICTURE_PX
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": pixels, "longest_edge": pixels},
        patch_size=PATCH_PX,
        merge_size=MERGE,
        temporal_patch_size=2,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes model (bfloat16), tokenizer and picture processor as a Qwen3-VL folder; it appears whole or not at all."""
    fresh = folder.with_name(folder.name + ".partial")
    shutil.rmtree(fresh, ignore_errors=True)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    build_image_processor().save_pretrained(fresh)
    for file in fresh.iterdir():
        file.chmod(0o644)  # safetensors leaves its file readable by its maker alone
    replace_folder(fresh, folder)
