"""Loads image-text models: weights, tokenizer and image processor, on a device. Used by `clip` and `blip2`.

`--judge.model random` draws the weights: a control, and a way to run without a download. They go through the same code
as trained ones and carry no knowledge: their stamp and the names of their runs say so. Texts are tokenised by byte,
since no vocabulary comes with random weights.
"""

from collections.abc import Callable, Sequence
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
    """A model with its tokenizer and image processor."""

    model: Any
    """Model in eval mode, on its device."""
    tokenizer: Any
    image_processor: Any
    """Image processor that works on Pillow if torchvision is missing."""
    revision: str
    """Hub commit, or a digest of a local folder."""

    @property
    def dtype(self) -> str:
        """Precision of the weights, e.g. `float32`."""
        return dtype_name(self.model.dtype)

    def see(self, images: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Returns the model's inputs for images [H, W, 3]."""
        return place(self.image_processor(images=list(images), return_tensors="pt"), self.model)

    def read(self, texts: Sequence[str], **settings: Any) -> dict[str, torch.Tensor]:
        """Returns the model's inputs for texts, which are cut to the model's maximum length."""
        longest = min(self.tokenizer.model_max_length, self.model.config.get_text_config().max_position_embeddings)
        settings = {"padding": True, "max_length": longest, **settings}
        inputs = self.tokenizer(list(texts), truncation=True, return_tensors="pt", **settings)
        return place(inputs, self.model)


def load_encoder(
    config: JudgeConfig,
    model_class: Any,
    parts: Sequence[str],
    kind: str,
    make_random: Callable[[JudgeConfig], Encoder],
) -> Encoder:
    """Loads the model that `config.model` names.

    Args:
        config: names model, revision, device and precision.
        model_class: class of transformers with `from_pretrained`.
        parts: attributes that a model of the wanted kind has.
        kind: name of that kind in messages, with an example.
        make_random: makes such a model with random weights.

    Raises:
        ModelUnavailable: the files are missing, are not such a model or not safetensors, or do not fit.
        UnsupportedQuestion: 4-bit weights are wanted.
    """
    if config.is_random:
        return make_random(config)
    if config.quantization != "none":
        raise UnsupportedQuestion(
            f"backend {config.backend} has no 4-bit weights, got judge.quantization {config.quantization}",
            "leave out --judge.quantization; these models are small",
        )
    folder, revision = locate(config.model, config.revision, config.section)
    model = load_weights(model_class, folder, config)
    # AutoModel loads any model of config.json: a text model would fail at the first image, with an unclear message
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
    """Returns a CLIP of the size of ViT-B/32, with 127 million weights drawn by `config.seed`."""
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
    """Returns a BLIP-2 with a matching head and 29 million weights drawn by `config.seed`; a real one has 1.2 billion.

    The layers are those of the released model, fewer and narrower, because an image would take seconds on a CPU.
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
    # the weights depend on the seed alone, and no other random state changes
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
    """Returns a tokenizer with one token per byte and an end token, at which CLIP reads the text's vector."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=_END, pad_token=_PAD)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {_END}", special_tokens=[(_END, tokenizer.eos_token_id)]
    )
    return tokenizer
