"""`rlvlm fetch`: its words, and what a user reads when the weights are there."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from rlvlm.errors import EXIT_DONE


@dataclass(frozen=True)
class FetchArguments:
    """Bring a judge's weights to this disk and try them as a machine without a network would."""

    model: tyro.conf.Positional[str]
    """Hub name such as Qwen/Qwen3-VL-8B-Instruct, or a folder that is only tried."""
    to: Path | None = None
    """Folder for the files; by default the hub's cache (HF_HOME), where runs find them by name."""
    revision: str = ""
    """Commit or branch of the hub; empty takes the newest."""
    backend: Literal["transformers", "vllm", "clip", "blip2"] = "transformers"
    """What will load them."""


def fetch_command(words: Sequence[str], prog: str) -> int:
    """`fetch MODEL [--to DIR]`."""
    arguments = tyro.cli(FetchArguments, args=words, prog=prog)
    from rlvlm.experiments.fetch import fetch, try_offline  # imports the hub's client

    found = fetch(arguments.model, arguments.revision, arguments.to)
    revision = "" if found.folder == Path(found.name) else arguments.revision  # a folder has no other
    if code := try_offline(found.name, revision, arguments.backend):
        return code
    sys.stdout.write(
        f"{found.name}: {found.num_bytes / 2**30:.2f} GiB in {found.folder}, loads without a network\n"
        f"use it with: --judge.backend {arguments.backend} --judge.model {found.name}"
        f"{f' --judge.revision {revision}' if revision else ''}\n"
    )
    return EXIT_DONE
