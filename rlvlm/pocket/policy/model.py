"""The pocket policy's network: that of the pocket judge with finer patches. The other pocket models have the same."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rlvlm.pocket.judge import model as judge
from rlvlm.vlms.patch_embedding import flatten_patch_embedding

PICTURE_PX = 144
"""Side of the images inside the model: the 16-point formula of points24 stays legible."""
PATCH_PX = 24
"""6 x 6 patches, 9 visual tokens. A tile of a 6 x 6 MiniGrid is one patch."""


def build_model(tokenizer: Any, eyes: Path | None = None) -> Any:
    """An untrained float32 model; torch's global seed decides its weights.

    Args:
        tokenizer: with the ids that it speaks.
        eyes: folder of a trained one, whose vision encoder is taken over.
    """
    model: Any = judge.build_model(tokenizer, PICTURE_PX, PATCH_PX)
    if eyes is not None:
        seeing: Any = AutoModelForImageTextToText.from_pretrained(eyes, dtype=torch.float32)
        model.model.visual.load_state_dict(seeing.model.visual.state_dict())
    flatten_patch_embedding(model)
    return model


def build_image_processor() -> Qwen2VLImageProcessorPil:
    """Qwen-VL's Pillow image processor with the pocket policy's sizes."""
    return judge.build_image_processor(PICTURE_PX, PATCH_PX)
