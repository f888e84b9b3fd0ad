"""A state tree on disk: numbers and words as JSON, arrays as npz, the policy as safetensors. Nothing is pickled.

A state tree is what the rooms' `get_state` methods return: dicts with string keys and lists, with arrays, numbers,
strings, booleans or None at the leaves. The folder appears under its name only once it is complete and on disk, and
every file in it carries a SHA-256 that is verified before anything is restored.
"""

import errno
import hashlib
import io
import json
import math
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from rlvlm.disk import replace_folder, sync_tree
from rlvlm.errors import MachineError, RunError
from rlvlm.policies.squashed_gaussian import SquashedGaussian

POLICY_FILE = "policy.safetensors"
"""The policy's weights alone, for evaluation and sharing."""
_MANIFEST, _STATE, _ARRAYS = "manifest.json", "state.json", "arrays.npz"
_ARRAY_MARK = "__array__"
_OLDER = "resume from an older checkpoint of the run"


class CorruptCheckpoint(RunError):  # noqa: N818 - named for what is found, as in the other rooms
    """A checkpoint's file is missing or differs from what was written."""

    exit_code = 3


def save_tree(folder: Path, tree: dict[str, Any], policy: SquashedGaussian) -> None:
    """Writes `tree` and the policy into `folder`, which appears complete or not at all.

    A checkpoint of the same name is replaced only after the new one is on disk.

    Raises:
        MachineError: the disk is full or cannot be written; what was there before is untouched.
    """
    folder = Path(folder).absolute()
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        digests = {}
        for name, content in _files(tree, policy).items():
            (partial / name).write_bytes(content)
            digests[name] = hashlib.sha256(content).hexdigest()
        (partial / _MANIFEST).write_text(json.dumps(digests, indent=1))
        sync_tree(partial)
        replace_folder(partial, folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        cause = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
        raise MachineError(
            f"cannot write the checkpoint {folder}: {cause}",
            "free some disk space, then `rlvlm resume` from the last checkpoint",
        ) from error


def load_tree(folder: Path) -> dict[str, Any]:
    """The tree that was saved in `folder`.

    Raises:
        CorruptCheckpoint: a file is missing, differs from what was written, or never was of a checkpoint.
    """
    folder = Path(folder)
    contents = {name: _read(folder, name, digest) for name, digest in _digests(folder).items()}
    with _believed(folder):
        return _unflatten(json.loads(contents[_STATE]), _load_arrays(contents[_ARRAYS]))


def load_policy(folder: Path) -> SquashedGaussian:
    """The policy that was saved in `folder`; reads nothing else but the manifest.

    Raises:
        CorruptCheckpoint: a file is missing, differs from what was written, or never was of a checkpoint.
    """
    folder = Path(folder)
    content = _read(folder, POLICY_FILE, _digests(folder)[POLICY_FILE])
    with _believed(folder):
        weights = load_safetensors(content)
        shapes = [weights[f"layers.{depth}.weight"].shape for depth in range(len(weights) // 2)]
        policy = SquashedGaussian(shapes[0][1], shapes[-1][0] // 2, [shape[0] for shape in shapes[:-1]])
        policy.load_state_dict(weights)
    return policy


@contextmanager
def _believed(folder: Path) -> Iterator[None]:
    """Names a checkpoint whose files are as the manifest says and still make no sense: somebody else's, or an attack.

    Raises:
        CorruptCheckpoint: whatever went wrong inside.
    """
    try:
        yield
    except Exception as error:  # strange files break readers in any way, from JSON to zip
        reason = " ".join(str(error).split())[:200]
        raise CorruptCheckpoint(
            f"{folder} holds no checkpoint of ours: {type(error).__name__} {reason}",
            "use a checkpoint that rlvlm wrote; nothing of this one was run",
        ) from error


def _load_arrays(content: bytes) -> dict[str, np.ndarray]:
    """The arrays of an npz that bring every byte they claim: no pickles, nothing compressed, nothing unpacked.

    Raises:
        ValueError: a member is anything else.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("its arrays are compressed, which ours are not")
        if sum(member.file_size for member in members) > len(content):
            raise ValueError("its arrays claim more bytes than the file has")
        return {member.filename.removesuffix(".npy"): _load_array(archive.read(member)) for member in members}


def _load_array(content: bytes) -> np.ndarray:
    stream = io.BytesIO(content)
    read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[npy.read_magic(stream)]
    shape, is_fortran, dtype = read_header(stream)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(content) - stream.tell():
        raise ValueError(f"an array of shape {shape} and type {dtype} does not fit its bytes")
    flat = np.frombuffer(content, dtype, offset=stream.tell())
    return flat.reshape(shape, order="F" if is_fortran else "C").copy(order="K")


def _files(tree: dict[str, Any], policy: SquashedGaussian) -> dict[str, bytes]:
    """The checkpoint's files by name."""
    arrays: dict[str, np.ndarray] = {}
    state = json.dumps(_flatten(tree, "", arrays)).encode()
    packed = io.BytesIO()
    np.savez(packed, allow_pickle=False, **arrays)
    weights = {name: value.detach().cpu().contiguous() for name, value in policy.state_dict().items()}
    return {_STATE: state, _ARRAYS: packed.getvalue(), POLICY_FILE: save_safetensors(weights)}


def _flatten(node: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
    """A JSON-able copy of `node` whose arrays are moved into `arrays` under their path."""
    if isinstance(node, dict):
        assert all(isinstance(key, str) for key in node), f"a state tree's keys are strings, got {list(node)} at {path}"
        return {key: _flatten(value, f"{path}/{key}", arrays) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_flatten(value, f"{path}/{index}", arrays) for index, value in enumerate(node)]
    if isinstance(node, torch.Tensor):
        node = node.detach().cpu().numpy()
    if isinstance(node, np.generic):
        node = node.item()
    if isinstance(node, np.ndarray):
        assert node.dtype != object, f"a state tree holds no arrays of objects, got one at {path}"
        arrays[path] = node
        return {_ARRAY_MARK: path}
    assert node is None or isinstance(node, bool | int | float | str), f"cannot save {type(node)} at {path}"
    return node


def _unflatten(node: Any, arrays: Any) -> Any:
    """The tree of which `_flatten` made `node` and `arrays`; tuples come back as lists."""
    if isinstance(node, list):
        return [_unflatten(value, arrays) for value in node]
    if not isinstance(node, dict):
        return node
    if _ARRAY_MARK in node:
        return arrays[node[_ARRAY_MARK]]
    return {key: _unflatten(value, arrays) for key, value in node.items()}


def _digests(folder: Path) -> dict[str, str]:
    """The manifest: SHA-256 of each of the checkpoint's files."""
    try:
        digests = json.loads(_read(folder, _MANIFEST))
    except ValueError:
        digests = None
    if not isinstance(digests, dict) or set(digests) != {_STATE, _ARRAYS, POLICY_FILE}:
        raise CorruptCheckpoint(f"{folder / _MANIFEST} is not a manifest that lists the checkpoint's files", _OLDER)
    return digests


def _read(folder: Path, name: str, digest: str | None = None) -> bytes:
    """A file's content, verified when `digest` is given."""
    path = folder / name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CorruptCheckpoint(f"cannot read {path}: {error.strerror}", _OLDER) from error
    if digest is not None and hashlib.sha256(content).hexdigest() != digest:
        raise CorruptCheckpoint(f"{path} is not what was written: its SHA-256 differs from the manifest's", _OLDER)
    return content
