"""Processors that turn chats and images into a chat VLM's inputs. Used by `loading`."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlvlm.core.errors import ModelUnavailable, first_line
from rlvlm.core.foreign import read_json
from rlvlm.vlms.config import VLMConfig
from rlvlm.vlms.images import can_replace, process

Images = Sequence[NDArray[np.uint8]]
_TEMPLATE = "chat_template.json"
_TILES = ("do_image_splitting", "max_image_size")
"""Settings of an image processor that cuts an image into tiles, which its chat names by row and column."""


def adds_begin(tokenizer: Any, chat: str) -> bool:
    """Returns whether the tokenizer must add its begin token to a rendered chat: Llama's adds <s>, which LLaVA's chat
    template relies on but Gemma's writes itself. Tokenizers without one, such as Qwen's, add nothing.
    """
    begin = tokenizer.bos_token
    return not (begin and chat.startswith(begin))


class PillowProcessor:
    """Processor of a Qwen-VL or an InternVL, assembled from Pillow images, tokenizer and chat template, without
    torchvision.

    The families' own processor class insists on a video processor, which needs torchvision; clips are sent as images
    here, so nothing is lost. `tests/vlms/test_processors.py` compares its inputs with those that the models are trained
    on.

    Args:
        image_processor: the family's, on Pillow.
        tokenizer: tokenizer with a chat template that writes one mark for each image.
        image_token_id: id of the mark, and of each visual token.
        tokens_per_crop: for InternVL, which cuts large images into crops; 0: by the image's patches, as Qwen-VL.
    """

    def __init__(self, image_processor: Any, tokenizer: Any, image_token_id: int, tokens_per_crop: int = 0) -> None:
        self._tokens_per_crop = tokens_per_crop
        self.image_processor = image_processor
        self.tokenizer = tokenizer
        self._image_token_id = image_token_id
        self._image_token = tokenizer.convert_ids_to_tokens(image_token_id)

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True, add_vision_id: bool = False
    ) -> str:
        """Renders a chat as a string that ends where the model's answer begins, or its turn; images may be numbered."""
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, add_vision_id=add_vision_id
        )

    def __call__(self, text: Sequence[str], images: Sequence[Images]) -> dict[str, torch.Tensor]:
        """Returns left-padded inputs [B, N] for `text`, each with its images in order.

        Raises:
            ValueError: a text's numbers of image marks and images differ.
        """
        flat = [image for shown in images for image in shown]
        if can_replace(self.image_processor):
            inputs = process(flat, self.image_processor) if flat else {}
        else:
            # InternVL's own class tells its image processor to cut images into crops, which is not the default.
            crops = {"crop_to_patches": True} if self._tokens_per_crop else {}
            inputs = dict(self.image_processor(images=flat, return_tensors="pt", **crops)) if flat else {}
        begin = end = ""
        if not flat:
            counts = []
        elif self._tokens_per_crop:
            crops = inputs.pop("num_patches")
            counts = [int(count) * self._tokens_per_crop for count in crops]
            begin, end = self.tokenizer.start_image_token, self.tokenizer.end_image_token
        else:
            counts = (inputs["image_grid_thw"].prod(-1) // self.image_processor.merge_size**2).tolist()
        expanded = []
        for chat, shown in zip(text, images, strict=True):
            parts = chat.split(self._image_token)
            if len(parts) != len(shown) + 1:
                raise ValueError(f"{len(shown)} images need as many marks in the chat, got {len(parts) - 1}")
            # the template writes one mark per image; the model expects one per visual token
            marks = [begin + self._image_token * counts.pop(0) + end for _ in shown]
            expanded.append("".join(part + mark for part, mark in zip(parts, [*marks, ""], strict=True)))
        inputs |= self.tokenizer(
            expanded, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt"
        )
        if not self._tokens_per_crop:  # Qwen's encoder needs to know which tokens are images
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == self._image_token_id).int()
        inputs.pop("token_type_ids", None)  # some tokenizers add them, but these models do not accept them
        return inputs


class AutoProcessorAdapter:
    """The model's own processor, if it can be built on this machine."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.tokenizer = processor.tokenizer
        self.image_processor = processor.image_processor

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True, add_vision_id: bool = False
    ) -> str:
        """Renders a chat as a string that ends where the model's answer begins, or its turn; images may be numbered."""
        # Templates of other families do not have this setting, and each call would log a warning.
        counted = {"add_vision_id": True} if add_vision_id else {}
        return self._processor.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **counted
        )

    def __call__(self, text: Sequence[str], images: Sequence[Images]) -> dict[str, torch.Tensor]:
        """Returns left-padded inputs [B, N] for `text`, each with its images in order."""
        has_images = any(len(shown) > 0 for shown in images)
        return dict(
            self._processor(
                text=list(text),
                images=[list(shown) for shown in images] if has_images else None,
                padding=True,
                padding_side="left",
                add_special_tokens=any(adds_begin(self.tokenizer, chat) for chat in text),
                return_tensors="pt",
            )
        )


Processor = PillowProcessor | AutoProcessorAdapter


def load_processor(folder: Path, model_config: Any, config: VLMConfig) -> Processor:
    """Returns the model's own processor, or an equivalent one if torchvision is missing, with the bounds requested.

    Args:
        folder: folder of the model's files.
        model_config: transformers' parsed config.json.
        config: settings with the pixel bounds.

    Raises:
        ModelUnavailable: a file is missing or broken, or the model has no chat template or no pixel bounds.
    """
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer  # slow, and not needed to find a model

    processor: PillowProcessor | AutoProcessorAdapter
    try:
        tokenizer = image_processor = None
        if not importlib.util.find_spec("torchvision") and hasattr(model_config, "image_token_id"):
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            image_processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
        if tokenizer is not None and not tokenizer.chat_template and (folder / _TEMPLATE).is_file():
            # older checkpoints keep it here, only for their own processors
            tokenizer.chat_template = read_json(folder / _TEMPLATE)["chat_template"]
        is_intern = hasattr(tokenizer, "context_image_token")
        if tokenizer is not None and all(hasattr(image_processor, name) for name in _TILES):
            processor = AutoProcessorAdapter(_tiles_processor(model_config, image_processor, tokenizer))
        # a model of another line: only its own class knows its marks
        elif tokenizer is None or not (is_intern or hasattr(image_processor, "merge_size")):
            processor = AutoProcessorAdapter(AutoProcessor.from_pretrained(folder, trust_remote_code=False))
        elif not tokenizer.chat_template:
            what = f"{folder} has no chat template"
            raise ModelUnavailable(what, "choose an Instruct model, base models cannot chat")
        else:
            per_crop = model_config.image_seq_length if is_intern else 0
            processor = PillowProcessor(image_processor, tokenizer, model_config.image_token_id, per_crop)
        if processor.tokenizer.pad_token is None:  # rows of a batch differ in length, and padding is always masked
            processor.tokenizer.pad_token = processor.tokenizer.eos_token
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ImportError) as error:
        raise ModelUnavailable(
            f"the tokenizer or image processor in {folder} cannot be loaded: {first_line(error)}",
            "the folder needs tokenizer.json, preprocessor_config.json and a chat template; download it again",
        ) from error
    if config.min_pixels or config.max_pixels:
        images = processor.image_processor
        if not hasattr(images, "merge_size"):
            raise ModelUnavailable(
                "this model's image processor has no pixel bounds",
                f"leave out --{config.section}.min-pixels and --{config.section}.max-pixels",
            )
        smallest = config.min_pixels or images.size["shortest_edge"]
        largest = config.max_pixels or images.size["longest_edge"]
        images.size = {"shortest_edge": min(smallest, largest), "longest_edge": max(smallest, largest)}
    return processor


def _tiles_processor(model_config: Any, image_processor: Any, tokenizer: Any) -> Any:
    """Returns the processor of an Idefics 3, or SmolVLM, whose own class needs torchvision and num2words for videos."""
    from transformers import Idefics3Processor

    seen = model_config.vision_config
    per_tile = (seen.image_size // seen.patch_size) ** 2 // model_config.scale_factor**2
    template = tokenizer.chat_template
    return Idefics3Processor(image_processor, tokenizer, image_seq_len=per_tile, chat_template=template)
