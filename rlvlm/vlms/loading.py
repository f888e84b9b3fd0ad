"""Loads a chat VLM into memory: finds its files, chooses device and precision. Used by judges and policies.

Only safetensors weights are read, and no code of a model's repository is ever run. Errors here are for the user to fix,
so they are raised as `ModelUnavailable` with the command that fixes them.
"""

import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    GenerationConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar

from rlvlm.core.errors import ModelUnavailable, first_line, is_out_of_memory
from rlvlm.core.foreign import read_json
from rlvlm.vlms.chats import Chat, images_of
from rlvlm.vlms.config import VLMConfig
from rlvlm.vlms.devices import dtype_name, pick_device, pick_dtype, place
from rlvlm.vlms.files import locate
from rlvlm.vlms.images import flatten_patch_embedding
from rlvlm.vlms.lora import load_adapter
from rlvlm.vlms.processors import Processor, load_processor
from rlvlm.vlms.skeleton import are_wanted, build_skeleton

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedVLM:
    """A loaded model."""

    model: Any
    """An `AutoModelForImageTextToText` in eval mode; with an adapter, PEFT's wrapper around one."""
    processor: Processor
    """Processor that turns chats and images into the model's inputs; has `tokenizer` and `apply_chat_template`."""
    revision: str
    """Hub commit, or digest of a local folder."""

    @property
    def dtype(self) -> str:
        """Precision of the weights, e.g. `float32`."""
        return dtype_name(self.model.dtype)

    def inputs(self, texts: Sequence[str], chats: Sequence[Chat]) -> dict[str, torch.Tensor]:
        """Returns the model's inputs [B, N] for rendered `chats`, left-padded, on its device and in its precision."""
        return place(self.processor(texts, [images_of(chat) for chat in chats]), self.model)

    def token_id(self, token: str) -> int:
        """Returns the id of one of the model's own tokens."""
        return self.processor.tokenizer.convert_tokens_to_ids(token)


def load_vlm(config: VLMConfig, *, trainable: bool = False) -> LoadedVLM:
    """Loads the model named by `config.model`, on its device, in eval mode, with greedy defaults.

    Args:
        config: model, adapter, device and precision.
        trainable: whether the weights of `config.adapter` are trained; without an adapter, all weights.

    Raises:
        ModelUnavailable: the files are missing or cannot be fetched, are no chat VLM, have no safetensors weights, do
            not fit into memory, or need a missing package or GPU.
    """
    folder, revision = locate(config.model, config.revision, config.section)
    fix = "choose a chat VLM such as Qwen/Qwen3-VL-8B-Instruct, or a folder that holds one"
    try:
        model_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:  # a foreign file may contain anything
        raise ModelUnavailable(f"{folder} holds no model that transformers knows: {first_line(error)}", fix) from error
    kind = model_config.model_type
    if kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        raise ModelUnavailable(f"{folder} holds a {kind} model, which cannot look at images", fix)
    processor = load_processor(folder, model_config, config)
    quantization = None
    if config.quantization == "nf4":
        if not importlib.util.find_spec("bitsandbytes"):
            raise ModelUnavailable("4-bit weights need the package bitsandbytes", "pip install bitsandbytes")
        quantization = _nf4(folder, pick_dtype(config.dtype, pick_device(config.device, config.section)))
    model = load_weights(AutoModelForImageTextToText, folder, config, quantization_config=quantization)
    flatten_patch_embedding(model)  # the original convolution is several times slower
    tokenizer = processor.tokenizer
    tokenizer.padding_side = "left"  # generated text follows the prompt, with no padding in between
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    own_stop = model.generation_config.eos_token_id
    stop = tokenizer.eos_token_id if own_stop is None else own_stop
    # The released files set sampling and penalties; the callers of the model decide these.
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=pad)
    if config.adapter:
        model = load_adapter(model, Path(config.adapter).expanduser(), trainable=trainable).eval()
    return LoadedVLM(model=model, processor=processor, revision=revision)


def check_shards(folder: Path) -> None:
    """Raises unless an index of weights only names safetensors files of its own folder.

    Raises:
        ModelUnavailable: it names another file.
    """
    for index in folder.glob("*.index.json"):
        try:
            # transformers opens any file that the index names, and pickles run code
            names = set(read_json(index)["weight_map"].values())
            odd = sorted(name for name in names if Path(name).name != name or not name.endswith(".safetensors"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            odd = ["nothing that can be read"]
        if odd:
            raise ModelUnavailable(
                f"{index} names {odd[0][:80]!r}; weights are *.safetensors in the same folder",
                "download the model again; do not use weights that came with this index",
            )


def load_weights(
    network_class: Any, folder: Path, wanted: VLMConfig, *, is_exact: bool = False, **settings: Any
) -> Any:
    """Loads a network with the weights in `folder`, on its device, in eval mode.

    Args:
        network_class: class with transformers' `from_pretrained`.
        folder: folder with safetensors.
        wanted: device, precision and attention.
        is_exact: whether to refuse weights that the network has no place for, too.
        settings: further arguments of `from_pretrained`.

    Raises:
        ModelUnavailable: there are no safetensors, a file is truncated or another model's, or memory does not suffice.
    """
    if not list(folder.glob("*.safetensors")):
        raise ModelUnavailable(
            f"{folder} has no *.safetensors weights; pickled weights are not read",
            "download the model again, or convert its weights to safetensors",
        )
    check_shards(folder)
    device = pick_device(wanted.device, wanted.section)
    if wanted.attention != "auto":
        settings.setdefault("attn_implementation", wanted.attention)
    disable_progress_bar()  # it would break the run's live panel
    try:
        network, info = network_and_names(network_class, folder, pick_dtype(wanted.dtype, device), device, settings)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError, MemoryError) as error:
        if is_out_of_memory(error):
            size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**30
            memory = f"the memory of {device}"
            if device.type == "cuda":  # a replica with half a GPU may use half of its memory
                total = torch.cuda.get_device_properties(device).total_memory / 2**30
                share = torch.cuda.get_per_process_memory_fraction(device)
                memory = f"this process's share of {device}, {share:g} of {total:.1f} GiB"
            raise ModelUnavailable(
                f"the weights in {folder}, {size:.1f} GiB on disk, do not fit into {memory}: {first_line(error)}",
                f"choose --{wanted.section}.quantization nf4 or a smaller model; where it is served, a larger share: "
                "--serve.num-gpus",
            ) from error
        raise ModelUnavailable(
            f"the weights in {folder} cannot be loaded on {device}: {first_line(error)}",
            f"check the download with rlvlm fetch, or save memory with --{wanted.section}.quantization nf4",
        ) from error
    # transformers would continue with random weights for those missing
    problems = {"lacks": info["missing_keys"], "has too many:": info["unexpected_keys"] if is_exact else ()}
    for what, names in problems.items():
        if names:
            raise ModelUnavailable(
                f"{folder} {what} {len(names)} weights of a {type(network).__name__}, such as {min(names)}",
                f"check the download with rlvlm fetch, or choose another --{wanted.section}.model",
            )
    logger.info("%s %s loaded on %s", wanted.section, wanted.model, device)
    return network.eval()


def network_and_names(
    network_class: Any, folder: Path, dtype: torch.dtype, device: torch.device, settings: dict[str, Any]
) -> tuple[Any, dict[str, set[str]]]:
    """Returns the network in `folder`, and the names of missing and of superfluous weights.

    Within `skeletons` it has no weights yet; 4-bit weights, which are computed from whole ones, are read at once
    anyway.

    Args:
        network_class: class of transformers, or one of its auto classes.
        folder: folder with safetensors.
        dtype: dtype of the weights.
        device: device of the weights.
        settings: further arguments of `from_pretrained`.
    """
    if are_wanted() and settings.get("quantization_config") is None:
        config = settings.pop("config", None) or AutoConfig.from_pretrained(folder, trust_remote_code=False)
        network, missing, surplus = build_skeleton(
            network_class, folder, config, device, dtype=dtype,
            **{name: value for name, value in settings.items() if value is not None},
        )  # fmt: skip
        return network, {"missing_keys": missing, "unexpected_keys": surplus}
    return network_class.from_pretrained(
        folder,
        dtype=dtype,
        device_map={"": device},
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        **settings,
    )


def takes_nf4(module: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    """Returns whether `module` can have 4-bit weights: a linear layer of a whole number of blocks."""
    return isinstance(module, torch.nn.Linear) and not (module.in_features % 64 or module.out_features % 32)


def _nf4(folder: Path, dtype: torch.dtype) -> BitsAndBytesConfig:
    """Returns 4-bit settings that leave out the output head and every layer that is not a whole number of blocks.

    The CPU kernel of bitsandbytes works on blocks of 32 outputs by 64 inputs and fails on others; the image encoders
    of Qwen2.5-VL and Qwen3-VL have layers of 3420 and 4304.
    """
    # only shapes: takes no memory
    with torch.device("meta"):
        skeleton = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    odd = [
        name
        for name, module in skeleton.named_modules()
        if isinstance(module, torch.nn.Linear) and not takes_nf4(module)
    ]
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules=["lm_head", *odd],
    )
