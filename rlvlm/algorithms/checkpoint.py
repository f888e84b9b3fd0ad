"""A state tree on disk: numbers and strings as JSON, arrays as npz, the policy as safetensors. Nothing is pickled.

A state tree, as returned by `get_state` methods, consists of dicts with string keys and lists, with arrays, numbers,
strings, booleans or None at the leaves. The folder gets its name only once it is complete and on disk, and every file
in it has a SHA-256 that is verified before anything is restored.

torch is loaded to read or write weights, not to search for an intact checkpoint.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from rlvlm.core.disk import replace_folder, sync_tree
from rlvlm.core.errors import FULL, MachineError, ModelUnavailable, NumericsError, RunError
from rlvlm.core.foreign import open_regular, read_arrays

if TYPE_CHECKING:  # --help imports this module's errors and should wait for neither
    import numpy as np
    import torch

POLICY_FILE = "policy.safetensors"
"""File of the policy's weights alone, for evaluation and sharing."""
_STATE, _ARRAYS, _CARD = "state.json", "arrays.npz", "policy.json"
_FILES = (_STATE, _ARRAYS, POLICY_FILE, _CARD)
_PIXELS = "pixels.bin"
"""File with the images of the tree's snapshots, for an env that cannot draw its past again."""
_ARRAY_MARK = "__array__"
MANIFEST = "manifest.json"
_OLDER = "`rlvlm resume` goes on from the newest sound checkpoint of the run; others can be named as its folder"


class CorruptCheckpoint(RunError):  # noqa: N818 - named for what is found
    """A checkpoint's file is missing or has changed since it was written."""

    exit_code = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyFile:
    """A policy's weights, and the arguments to rebuild its network."""

    kind: str
    """Name of its builder, e.g. `squashed_gaussian`."""
    weights: Mapping[str, "torch.Tensor"]
    """Weights by name, as in a `state_dict`."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the builder, JSON-able."""


def save_tree(folder: Path, tree: dict[str, Any], policy: PolicyFile, owner: Any = None) -> None:
    """Writes `tree` and the policy into `folder`, atomically.

    Stored images of envs that cannot draw their past again are written with it if the tree has their snapshots; of the
    others, those older than the previous checkpoint and needed by no other `owner` are dropped.

    A checkpoint of the same name is replaced only after the new one is on disk. Arrays are written one by one, without
    a second copy of a replay in memory.

    Raises:
        NumericsError: a weight of the policy is not finite.
        MachineError: the disk is full or cannot be written; previous files are unchanged.
    """
    if odd := [name for name, value in policy.weights.items() if not bool(value.isfinite().all())]:
        raise NumericsError(
            f"the policy is not saved: {', '.join(odd[:3])} and {len(odd)} of its {len(policy.weights)} parameters in "
            "all are not finite",
            "go on from the checkpoint before: `rlvlm resume`, with a smaller step size in the run's config.yaml",
        )
    import numpy as np

    from rlvlm.envs.pixels import PIXELS

    # beside the folder rather than in it: a rename within one file system is atomic
    folder = Path(folder).absolute()
    partial = folder.with_name(f".{folder.name}.partial")
    arrays: dict[str, np.ndarray] = {}
    state = _flatten(tree, "", arrays)
    weights = {name: value.detach().cpu().contiguous() for name, value in policy.weights.items()}
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / _STATE).write_text(json.dumps(state))
        (partial / _CARD).write_text(json.dumps({"kind": policy.kind, "card": dict(policy.meta)}, indent=1))
        np.savez(partial / _ARRAYS, allow_pickle=False, **arrays)
        write_tensors(weights, partial / POLICY_FILE)
        if needed := PIXELS.known(arrays.values()):
            with open(partial / _PIXELS, "wb") as file:
                PIXELS.write(file, needed)
        write_manifest(partial, (*_FILES, _PIXELS) if needed else _FILES)
        sync_tree(partial)
        replace_folder(partial, folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        cause = "the disk is full" if error.errno in FULL else str(error)
        raise MachineError(
            f"cannot write the checkpoint {folder}: {cause}",
            "free some disk space, then `rlvlm resume` from the last checkpoint",
        ) from error
    if owner is not None:
        PIXELS.drop(owner, needed)


def write_tensors(weights: Mapping[str, "torch.Tensor"], file: Path) -> None:
    """Writes a safetensors file.

    Raises:
        OSError: writing failed; replaces safetensors' own error.
    """
    from safetensors.torch import save_file

    try:
        save_file(dict(weights), file)
    except SafetensorError as error:
        # "No space left on device (os error 28)": the number is only in the text
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error


def load_tree(folder: Path) -> dict[str, Any]:
    """Loads the tree saved in `folder`; the images of its snapshots are stored from now on.

    Raises:
        CorruptCheckpoint: a file is missing, has changed since it was written, or is not of a checkpoint.
    """
    folder = Path(folder)
    digests = _digests(folder)
    for name, digest in digests.items():
        check_file(folder / name, digest)
    # digests only prove that the files are unchanged, not that we wrote them
    with corrupt_if_unreadable(folder):
        if _PIXELS in digests:
            from rlvlm.envs.pixels import PIXELS

            with open_regular(folder / _PIXELS) as file:
                PIXELS.read(file)
        arrays = read_arrays(folder / _ARRAYS, is_compressed=False)
        return _unflatten(json.loads((folder / _STATE).read_bytes()), arrays)


def load_policy_file(folder: Path, kind: str = "") -> PolicyFile:
    """Loads the policy saved in `folder`; apart from it reads only the manifest.

    Args:
        folder: folder of the checkpoint.
        kind: required kind; empty accepts any.

    Raises:
        CorruptCheckpoint: a file is missing, has changed since it was written, is not of a checkpoint, or contains
            another kind of policy.
    """
    from safetensors.torch import load_file as load_safetensors

    folder = Path(folder)
    digests = _digests(folder)
    for name in (POLICY_FILE, _CARD):
        check_file(folder / name, digests[name])
    with corrupt_if_unreadable(folder):
        described = json.loads((folder / _CARD).read_bytes())
        if kind and described["kind"] != kind:
            raise ValueError(f"its policy is a {described['kind']}, not a {kind}")
        return PolicyFile(
            kind=described["kind"], meta=described["card"], weights=load_safetensors(folder / POLICY_FILE)
        )


@contextmanager
def corrupt_if_unreadable(
    folder: Path,
    holds: str = "checkpoint of ours",
    fix: str = "use a checkpoint that rlvlm wrote; nothing of this one was run",
) -> Iterator[None]:
    """Reports checkpoints with valid digests but unusable content: another program's, or an attack.

    Args:
        folder: folder that is read in the context.
        holds: its expected content, for the message.
        fix: what to do.

    Raises:
        CorruptCheckpoint: any error raised in the context.
        ModelUnavailable: passed on unchanged: the large model that the checkpoint belongs to is missing.
    """
    try:
        yield
    except ModelUnavailable:
        raise
    except Exception as error:  # foreign files break readers and networks in many ways, from JSON and zip to torch
        reason = " ".join(str(error).split())[:200]
        raise CorruptCheckpoint(f"{folder} holds no {holds}: {type(error).__name__} {reason}", fix) from error


def _flatten(node: Any, path: str, arrays: "dict[str, np.ndarray]") -> Any:
    """Returns a JSON-able copy of `node` whose arrays are moved into `arrays` under their path."""
    import numpy as np

    if isinstance(node, dict):
        assert all(isinstance(key, str) for key in node), f"a state tree's keys are strings, got {list(node)} at {path}"
        return {key: _flatten(value, f"{path}/{key}", arrays) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_flatten(value, f"{path}/{index}", arrays) for index, value in enumerate(node)]
    if hasattr(node, "detach"):  # a tensor
        node = node.detach().cpu().numpy()
    if isinstance(node, np.generic):  # a NumPy scalar, which JSON cannot encode
        node = node.item()
    if isinstance(node, np.ndarray):
        assert node.dtype != object, f"a state tree holds no arrays of objects, got one at {path}"
        arrays[path] = node
        return {_ARRAY_MARK: path}
    assert node is None or isinstance(node, bool | int | float | str), f"cannot save {type(node)} at {path}"
    return node


def _unflatten(node: Any, arrays: Any) -> Any:
    """Rebuilds the tree from `_flatten`'s results; tuples become lists."""
    if isinstance(node, list):
        return [_unflatten(value, arrays) for value in node]
    if not isinstance(node, dict):
        return node
    if _ARRAY_MARK in node:
        return arrays[node[_ARRAY_MARK]]
    return {key: _unflatten(value, arrays) for key, value in node.items()}


def _digests(folder: Path) -> dict[str, str]:
    """Reads the manifest.

    Raises:
        CorruptCheckpoint: it is missing, or lists something else.
    """
    digests = read_manifest(folder, _FILES)
    if set(digests) - {_PIXELS} != {*_FILES}:
        raise CorruptCheckpoint(f"{folder} holds no checkpoint of ours: {sorted(digests)}", "use one that rlvlm wrote")
    return digests


def write_manifest(folder: Path, names: Iterable[str]) -> None:
    """Writes a manifest of the files `names` in `folder`; the caller syncs."""
    (folder / MANIFEST).write_text(json.dumps({name: _digest(folder / name) for name in names}, indent=1))


def read_manifest(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns SHA-256 by name of the files that `folder` was written with.

    Args:
        folder: folder of the manifest.
        names: files that must be listed; others are listed if another program wrote the folder.

    Raises:
        CorruptCheckpoint: there is no manifest, or it lists other files.
    """
    file = folder / MANIFEST
    try:
        digests = json.loads(file.read_bytes())
    except OSError as error:
        raise CorruptCheckpoint(f"cannot read {file}: {error.strerror}", _OLDER) from error
    except ValueError:
        digests = None
    if not isinstance(digests, dict) or not set(names) <= set(digests):
        raise CorruptCheckpoint(f"{file} is not a manifest that lists the checkpoint's files", _OLDER)
    return digests


def check_file(path: Path, digest: str) -> None:
    """Raises unless the file at `path` is unchanged since it was written.

    Raises:
        CorruptCheckpoint: it is missing, or its content differs.
    """
    try:
        found = _digest(path)
    except OSError as error:
        raise CorruptCheckpoint(f"cannot read {path}: {error.strerror}", _OLDER) from error
    if found != digest:
        raise CorruptCheckpoint(f"{path} is damaged: its SHA-256 differs from the manifest's", _OLDER)


def check_folder(folder: Path) -> None:
    """Raises unless every file listed in the manifest of `folder` is unchanged.

    Raises:
        CorruptCheckpoint: a file is not; the message names it.
    """
    for name, digest in read_manifest(folder, ()).items():
        check_file(folder / name, digest)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
