"""`rlvlm fetch`: a judge's weights for machines without a network, tried as such a machine would load them."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from rlvlm.core.console.arguments import parse, print_progress
from rlvlm.core.console.boxes import guarded
from rlvlm.core.errors import EXIT_DONE, JudgeUnavailable, MachineError, UsageError, first_line
from rlvlm.core.guests import guest_of
from rlvlm.judges.config import JudgeConfig, backends
from rlvlm.vlms.config import MODEL_FILES
from rlvlm.vlms.files import download_note, is_here

CHAT_BACKENDS = ("transformers", "vllm")
"""Backends whose models are tried without memory for their weights; the other models are small and are loaded."""


@dataclass(frozen=True)
class FetchArguments:
    """Download a judge's weights to this disk and try them as a machine without a network would."""

    model: tyro.conf.Positional[str]
    """Hub name such as Qwen/Qwen3-VL-8B-Instruct, or a folder that is only tried."""
    to: Path | None = None
    """Folder for the files; by default the hub's cache (HF_HOME), where runs find them by name."""
    revision: str = ""
    """Commit or branch of the hub; empty takes the newest."""
    backend: str = "transformers"
    """Backend that will load them, one of `judge.backend` with weights of its own."""

    def __post_init__(self) -> None:
        known = [name for name, backend in backends().items() if backend.wants_weights]
        if self.backend not in known:
            missing = guest_of("judges", self.backend)
            raise ValueError(f"--backend is one of {', '.join(known)}, got {self.backend!r}{missing}")


def command(words: Sequence[str], prog: str) -> int:
    """Runs `fetch MODEL [--to DIR]`: prints the folder, and the options that use it."""
    arguments = parse(FetchArguments, words, prog)
    folder, name = fetch(arguments.model, arguments.revision, arguments.to)
    num_bytes = sum(file.stat().st_size for pattern in MODEL_FILES for file in folder.glob(pattern))
    if not num_bytes:
        raise JudgeUnavailable(f"{folder} has no judge's files", "name a folder with config.json and weights")
    revision = "" if folder == Path(name) else arguments.revision  # a folder has no other
    # in a process without network and GPU, which reports errors itself
    known = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": ""}
    if code := subprocess.run(
        [sys.executable, "-m", __name__, name, revision, arguments.backend], env=known
    ).returncode:
        return code
    sys.stdout.write(
        f"{name}: {num_bytes / 2**30:.2f} GiB in {folder}, loads without a network\n"
        f"use it with: --judge.backend {arguments.backend} --judge.model {name}"
        f"{f' --judge.revision {revision}' if revision else ''}\n"
    )
    return EXIT_DONE


def fetch(model: str, revision: str, to: Path | None) -> tuple[Path, str]:
    """Downloads a model's files to this disk, except for existing ones.

    Args:
        model: hub name, or a folder, which stays unchanged.
        revision: commit or branch; empty takes the newest.
        to: folder for the files; None for the hub's cache, where runs find them by name.

    Returns:
        Folder of the files, and the model's name for `--judge.model`.

    Raises:
        UsageError: the hub has no such model or revision, or wants a login.
        MachineError: the hub cannot be reached, or the disk refuses.
    """
    local = Path(model).expanduser()
    if local.is_dir():
        return local.absolute(), str(local.absolute())
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise UsageError(
            f"there is no folder {model}, and a hub name has the form OWNER/NAME",
            "rlvlm fetch Qwen/Qwen3-VL-8B-Instruct",
        )
    if constants.HF_HUB_OFFLINE:
        raise MachineError("HF_HUB_OFFLINE is set, so nothing is fetched", "unset HF_HUB_OFFLINE")
    target = to.expanduser().absolute() if to else None
    try:
        if to is not None or not is_here(model, revision):
            print_progress(download_note(JudgeConfig(backend="transformers", model=model, revision=revision)))
        folder = snapshot_download(model, revision=revision or None, allow_patterns=list(MODEL_FILES), local_dir=target)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        what = f"the hub has no {f'{model} at {revision}' if revision else model} that you may read"
        raise UsageError(what, "check the name; for gated models: hf auth login") from error
    except HfHubHTTPError as error:
        what = f"the hub refuses {model}: {first_line(error)}"
        raise MachineError(what, "try again later; for gated models: hf auth login") from error
    except (OSError, ValueError) as error:
        what = f"{model} could not be fetched from {constants.ENDPOINT}: {first_line(error)}"
        fix = "run it where there is a network, such as a login node; partial downloads are kept"
        raise MachineError(what, fix) from error
    return Path(folder), str(target) if target else model


def _try(name: str, revision: str, backend: str) -> int:
    """Loads everything that a judge of `backend` loads; for chat models without the values of the weights.

    Raises:
        JudgeUnavailable: files are missing or damaged, or are not a judge's.
    """
    from rlvlm.judges.build import build_judge  # only this process needs torch
    from rlvlm.vlms.loading import load_vlm

    if backend in CHAT_BACKENDS:
        # on the meta device: names, shapes and the processor are checked without memory for the weights
        load_vlm(JudgeConfig(backend="transformers", model=name, revision=revision, device="meta"))
    else:
        build_judge(JudgeConfig(backend=backend, model=name, revision=revision))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(lambda: _try(*sys.argv[1:])))
