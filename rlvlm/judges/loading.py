"""Bringing a chat VLM into memory: where its files are, on which device, in which precision. Used by `chat`.

Only safetensors weights are read and no code of a model's repository is ever run. What goes wrong here is the user's
to mend, so it leaves as `JudgeUnavailable` with the command that mends it.
"""

import hashlib
import importlib.util
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    GenerationConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar

from rlvlm.errors import JudgeUnavailable, first_line
from rlvlm.judges.config import JUDGE_FILES, JudgeConfig
from rlvlm.judges.patch_embedding import flatten_patch_embedding
from rlvlm.judges.processors import load_processor

logger = logging.getLogger(__name__)

_DIGEST_CHUNKS, _DIGEST_BYTES = 16, 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedVLM:
    """A model ready to be asked."""

    model: Any
    """An `AutoModelForImageTextToText` in eval mode."""
    processor: Any
    """Turns chats and pictures into the model's inputs; has `tokenizer` and `apply_chat_template`."""
    revision: str
    """Hub commit, or a digest of a local folder."""


def load_vlm(config: JudgeConfig) -> LoadedVLM:
    """The model that `config.model` names, on its device, with greedy defaults.

    Raises:
        JudgeUnavailable: the files are missing or cannot be fetched, are no chat VLM, have no safetensors weights, do
            not fit, or need a package or a GPU that is not there.
    """
    folder, revision = locate(config.model, config.revision)
    model_config = _vlm_config(folder)
    device = pick_device(config.device)
    processor = load_processor(folder, model_config, config)
    model = _model(folder, config, device)
    tokenizer = processor.tokenizer
    tokenizer.padding_side = "left"
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    stop = (
        model.generation_config.eos_token_id
        if model.generation_config.eos_token_id is not None
        else tokenizer.eos_token_id
    )
    # The released files ask for sampling and penalties; a judge decides these itself.
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=pad)
    logger.info("judge %s loaded on %s, revision %s", config.model, device, revision[:12])
    return LoadedVLM(model=model, processor=processor, revision=revision)


def locate(model: str, revision: str) -> tuple[Path, str]:
    """The folder with a model's files and what identifies them: a hub commit, or a digest of a local folder.

    Raises:
        JudgeUnavailable: nothing of that name is on the disk, and the hub has it not or cannot be reached.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder, folder_digest(folder)
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise JudgeUnavailable(
            f"no judge at {model}: the folder does not exist",
            "give --judge.model a folder with config.json and *.safetensors, or a hub name such as "
            "Qwen/Qwen3-VL-8B-Instruct",
        )
    try:
        found = snapshot_download(model, revision=revision or None, allow_patterns=list(JUDGE_FILES))
    except (OSError, ValueError) as error:  # hub, cache and network errors are OSErrors; a malformed name a ValueError
        wanted = f" --revision {revision}" if revision else ""
        raise JudgeUnavailable(
            f"judge {model} is not on this machine and could not be fetched: {first_line(error)}",
            f"where there is a network: hf download {model}{wanted} --local-dir DIR; then --judge.model DIR",
        ) from error
    return Path(found), Path(found).name


def folder_digest(folder: Path) -> str:
    """SHA-256 of a model folder: all of a small model, 16 MiB spread over each file of a big one."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.jinja"), *folder.glob("*.safetensors")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        step = max(_DIGEST_BYTES, size // _DIGEST_CHUNKS)
        with path.open("rb") as file:
            for start in range(0, size, step):
                file.seek(start)
                digest.update(file.read(_DIGEST_BYTES))
    return digest.hexdigest()


def pick_device(device: str) -> torch.device:
    """The device that `JudgeConfig.device` means.

    `auto` takes a GPU only where one was assigned through CUDA_VISIBLE_DEVICES, as Ray and SLURM do: a GPU that is
    merely visible may be somebody else's. Inside Ray Serve the deployment resolves `auto` itself, by Ray's
    bookkeeping.

    Raises:
        JudgeUnavailable: a GPU is named and torch sees none, or the name is no device.
    """
    has_cuda = torch.cuda.is_available()
    if device == "auto":
        is_assigned = os.environ.get("CUDA_VISIBLE_DEVICES", "") not in ("", "-1")
        if has_cuda and not is_assigned:
            logger.warning("a GPU is visible but not assigned to the judge; --judge.device cuda takes it")
        return torch.device("cuda" if has_cuda and is_assigned else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise JudgeUnavailable(f"{device!r} is no device", "use --judge.device auto, cpu, cuda or cuda:0") from error
    if chosen.type == "cuda" and not (has_cuda and (chosen.index or 0) < torch.cuda.device_count()):
        raise JudgeUnavailable(
            f"the judge wants {device}, which torch does not see here",
            "use --judge.device cpu, or --serve.num-gpus with a CUDA build of torch",
        )
    return chosen


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The precision that `JudgeConfig.dtype` means: `auto` is bfloat16 on a GPU, float32 elsewhere."""
    named = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    return named.get(dtype, torch.bfloat16 if device.type == "cuda" else torch.float32)


def _vlm_config(folder: Path) -> Any:
    """The model's config, once it is known to be one of a chat VLM."""
    fix = "choose a chat VLM such as Qwen/Qwen3-VL-8B-Instruct, or a folder that holds one"
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:  # whatever a stranger's file holds
        raise JudgeUnavailable(f"{folder} holds no model that transformers knows: {first_line(error)}", fix) from error
    if config.model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        raise JudgeUnavailable(f"{folder} holds a {config.model_type} model, which cannot look at pictures", fix)
    if not list(folder.glob("*.safetensors")):
        raise JudgeUnavailable(
            f"{folder} has no *.safetensors weights; pickled weights are not read",
            "download the model again, or convert its weights to safetensors",
        )
    _check_shards(folder)
    return config


def _check_shards(folder: Path) -> None:
    """Raises JudgeUnavailable when an index of weights names anything but safetensors files of its own folder."""
    for index in folder.glob("*.index.json"):
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
            odd = sorted(name for name in names if Path(name).name != name or not name.endswith(".safetensors"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            odd = ["nothing that can be read"]
        if odd:
            raise JudgeUnavailable(
                f"{index} names {odd[0][:80]!r}; weights are *.safetensors in the same folder",
                "download the model again; do not use weights that came with this index",
            )


def _model(folder: Path, config: JudgeConfig, device: torch.device) -> Any:
    """The weights on their device, in eval mode."""
    if config.quantization == "nf4" and not importlib.util.find_spec("bitsandbytes"):
        raise JudgeUnavailable("4-bit weights need the package bitsandbytes", "pip install bitsandbytes")
    dtype = pick_dtype(config.dtype, device)
    quantization = _nf4(folder, dtype) if config.quantization == "nf4" else None
    disable_progress_bar()  # it would tear the run's live panel
    try:
        loaded: Any = AutoModelForImageTextToText.from_pretrained(
            folder,
            dtype=dtype,
            device_map={"": device},
            quantization_config=quantization,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # torn file, wrong shapes, no memory
        raise JudgeUnavailable(
            f"the weights in {folder} cannot be loaded on {device}: {first_line(error)}",
            "check the download with hf download, or save memory with --judge.quantization nf4",
        ) from error
    model, told = loaded
    if missing := sorted(told["missing_keys"]):  # transformers would go on with random weights in their place
        raise JudgeUnavailable(
            f"{folder} lacks {len(missing)} of the weights of a {type(model).__name__}, such as {missing[0]}",
            "check the download with hf download, or choose another --judge.model",
        )
    flatten_patch_embedding(model)
    return model.eval()


def _nf4(folder: Path, dtype: torch.dtype) -> BitsAndBytesConfig:
    """4-bit settings that leave out the output head and every layer that is no whole number of blocks.

    The CPU kernel of bitsandbytes works on blocks of 32 outputs by 64 inputs and fails on others; the picture encoders
    of Qwen2.5-VL and Qwen3-VL have layers of 3420 and 4304.
    """
    with torch.device("meta"):
        skeleton = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    odd = [
        name
        for name, module in skeleton.named_modules()
        if isinstance(module, torch.nn.Linear) and (module.in_features % 64 or module.out_features % 32)
    ]
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules=["lm_head", *odd],
    )
