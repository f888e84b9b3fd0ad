"""Location and identity of a model's files. Used by every engine; imports no torch."""

import fnmatch
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache

from rlvlm.core.disk import write_whole
from rlvlm.core.errors import MachineError, ModelUnavailable, first_line
from rlvlm.core.foreign import open_regular, read_json
from rlvlm.core.trust import record_file
from rlvlm.vlms.config import MODEL_FILES, VLMConfig

PINS = "models.json"
"""File in the user's state with the commit and the digest of each model that a preset downloaded, by hub name."""
_WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
_NF4_BYTES = 0.6
"""Bytes of a weight in 4 bits with its scales, and the layers that stay whole."""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")
_DIGEST_CHUNKS, _DIGEST_BYTES = 16, 1 << 20


def locate(model: str, revision: str, section: str = "vlm") -> tuple[Path, str]:
    """Returns the folder with a model's files and their identity: a hub commit, or a digest of a local folder.

    Args:
        model: hub name or folder.
        revision: commit of a hub model; empty takes the newest.
        section: section of the command line, for messages.

    Raises:
        ModelUnavailable: there is no such model on disk, and the hub does not have it or cannot be reached.
    """
    folder = Path(model).expanduser()
    if model and folder.is_dir():
        return folder, folder_digest(folder)
    found = fetched(model, revision, MODEL_FILES, section)
    return found, found.name


def fetched(model: str, revision: str, patterns: Sequence[str], section: str = "vlm") -> Path:
    """Returns the folder of a hub model with its files that match one of `patterns`; missing ones are fetched.

    Args:
        model: hub name.
        revision: commit; empty takes the newest.
        patterns: patterns of file names.
        section: section of the command line, for messages.

    Raises:
        ModelUnavailable: see `locate`.
    """
    folder = Path(model).expanduser()
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ModelUnavailable(
            f"no {section} at {model or 'an empty name'}: the folder does not exist",
            f"give --{section}.model a folder with config.json and *.safetensors, or a hub name such as "
            "Qwen/Qwen3-VL-8B-Instruct",
        )
    try:
        return Path(snapshot_download(model, revision=revision or None, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:  # hub, cache and network errors are OSErrors; a malformed name a ValueError
        command = f"rlvlm fetch {model}" if section == "judge" else f"hf download {model}"
        wanted = f" --revision {revision}" if revision else ""
        raise ModelUnavailable(
            f"{section} {model} is not on this machine and could not be fetched: {first_line(error)}",
            f"where there is a network: {command}{wanted}; on another machine add a folder of its own, "
            f"{'--to' if section == 'judge' else '--local-dir'} DIR, and give --{section}.model DIR",
        ) from error


def copy_settings(source: Path, folder: Path) -> None:
    """Copies the files beside the weights of the model in `source` (tokenizer, processors, code, statistics) that
    `folder` does not have yet.
    """
    for file in sorted(source.iterdir()):
        is_weights = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and file.name != "README.md" and not (folder / file.name).exists():
            (folder / file.name).write_bytes(file.read_bytes())


def is_here(model: str, revision: str) -> bool:
    """Returns whether `model` is a folder, or is in the hub's cache."""
    if Path(model).expanduser().is_dir():
        return True
    return model.count("/") == 1 and isinstance(
        try_to_load_from_cache(model, "config.json", revision=revision or None), str
    )


def download_note(config: VLMConfig) -> str:
    """Returns what a hub model would download and the memory that its weights will take; asks the hub, as it must.

    Raises:
        MachineError: the disk is too small for it.
        OSError, ValueError: the hub does not have it, or cannot be reached.
    """
    try:
        about = HfApi().model_info(config.model, revision=config.revision or None, files_metadata=True)
    except (OSError, ValueError):
        raise
    except Exception as error:  # of the HTTP library, which differs between versions of huggingface_hub
        raise ConnectionError(first_line(error)) from error
    sizes = {file.rfilename: file.size or 0 for file in about.siblings or ()}
    wanted = sum(size for name, size in sizes.items() if any(fnmatch.fnmatch(name, kind) for kind in MODEL_FILES))
    weights = sum(size for name, size in sizes.items() if name.endswith(".safetensors"))
    count = about.safetensors.total if about.safetensors else weights / 2  # published in 16 bits, as a rule
    memory = count * _WEIGHT_BYTES[config.dtype] if config.dtype in _WEIGHT_BYTES else weights
    memory = count * _NF4_BYTES if config.quantization == "nf4" else memory
    cache = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists())).free
    if wanted > free:
        what = f"{config.model} has {wanted / 2**20:,.1f} MiB, and {cache} has {free / 2**20:,.1f} MiB left"
        raise MachineError(what, "make room, or name another disk: HF_HOME=...")
    return (
        f"{config.model} at {about.sha}: {wanted / 2**20:,.1f} MiB to download, {free / 2**20:,.0f} MiB are free; "
        f"its weights take about {memory / 2**20:,.1f} MiB of memory"
    )


def pinned(config: VLMConfig, log: Callable[[str], None]) -> str:
    """Returns the commit of a hub model, which is on disk then: that of its first download, with the same files.

    Args:
        config: model and its revision; an empty one is the first download's, or else the newest.
        log: is told what is downloaded, before it is.

    Raises:
        MachineError: the disk is too small for it.
        ModelUnavailable: the commit or the files are others than at the first download, or cannot be had.
    """
    file = record_file(PINS)
    pins = read_json(file) if file.exists() else {}
    pin = pins.get(config.model)
    wanted = config.revision or (pin["revision"] if pin else "")
    if not is_here(config.model, wanted):
        with suppress(OSError, ValueError):  # `locate` asks the hub too, and says what to do
            log(download_note(replace(config, revision=wanted)))
    folder, commit = locate(config.model, wanted, config.section)
    found = {"revision": commit, "digest": folder_digest(folder)}
    if pin is None:
        write_whole(file, json.dumps(pins | {config.model: found}, indent=1) + "\n")
        log(f"{config.model}: commit {commit}, files {found['digest'][:12]}, noted in {file}; others are refused")
    elif pin != found:
        first, now = (f"commit {each['revision']} with files {each['digest'][:12]}" for each in (pin, found))
        what = f"{config.model} was downloaded as {first}, and is {now}"
        raise ModelUnavailable(what, f"fetch it anew; if you want the others, take its entry out of {file}")
    return commit


def folder_digest(folder: Path) -> str:
    """Returns the SHA-256 of a model folder: of all of a small model, of 16 MiB spread over each file of a big one.

    Raises:
        ModelUnavailable: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.jinja"), *folder.glob("*.safetensors")]):
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{path.name} {size}\n".encode())
                # gigabytes take minutes to hash; other weights differ everywhere, so samples suffice
                for start in range(0, size, max(_DIGEST_BYTES, size // _DIGEST_CHUNKS)):
                    file.seek(start)
                    digest.update(file.read(_DIGEST_BYTES))
        except OSError as error:
            raise ModelUnavailable(f"{path} cannot be read: {first_line(error)}", "restore the file") from error
    return digest.hexdigest()
