"""The pocket judge's tokenizer: Qwen's byte-level BPE, small, with the prompts' sentences as whole tokens.

`train` builds it from the texts the judge is asked with. Any other text still works, byte by byte at worst.
"""

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

PAD = "<|endoftext|>"
START = "<|im_start|>"
STOP = "<|im_end|>"
VISION_START = "<|vision_start|>"
VISION_END = "<|vision_end|>"
IMAGE = "<|image_pad|>"
VIDEO = "<|video_pad|>"
SPECIAL = (PAD, START, STOP, VISION_START, VISION_END, IMAGE, VIDEO)

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


def build_tokenizer(texts: Sequence[str], phrases: Sequence[str], vocab_size: int = 1_024) -> Qwen2Tokenizer:
    """Returns a tokenizer for `texts` in which each of `phrases` is one token.

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
    learned = json.loads(backend.to_str())["model"]
    merges: Any = [tuple(merge) for merge in learned["merges"]]
    tokenizer: Any = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=merges,
        unk_token=PAD,
        eos_token=STOP,
        pad_token=PAD,
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(phrase, special=False, normalized=False) for phrase in phrases])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
