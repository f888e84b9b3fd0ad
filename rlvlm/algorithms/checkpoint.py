"""A state tree on disk: numbers and strings as JSON, arrays as npz, what learners hold as safetensors; nothing pickled.

A state tree, as returned by `get_state` methods, consists of dicts with string keys and lists, with arrays, numbers,
strings, booleans or None at the leaves. The folder gets its name only once it is complete and on disk, and every file
in it has a SHA-256 that is verified before anything is restored.

Tensors may lie in several files, `policy-00001-of-00002.safetensors`: each learner of a sharded policy writes its
slices, in the background, and the manifest comes last. Read in their order, the rows are those of the whole tensor, so
any number of learners can go on from them.

torch is loaded to read or write weights, not to search for an intact checkpoint.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlvlm.core.disk import replace_folder, sync_tree
from rlvlm.core.errors import FULL, MachineError, ModelUnavailable, NumericsError, RunError
from rlvlm.core.foreign import open_regular, read_arrays

if TYPE_CHECKING:  # --help imports this module's errors and should wait for neither
    import numpy as np
    import torch

POLICY, ADAM, START = "policy", "adam", "start"
"""Files of tensors: the policy's weights, also for evaluation and sharing; Adam's averages; weights at the start."""
_STATE, _ARRAYS, _CARD = "state.json", "arrays.npz", "policy.json"
_FILES = (_STATE, _ARRAYS, _CARD)
_TENSORS = re.compile(rf"({POLICY}|{ADAM}|{START})(-\d{{5}}-of-(\d{{5}}))?\.safetensors")
_CODES = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8"},
}
"""Names of torch's dtypes in a safetensors file."""
_CHUNK = 8 << 20
"""Bytes that are hashed and written at a time."""
_PIXELS = "pixels.bin"
"""File with the images of the tree's snapshots, for an env that cannot draw its past again."""
_ARRAY_MARK = "__array__"
MANIFEST = "manifest.json"
_Result = TypeVar("_Result")
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What came of a learner's part of a checkpoint."""

    digests: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 by file."""
    unwritten: Mapping[str, Mapping[str, "torch.Tensor"]] = field(default_factory=dict)
    """Tensors by name, by file, where the learner's machine does not see the folder."""
    error: str = ""
    """Why it could not be written: no exception, because one ends all learners, and they can do without it."""
    errno: int = 0
    """The error's number in the operating system."""


class Saving:
    """A checkpoint that is being written while its state may change again.

    Args:
        collect: returns whether the parts that others write are all on disk, and waits for them if called with True;
            called by the thread that owns the state.
        close: completes the checkpoint; called once, in a thread of its own.
    """

    def __init__(
        self, collect: Callable[[bool], bool] = lambda waits: True, close: Callable[[], None] = lambda: None
    ) -> None:
        self.collect, self.close = collect, close
        self._closing: Future[None] | None = None

    def has_ended(self, *, waits: bool) -> bool:
        """Returns whether the checkpoint is complete; with `waits` once it is.

        Raises:
            MachineError, OSError: it could not be written; older ones are unchanged.
            NumericsError: a weight of the policy is not finite.
        """
        if self._closing is None:
            if not self.collect(waits):
                return False
            self._closing = in_background(self.close)
        if not (waits or self._closing.done()):
            return False
        self._closing.result()
        return True


def in_background(work: Callable[[], _Result]) -> "Future[_Result]":
    """Starts `work` in a thread of its own."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


class TreeWriter:
    """Writes a checkpoint into the folder `partial`, which `close` renames to `folder`.

    A checkpoint of the same name is replaced only after the new one is on disk. Any error removes what was written.
    """

    def __init__(self, folder: Path) -> None:
        # beside the folder rather than in it: a rename within one file system is atomic
        self.folder = Path(folder).absolute()
        # no two tries share a name: a learner that outlived a killed run finds its folder gone, and one on a machine
        # without this disk no folder
        self.partial = self.folder.with_name(f".{self.folder.name}.{secrets.token_hex(4)}.partial")
        self._digests: dict[str, str] = {}
        with self.guarded():
            for left in self.folder.parent.glob(f".{self.folder.name}.*partial"):
                shutil.rmtree(left, ignore_errors=True)
            self.partial.mkdir(parents=True)

    def write(self, tree: dict[str, Any], kind: str, meta: Mapping[str, Any], owner: object = None) -> None:
        """Writes `tree`, and kind and arguments of the policy's network.

        Stored images of envs that cannot draw their past again are written with it if the tree has their snapshots; of
        the others, those older than the previous checkpoint and needed by no other `owner` are dropped. Arrays are
        written one by one, without a second copy of a replay in memory.

        Raises:
            MachineError: the disk is full or cannot be written.
        """
        import numpy as np

        from rlvlm.envs.pixels import PIXELS

        arrays: dict[str, np.ndarray] = {}
        with self.guarded():
            state = _flatten(tree, "", arrays)
            (self.partial / _STATE).write_text(json.dumps(state))
            (self.partial / _CARD).write_text(json.dumps({"kind": kind, "card": dict(meta)}, indent=1))
            np.savez(self.partial / _ARRAYS, allow_pickle=False, **arrays)
            if needed := PIXELS.known(arrays.values()):
                with open(self.partial / _PIXELS, "wb") as file:
                    PIXELS.write(file, needed)
            for name in (*_FILES, _PIXELS) if needed else _FILES:
                self._digests[name] = _digest(self.partial / name)
        if owner is not None:
            PIXELS.drop(owner, needed)

    def link(self, previous: Path, digests: Mapping[str, str]) -> bool:
        """Makes the files in `digests` those of the checkpoint in `previous`, by hard links, if it has the same;
        returns whether it did.
        """
        made: list[Path] = []
        if not digests:
            return False
        try:
            found = read_manifest(previous, digests)
            if any(found[name] != digest for name, digest in digests.items()):
                return False
            for name in digests:
                os.link(previous / name, self.partial / name)
                made.append(self.partial / name)
        except (CorruptCheckpoint, OSError):  # a file system without hard links: they are written anew
            for link in made:
                link.unlink()
            return False
        self._digests |= digests
        return True

    def close(self, digests: Mapping[str, str]) -> None:
        """Writes the manifest, of the tensors' files in `digests` too, and gives the folder its name.

        Raises:
            MachineError: the disk is full or cannot be written; previous files are unchanged.
        """
        with self.guarded():
            (self.partial / MANIFEST).write_text(json.dumps({**self._digests, **digests}, indent=1))
            sync_tree(self.partial)
            replace_folder(self.partial, self.folder)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Removes what was written if the block ends with an error, and reports a disk's as a MachineError."""
        try:
            yield
        except OSError as error:
            shutil.rmtree(self.partial, ignore_errors=True)
            cause = "the disk is full" if error.errno in FULL else str(error)
            raise MachineError(
                f"cannot write the checkpoint {self.folder}: {cause}",
                "free some disk space, then `rlvlm resume` from the last checkpoint",
            ) from error
        except BaseException:
            shutil.rmtree(self.partial, ignore_errors=True)
            raise


def save_tree(folder: Path, tree: dict[str, Any], policy: PolicyFile, owner: object = None) -> None:
    """Writes `tree` and the policy into `folder`, atomically, see `TreeWriter`.

    Raises:
        NumericsError: a weight of the policy is not finite.
        MachineError: the disk is full or cannot be written; previous files are unchanged.
    """
    writer = TreeWriter(folder)
    writer.write(tree, policy.kind, policy.meta, owner)
    with writer.guarded():
        digests = write_parts(writer.partial, {tensor_file(POLICY): policy.weights})
    writer.close(digests)


def tensor_file(kind: str, part: int = 0, num_parts: int = 1) -> str:
    """Returns the name of a file of tensors: of part number `part` of `num_parts`."""
    return f"{kind}.safetensors" if num_parts == 1 else f"{kind}-{part + 1:05d}-of-{num_parts:05d}.safetensors"


def marks(kind: str, names: Iterable[str]) -> dict[str, Any]:
    """Returns what stands in a state tree for tensors that are written to the files of `kind`, by name."""
    return {name: {_ARRAY_MARK: f"{kind}:{name}"} for name in names}


def write_parts(folder: Path, parts: Mapping[str, Mapping[str, "torch.Tensor"]]) -> dict[str, str]:
    """Writes files of tensors, by name, to disk in `folder`, and returns the SHA-256 of each.

    Raises:
        NumericsError: a weight of the policy is not finite.
        OSError: writing failed, or a file of the name is there.
    """
    for name, tensors in parts.items():
        odd = [each for each, value in tensors.items() if name.startswith(POLICY) and not bool(value.isfinite().all())]
        if odd:
            raise NumericsError(
                f"the policy is not saved: {', '.join(odd[:3])} and {len(odd)} of its {len(tensors)} parameters in all "
                "are not finite",
                "go on from the checkpoint before: `rlvlm resume`, with a smaller step size in the run's config.yaml",
            )
    return {name: write_tensors(tensors, folder / name) for name, tensors in parts.items()}


def write_tensors(tensors: Mapping[str, "torch.Tensor"], file: Path) -> str:
    """Writes a safetensors file to disk and returns its SHA-256, which is taken as it is written: safetensors' own
    writer makes a second copy of all tensors, and the file would be read again.

    Raises:
        OSError: writing failed, or there is such a file.
    """
    import torch

    # larger elements first, so that each tensor begins at a multiple of its element's size
    ordered = sorted(tensors.items(), key=lambda each: (-each[1].element_size(), each[0]))
    header, end = {}, 0
    for name, value in ordered:
        code = _CODES[str(value.dtype).removeprefix("torch.")]
        header[name] = {"dtype": code, "shape": [*value.shape], "data_offsets": [end, end + value.nbytes]}
        end += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(file, "xb") as stream:

        def put(content: Any) -> None:
            digest.update(content)
            stream.write(content)

        put(len(text).to_bytes(8, "little") + text)
        for _, value in ordered:
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            for begin in range(0, len(flat), _CHUNK):
                put(flat[begin : begin + _CHUNK])
        stream.flush()
        os.fsync(stream.fileno())
    return digest.hexdigest()


def read_tensors(folder: Path, kind: str, names: Iterable[str]) -> "dict[str, torch.Tensor]":
    """Returns the whole tensors of `kind` in `folder`, joined from those of its files among `names`.

    Raises:
        ValueError: a part is missing.
    """
    import torch
    from safetensors.torch import load_file

    matches = [match for match in map(_TENSORS.fullmatch, sorted(names)) if match and match[1] == kind]
    if matches and len(matches) != int(matches[0][3] or 1):
        raise ValueError(f"of the files of {kind} there are {len(matches)}, not {int(matches[0][3] or 1)}")
    parts: dict[str, list[torch.Tensor]] = {}
    for match in matches:
        for name, value in load_file(folder / match[0]).items():
            parts.setdefault(name, []).append(value)
    return {name: values[0] if len(values) == 1 else torch.cat(values) for name, values in parts.items()}


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
        state = (folder / _STATE).read_bytes()
        for kind in (POLICY, ADAM, START):
            if f'"{kind}:'.encode() not in state:
                continue  # not part of the tree, as the policy in other algorithms' checkpoints
            for name, value in read_tensors(folder, kind, digests).items():
                # NumPy has no bfloat16, and float32 represents it exactly
                is_coarse = str(value.dtype) == "torch.bfloat16"
                arrays[f"{kind}:{name}"] = (value.float() if is_coarse else value).numpy()
        return _unflatten(json.loads(state), arrays)


def load_policy_file(folder: Path, kind: str = "") -> PolicyFile:
    """Loads the policy saved in `folder`; apart from it reads only the manifest.

    Args:
        folder: folder of the checkpoint.
        kind: required kind; empty accepts any.

    Raises:
        CorruptCheckpoint: a file is missing, has changed since it was written, is not of a checkpoint, or contains
            another kind of policy.
    """
    folder = Path(folder)
    digests = _digests(folder)
    for name in digests:
        if name == _CARD or name.startswith(f"{POLICY}-") or name == tensor_file(POLICY):
            check_file(folder / name, digests[name])
    with corrupt_if_unreadable(folder):
        described = json.loads((folder / _CARD).read_bytes())
        if kind and described["kind"] != kind:
            raise ValueError(f"its policy is a {described['kind']}, not a {kind}")
        weights = read_tensors(folder, POLICY, digests)
        return PolicyFile(kind=described["kind"], meta=described["card"], weights=weights)


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


def _unflatten(node: Any, arrays: Mapping[str, "np.ndarray"]) -> Any:
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
    tensors = [name for name in digests if _TENSORS.fullmatch(name)]
    if set(digests) - {_PIXELS, *tensors} != {*_FILES} or not any(name.startswith(POLICY) for name in tensors):
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
