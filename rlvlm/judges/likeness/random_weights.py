"""CLIP and BLIP-2 with random weights: `--judge.model random`. A control, and a way to run them without a download.

They go through the same code as trained ones and know nothing: their stamp and the names of their runs say so. Texts
are read byte by byte, since no vocabulary comes with random weights.
"""

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import Blip2Config, Blip2ForImageTextRetrieval, CLIPConfig, CLIPModel, PreTrainedTokenizerFast
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.likeness.encoders import Encoder
from rlvlm.vlms.devices import pick_device

_PAD, _END = "<|pad|>", "<|end|>"
_SMALL = {"hidden_size": 384, "intermediate_size": 1_536, "num_attention_heads": 6}


def random_clip(config: JudgeConfig) -> Encoder:
    """A CLIP of the size of ViT-B/32, 127 million weights drawn by `config.seed`."""
    tokenizer = _byte_tokenizer()
    text = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    processor = CLIPImageProcessorPil(size={"shortest_edge": 224}, crop_size={"height": 224, "width": 224})
    return _encoder(config, CLIPModel, CLIPConfig(text_config=text), tokenizer, processor)


def random_blip2(config: JudgeConfig) -> Encoder:
    """A BLIP-2 with a matching head, 29 million weights drawn by `config.seed`; a real one has 1.2 billion.

    The layers are those of the released model, fewer and narrower, because an image would cost a CPU seconds.
    """
    tokenizer = _byte_tokenizer()
    former = {
        "vocab_size": len(tokenizer),
        "encoder_hidden_size": _SMALL["hidden_size"],
        "num_hidden_layers": 4,
        "use_qformer_text_input": True,
        **_SMALL,
    }
    settings = Blip2Config(vision_config={"num_hidden_layers": 8, **_SMALL}, qformer_config=former)
    processor = BlipImageProcessorPil(size={"height": 224, "width": 224})
    return _encoder(config, Blip2ForImageTextRetrieval, settings, tokenizer, processor)


def _encoder(
    config: JudgeConfig, model_class: Any, settings: Any, tokenizer: PreTrainedTokenizerFast, processor: Any
) -> Encoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = model_class(settings)
    return Encoder(
        model=model.to(pick_device(config.device, config.section)).eval(),
        tokenizer=tokenizer,
        image_processor=processor,
        revision=f"random weights, seed {config.seed}",
    )


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte and one at the end, where CLIP looks for the text's vector."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=_END, pad_token=_PAD)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {_END}", special_tokens=[(_END, tokenizer.eos_token_id)]
    )
    return tokenizer
