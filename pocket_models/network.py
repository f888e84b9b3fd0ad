"""Network of the pocket models: Qwen3-VL's architecture and tokenizer, scaled down to a few million parameters.

`train` builds it here once; everybody else loads the saved folder as any Qwen3-VL.
"""

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rlvlm.vlms.images import flatten_patch_embedding

PAD = "<|endoftext|>"
STOP = "<|im_end|>"
IMAGE = "<|image_pad|>"
SPECIAL = (PAD, "<|im_start|>", STOP, "<|vision_start|>", "<|vision_end|>", IMAGE, "<|video_pad|>")

PATCHES, MERGE = 6, 2
"""Patches per side of an image, and those per side that become one visual token."""
TOKENS_PER_IMAGE = (PATCHES // MERGE) ** 2

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'text' -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
"""Qwen's ChatML layout, reduced to what a judge is asked: turns of text and images."""


def build_tokenizer(texts: Iterable[str], phrases: Iterable[str], vocab_size: int = 1_024) -> Qwen2Tokenizer:
    """Qwen's byte-level BPE for `texts` in which each of `phrases` is one token. Any other text still works.

    Args:
        texts: what the BPE merges are learned from.
        phrases: fixed pieces of the prompts; a whole template then costs a dozen tokens instead of hundreds.
        vocab_size: BPE vocabulary at most, 256 of it for the bytes; special tokens and phrases come on top.
    """
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    )
    # through Qwen's own class, so that whoever loads the folder gets the tokenizer that the class's config promises
    learned = json.loads(backend.to_str())["model"]
    merges: Any = [tuple(merge) for merge in learned["merges"]]
    tokenizer: Any = Qwen2Tokenizer(vocab=learned["vocab"], merges=merges, unk_token=PAD, eos_token=STOP, pad_token=PAD)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(phrase, special=False, normalized=False) for phrase in phrases])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def split_phrases(texts: Iterable[str], slots: Iterable[str]) -> set[str]:
    """What stands between the `slots` of `texts`: the fixed pieces of prompts, each to become one token."""
    pieces = set(texts)
    for slot in slots:  # one slot after the other: what is left of a text after all of them is fixed
        pieces = {piece for text in pieces for piece in text.split(slot)}
    return pieces


def longest_first(phrases: Iterable[str]) -> list[str]:
    """In the order in which a tokenizer takes them; equally long ones by the alphabet."""
    return sorted(phrases, key=lambda phrase: (-len(phrase), phrase))


def build_model(tokenizer: Any, patch_px: int) -> Any:
    """An untrained float32 model for the ids of `tokenizer`; torch's global seed decides its weights."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    vision = {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_heads": 4,
        "patch_size": patch_px,
        "spatial_merge_size": MERGE,
        "out_hidden_size": 128,
        "num_position_embeddings": PATCHES**2,  # one for each patch: every image has the same number of them
        "deepstack_visual_indexes": [1],
        "initializer_range": 0.05,
    }
    text = {
        "vocab_size": -(-len(tokenizer) // 8) * 8,  # rounded up: matrix products like multiples of 8
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "initializer_range": 0.05,  # Qwen's 0.02 is for networks many times as wide
        "pad_token_id": ids[PAD],
        "bos_token_id": None,
        "eos_token_id": ids[STOP],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_interleaved": True,
            "mrope_section": [6, 5, 5],  # time, height, width: together half of head_dim
        },
    }
    config = Qwen3VLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=ids[IMAGE],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    model = Qwen3VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=ids[STOP], pad_token_id=ids[PAD])
    flatten_patch_embedding(model)
    return model


def build_image_processor(patch_px: int) -> Qwen2VLImageProcessorPil:
    """Qwen-VL's Pillow image processor that cuts every image into `PATCHES` x `PATCHES` patches of that size."""
    pixels = (PATCHES * patch_px) ** 2  # both limits: any image is scaled to just that
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": pixels, "longest_edge": pixels},
        patch_size=patch_px,
        merge_size=MERGE,
        temporal_patch_size=2,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
