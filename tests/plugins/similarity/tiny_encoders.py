"""CLIP, SigLIP and BLIP-2 of real classes and configs with a few thousand random weights."""

from pathlib import Path

import torch
from tiny_vlm import build_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import Blip2Config, Blip2ForImageTextRetrieval, CLIPConfig, CLIPModel, SiglipConfig, SiglipModel
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_SQUARE = {"height": 28, "width": 28}


def save_tiny_encoder(folder: Path, family: str, *, has_query_places: bool = False) -> Path:
    """Writes a random model of `family` (clip, siglip, blip2) as the hub would have it."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    tokenizer.model_max_length = 64
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", tokenizer.eos_token_id)]
    )
    if family == "siglip":
        tokenizer.model_input_names = ["input_ids"]
    torch.manual_seed(0)
    text = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 64,
        "projection_dim": 16,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": 0,
        "pad_token_id": tokenizer.pad_token_id,
        **_SIZES,
    }
    vision = {"image_size": 28, "patch_size": 14, "projection_dim": 16, **_SIZES}
    if family == "clip":
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
        processor = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=_SQUARE)
    elif family == "siglip":
        model = SiglipModel(SiglipConfig(text_config=text, vision_config=vision))
        processor = SiglipImageProcessorPil(size=_SQUARE)
    else:
        model = Blip2ForImageTextRetrieval(
            Blip2Config(
                vision_config=vision,
                image_text_hidden_size=16,
                num_query_tokens=4,
                image_token_index=tokenizer.convert_tokens_to_ids("<|image_pad|>") if has_query_places else None,
                qformer_config={
                    "vocab_size": len(tokenizer),
                    "encoder_hidden_size": 32,
                    "use_qformer_text_input": True,
                    "max_position_embeddings": 64,
                    **_SIZES,
                },
            )
        )
        processor = BlipImageProcessorPil(size=_SQUARE)
    for parameter in model.parameters():  # large enough that answers differ from image to image
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
