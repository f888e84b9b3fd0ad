"""Location and identity of a model's files. Used by every engine; imports no torch."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download

from rlvlm.core.errors import ModelUnavailable, first_line
from rlvlm.core.foreign import open_regular
from rlvlm.vlms.config import MODEL_FILES

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
