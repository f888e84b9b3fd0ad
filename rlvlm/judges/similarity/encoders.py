"""Bringing an image-text model into memory: its parts, on a device, in a precision. Used by `clip` and `blip2`.

`--judge.model random` draws the weights: a control, and a way to run them without a download. They go through the same
code as trained ones and know nothing: their stamp and the names of their runs say so. Texts are read byte by byte,
since no vocabulary comes with random weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    Blip2Config,
    Blip2ForImageTextRetrieval,
    CLIPConfig,
    CLIPModel,
    PreTrainedTokenizerFast,
)
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from rlvlm.core.errors import ModelUnavailable, UnsupportedQuestion, first_line
from rlvlm.judges.config import JudgeConfig
from rlvlm.vlms.devices import dtype_name, pick_device, place
from rlvlm.vlms.files import locate
from rlvlm.vlms.loading import load_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """A model ready to look and read."""

    model: Any
    """In eval mode, on its device."""
    tokenizer: Any
    image_processor: Any
    """Works on Pillow where torchvision is missing."""
    revision: str
    """Hub commit, or a digest of a local folder."""

    @property
    def dtype(self) -> str:
        """Precision of the weights, e.g. `float32`."""
        return dtype_name(self.model.dtype)

    def see(self, images: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The model's inputs for images [H, W, 3]."""
        return place(self.image_processor(images=list(images), return_tensors="pt"), self.model)

    def read(self, texts: Sequence[str], **settings: Any) -> dict[str, torch.Tensor]:
        """The model's inputs for texts; longer texts are cut to the model's length."""
        longest = min(self.tokenizer.model_max_length, self.model.config.get_text_config().max_position_embeddings)
        settings = {"padding": True, "max_length": longest, **settings}
        inputs = self.tokenizer(list(texts), truncation=True, return_tensors="pt", **settings)
        return place(inputs, self.model)


def load_encoder(config: JudgeConfig, model_class: Any, parts: Sequence[str], kind: str) -> Encoder:
    """The model that `config.model` names.

    Args:
        config: names model, revision, device and precision.
        model_class: of transformers, with `from_pretrained`.
        parts: attributes that a loaded model of the kind that is wanted has.
        kind: what that is called in messages, with an example.

    Raises:
        ModelUnavailable: the files are missing, are no such model or no safetensors, or do not fit.
        UnsupportedQuestion: 4-bit weights are wanted.
    """
    if config.quantization != "none":
        raise UnsupportedQuestion(
            f"backend {config.backend} has no 4-bit weights, got judge.quantization {config.quantization}",
            "leave out --judge.quantization; these models are small",
        )
    folder, revision = locate(config.model, config.revision, config.section)
    model = load_weights(model_class, folder, config)
    # AutoModel loads whatever config.json names: a text model would break at the first image, with its own words
    if not all(hasattr(model, part) for part in parts):
        what = f"{folder} holds a {model.config.model_type} model, which backend {config.backend} cannot use"
        raise ModelUnavailable(what, f"choose {kind}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        image_processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        what = f"the tokenizer or image processor in {folder} cannot be loaded: {first_line(error)}"
        raise ModelUnavailable(what, f"choose {kind}") from error
    return Encoder(model=model, tokenizer=tokenizer, image_processor=image_processor, revision=revision)


# --- random weights -----------------------------------------------------------------------------------------------

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
    # the weights follow from the seed, and nobody else's chance changes
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
