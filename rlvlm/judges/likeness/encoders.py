"""Bringing an image-text model into memory: its parts, on a device, in a precision. Used by `clip` and `blip2`."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from rlvlm.core.errors import JudgeUnavailable, UnsupportedQuestion
from rlvlm.judges.config import JudgeConfig
from rlvlm.vlms.devices import pick_device, pick_dtype
from rlvlm.vlms.files import locate

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
        return str(self.model.dtype).removeprefix("torch.")

    def see(self, pictures: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The model's inputs for images [H, W, 3]."""
        inputs = self.image_processor(images=list(pictures), return_tensors="pt")
        return self._placed(inputs)

    def read(self, texts: Sequence[str], **settings: Any) -> dict[str, torch.Tensor]:
        """The model's inputs for texts; what is longer than the model reads is cut."""
        longest = min(self.tokenizer.model_max_length, self.model.config.get_text_config().max_position_embeddings)
        settings = {"padding": True, "max_length": longest, **settings}
        return self._placed(self.tokenizer(list(texts), truncation=True, return_tensors="pt", **settings))

    def _placed(self, inputs: Any) -> dict[str, torch.Tensor]:
        model = self.model
        return {
            name: tensor.to(model.device, model.dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in inputs.items()
        }


def load_encoder(config: JudgeConfig, model_class: Any, parts: Sequence[str], kind: str) -> Encoder:
    """The model that `config.model` names.

    Args:
        config: names model, revision, device and precision.
        model_class: of transformers, with `from_pretrained`.
        parts: attributes that a loaded model of the kind that is wanted has.
        kind: what that is called in messages, with an example.

    Raises:
        JudgeUnavailable: the files are missing, are no such model or no safetensors, or do not fit.
        UnsupportedQuestion: 4-bit weights are wanted.
    """
    if config.quantization != "none":
        raise UnsupportedQuestion(
            f"backend {config.backend} has no 4-bit weights, got judge.quantization {config.quantization}",
            "leave out --judge.quantization; these models are small",
        )
    folder, revision = locate(config.model, config.revision, config.section)
    if not list(folder.glob("*.safetensors")):
        raise JudgeUnavailable(
            f"{folder} has no *.safetensors weights; pickled weights are not read", f"choose {kind}, in safetensors"
        )
    device = pick_device(config.device, config.section)
    dtype = pick_dtype(config.dtype, device)
    disable_progress_bar()  # it would tear the run's live panel
    try:
        model, told = model_class.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
        encoder = Encoder(
            model=model.to(device).eval(),
            tokenizer=AutoTokenizer.from_pretrained(folder, trust_remote_code=False),
            image_processor=AutoImageProcessor.from_pretrained(folder, trust_remote_code=False),
            revision=revision,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise JudgeUnavailable(f"the model in {folder} cannot be loaded: {reason}", f"choose {kind}") from error
    if missing := sorted(told["missing_keys"]):  # transformers would go on with random weights in their place
        raise JudgeUnavailable(
            f"{folder} lacks {len(missing)} of the weights of a {type(model).__name__}, such as {missing[0]}",
            f"choose {kind}",
        )
    if not all(hasattr(encoder.model, part) for part in parts):
        raise JudgeUnavailable(
            f"{folder} holds a {encoder.model.config.model_type} model, which backend {config.backend} cannot use",
            f"choose {kind}",
        )
    logger.info("%s loaded on %s, revision %s", config.model, device, revision[:12])
    return encoder


class AdaptiveBatches:
    """Runs a network on pieces of at most `size` items; where memory runs out they become smaller, and stay so.

    Args:
        size: items per piece at first, >= 1.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    def run(self, ask: Callable[[Sequence[T]], torch.Tensor], items: Sequence[T]) -> torch.Tensor:
        """What `ask` gives for all items, in order, as float64 on the CPU.

        Raises:
            JudgeUnavailable: the network breaks, or one item alone is too much for the memory.
        """
        answers: list[torch.Tensor] = []
        done = 0
        while done < len(items):
            piece = items[done : done + self._size]
            try:
                with torch.inference_mode():
                    answers.append(ask(piece).double().cpu())
                done += len(piece)
                continue
            except torch.OutOfMemoryError as error:
                reason = f"out of memory: {error}"
            except (RuntimeError, ValueError, IndexError) as error:
                raise JudgeUnavailable(f"the judge's network broke: {error}", "run `rlvlm doctor`") from error
            if self._size == 1:  # outside `except`, so that the traceback holds no tensors
                raise JudgeUnavailable(reason, "choose a smaller model, or --judge.dtype bfloat16")
            self._size = (len(piece) + 1) // 2
            logger.warning("out of memory with %d items at once; going on with %d", len(piece), self._size)
            torch.cuda.empty_cache()
        return torch.cat(answers)
