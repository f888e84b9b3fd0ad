"""Images of envs that cannot draw their past again: kept compressed, once each, under a key that is the snapshot.

A robot, a recorded video, a simulator on a GPU and most Gymnasium envs give the images of a moment to `keep`, and get
a snapshot for them: a digest, five numbers. Replays, queries, episodes and pages store and compare that one as they do
any env's, and `draw` looks the images up. So nothing above the envs knows which kind of env it has.

Images lie in a temporary file of the process, `PIXELS`, which is shared by all its envs. What another process needs
(`write`, `read`) travels with the episodes; checkpoints and folders of demonstrations hold the images of their
snapshots; those that nothing needs any more are dropped after a checkpoint.
"""

import io
import struct
import tempfile
import threading
from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import IO, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rlvlm.core.errors import FULL, MachineError, RunError, UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.env import place_of

SNAPSHOT_SIZE = 5
"""S: a digest of 120 bits, 24 in each number, which float32 holds exactly."""
_SIZE = struct.Struct("<I")
_MAX_ENTRY_BYTES = 2**26
_MAX_PX = 4096
_MAX_LOSSLESS_PX = 96
"""Images of so many pixels squared and fewer are PNGs, larger ones JPEGs of quality 95."""
_WASTE_BYTES = 2**24
"""Dropped images may take so much of the file before it is written anew."""


class _Entry(NamedTuple):
    begin: int
    """Offset of its bytes in the file."""
    size: int
    number: int
    """Counts what was kept; that of its newest time."""


class _Owner(NamedTuple):
    needed: frozenset[bytes]
    """Keys of its newest checkpoint."""
    before: int
    """Number of the newest entry when the checkpoint before that one was made."""
    newest: int
    """The same, of the newest checkpoint."""


class PixelStore:
    """Images by key, in a file that is gone with the process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._entries: dict[bytes, _Entry] = {}
        self._file: IO[bytes] | None = None
        self._end = self._number = 0
        self._owners: WeakKeyDictionary[Any, _Owner] = WeakKeyDictionary()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, content: bytes) -> FloatArray:
        """Keeps the images of a moment, as `encode` gives them; returns their snapshot [S].

        Raises:
            MachineError: the disk is full.
        """
        packed = np.frombuffer(blake2b(content, digest_size=3 * SNAPSHOT_SIZE).digest(), np.uint8).reshape(-1, 3)
        snapshot = (packed @ np.array([2**16, 2**8, 1])).astype(np.float32)
        key = snapshot.tobytes()
        with self._lock:
            self._number += 1
            if key in self._entries:  # moved to the end too: the order is that of age
                self._entries[key] = self._entries.pop(key)._replace(number=self._number)
                return snapshot
            try:
                self._file = self._file or tempfile.TemporaryFile(prefix="rlvlm-pixels-")  # noqa: SIM115 - kept open
                self._file.seek(self._end)
                self._file.write(content)
                self._file.flush()
            except OSError as error:
                if error.errno not in FULL:
                    raise
                folder = tempfile.gettempdir()
                raise MachineError(
                    f"the disk of {folder} is full: {len(self)} images of an env that cannot draw its past again take "
                    f"{self._end >> 20} MiB",
                    "set TMPDIR to a folder on a larger disk, or lower --env.view-px",
                ) from error
            self._entries[key] = _Entry(self._end, len(content), self._number)
            self._end += len(content)
        return snapshot

    def get(self, snapshot: FloatArray) -> bytes:
        """The image kept for a snapshot [S].

        Raises:
            RunError: nothing was, or it was dropped.
        """
        with self._lock:
            entry = self._entries.get(np.asarray(snapshot, np.float32).tobytes())
            if entry is None or self._file is None:
                raise RunError(
                    "the image of a moment is not kept here: its env cannot draw it again",
                    "go on from a checkpoint (rlvlm resume), which brings the images that it needs",
                )
            self._file.seek(entry.begin)
            return self._file.read(entry.size)

    def known(self, arrays: Iterable[Any]) -> frozenset[bytes]:
        """Keys of the kept images whose snapshots [..., S] stand anywhere in `arrays`."""
        found: set[bytes] = set()
        for array in arrays if self._entries else ():
            if isinstance(array, np.ndarray) and array.dtype == np.float32 and array.shape[-1:] == (SNAPSHOT_SIZE,):
                found.update(np.ascontiguousarray(array).view(f"V{4 * SNAPSHOT_SIZE}").ravel().tolist())
        with self._lock:
            return frozenset(found & self._entries.keys())

    def write(self, stream: IO[bytes], keys: frozenset[bytes]) -> None:
        """Writes the images of `keys` for `read`, the oldest first."""
        with self._lock:
            for key in [key for key in self._entries if key in keys]:
                content = self.get(np.frombuffer(key, np.float32))
                stream.write(_SIZE.pack(len(content)) + content)

    def read(self, stream: IO[bytes]) -> None:
        """Keeps what `write` wrote; keys follow from the content, so that an image cannot be filed under another's.

        Raises:
            ValueError: the stream is torn.
        """
        while head := stream.read(_SIZE.size):
            size = _SIZE.unpack(head)[0] if len(head) == _SIZE.size else 0
            content = stream.read(size) if 0 < size <= _MAX_ENTRY_BYTES else b""
            if len(content) != size or not content:
                raise ValueError("the kept images are torn")
            self.add(content)

    def pack(self, arrays: Iterable[Any]) -> bytes:
        """The images of the snapshots in `arrays` for another process, which calls `unpack`; empty where there are
        none.
        """
        stream = io.BytesIO()
        self.write(stream, self.known(arrays))
        return stream.getvalue()

    def unpack(self, packed: bytes) -> None:
        """Keeps what `pack` or `take_all` gave."""
        self.read(io.BytesIO(packed))

    def take_all(self) -> bytes:
        """All images for another process, and none is kept here any more: for workers that play and never look back."""
        with self._lock:
            stream = io.BytesIO()
            self.write(stream, frozenset(self._entries))
            self.clear()
            return stream.getvalue()

    def clear(self) -> None:
        """Drops everything."""
        with self._lock:
            self._entries.clear()
            self._end = 0
            if self._file is not None:
                self._file.truncate(0)

    def register(self, owner: Any) -> None:
        """From now on nothing is dropped that `owner` may need, until `release` or its end."""
        self._owners.setdefault(owner, _Owner(frozenset(), 0, 0))

    def release(self, owner: Any) -> None:
        """`owner` needs nothing any more."""
        self._owners.pop(owner, None)

    def drop(self, owner: Any, needed: frozenset[bytes]) -> None:
        """Drops what no owner's newest checkpoint needs and what was kept before the one before it: what is younger
        may still be looked at, such as the episodes of the last evaluation.

        Args:
            owner: has just saved a checkpoint.
            needed: keys of all snapshots in it: without anything else its run could go on.
        """
        with self._lock:
            self.register(owner)
            self._owners[owner] = _Owner(needed, self._owners[owner].newest, self._number)
            oldest = min(own.before for own in self._owners.values())
            kept = frozenset().union(*(own.needed for own in self._owners.values()))
            for key in [key for key, entry in self._entries.items() if entry.number <= oldest and key not in kept]:
                del self._entries[key]
            if self._end - sum(entry.size for entry in self._entries.values()) > max(_WASTE_BYTES, self._end // 2):
                self._compact()

    def _compact(self) -> None:
        """Writes the file anew without what was dropped; where the disk has no room for that, it stays as it is."""
        assert self._file is not None, "there is something to drop"
        entries, end = {}, 0
        try:
            new = tempfile.TemporaryFile(prefix="rlvlm-pixels-")  # noqa: SIM115 - kept open
            for key, entry in self._entries.items():
                self._file.seek(entry.begin)
                new.write(self._file.read(entry.size))
                entries[key] = entry._replace(begin=end)
                end += entry.size
            new.flush()
        except OSError:
            return
        self._file.close()
        self._file, self._entries, self._end = new, entries, end


PIXELS = PixelStore()
"""The images of this process."""


def encode(images: Sequence[NDArray[np.uint8]]) -> bytes:
    """The images [H, W, 3] of the cameras of one moment, compressed: small ones without loss."""
    parts = []
    for image in images:
        pil_image, data = Image.fromarray(np.ascontiguousarray(image)), io.BytesIO()
        # a PNG of 300 x 300 pixels takes 2 ms, and 9 ms of a photograph, which it hardly shrinks; a JPEG takes 0.5 ms
        if image.size <= _MAX_LOSSLESS_PX**2 * 3:
            pil_image.save(data, "png", compress_level=1)
        else:
            pil_image.save(data, "jpeg", quality=95, subsampling=0)
        parts.append(data.getvalue())
    return b"".join(_SIZE.pack(len(part)) + part for part in parts)


def decode(content: bytes, camera: int) -> NDArray[np.uint8]:
    """The image [H, W, 3] of one of the cameras, counted from 0.

    Raises:
        RunError: the content is not what `encode` gave.
    """
    try:
        for _ in range(camera):
            content = content[_SIZE.size + _SIZE.unpack_from(content)[0] :]
        part = content[_SIZE.size :][: _SIZE.unpack_from(content)[0]]
        image = Image.open(io.BytesIO(part), formats=["PNG", "JPEG"])
        # only the header has been read by now: a small file can promise any number of pixels
        if max(image.size) > _MAX_PX or image.mode != "RGB":
            raise ValueError(f"at most {_MAX_PX} x {_MAX_PX} pixels in RGB are wanted, got {image.mode} {image.size}")
        return np.asarray(image)
    except (OSError, SyntaxError, ValueError, struct.error, Image.DecompressionBombError) as error:
        fix = "go on without the folder that it came with, or collect it anew"
        raise RunError(f"a kept image cannot be read: {error}", fix) from error


class KeptPixels:
    """The images that one env gives.

    Args:
        source: the env's class, for messages.
    """

    def __init__(self, source: type) -> None:
        self._source = source
        self._shapes: list[tuple[int, ...]] = []
        self._num_kept = self._num_bytes = 0
        self.newest: FloatArray = np.zeros(SNAPSHOT_SIZE, np.float32)
        """[S] the snapshot of the images kept last."""

    def keep(self, images: Sequence[NDArray[np.uint8]]) -> FloatArray:
        """Keeps the images [H, W, 3] of all cameras of a moment; returns the snapshot [S] that stands for them.

        Raises:
            UsageError: one of them is no such image, or of another size than before.
        """
        shapes = [np.shape(image) for image in images]
        is_wrong = any(len(shape) != 3 or shape[2] != 3 or 0 in shape or max(shape) > _MAX_PX for shape in shapes)
        if not shapes or is_wrong or any(np.asarray(image).dtype != np.uint8 for image in images):
            got = ", ".join(f"{np.asarray(image).dtype} {shape}" for image, shape in zip(images, shapes, strict=True))
            self._refuse(f"an image must be [H, W, 3] of uint8, at most {_MAX_PX} pixels wide and high; got {got}")
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            before, now = (" and ".join(f"{w} x {h}" for h, w, _ in each) for each in (self._shapes, shapes))
            self._refuse(f"images must keep their size; got {now} pixels after {before}")
        content = encode(images)
        self._num_kept += 1
        self._num_bytes += len(content)
        self.newest = PIXELS.add(content)
        return self.newest

    def draw(self, snapshots: FloatArray, height: int, width: int, camera: int = 0) -> Frames:
        """Images [N, height, width, 3] of `snapshots` [N, S] by a camera, counted from 0."""
        frames = np.empty((len(snapshots), height, width, 3), np.uint8)
        for frame, snapshot in zip(frames, snapshots, strict=True):
            frame[:] = resized(decode(PIXELS.get(snapshot), camera), height, width)
        return frames

    @property
    def note(self) -> str:
        """The kept images and their size, in words; measured on what was kept so far."""
        sizes = " and ".join(f"{w} x {h}" for h, w, _ in self._shapes) or "no"
        each = self._num_bytes / max(self._num_kept, 1)
        return (
            f"the env cannot draw a past moment again, so {sizes} pixels of each are kept, compressed in a temporary "
            f"file: about {each / 1e3:.1f} KB a moment, {each * 20_000 / 1e6:,.0f} MB for 20,000"
        )

    def _refuse(self, what: str) -> None:
        where = f"the env {self._source.__name__} ({place_of(self._source)})"
        raise UsageError(f"{where}: {what}", "scale every image to one size in the env: docs/own_env.md")


class PixelEnv:
    """Mixed into an env of any kind that cannot draw its past again: `class Robot(PixelEnv, ChunkEnv)`.

    The env gives each moment's images to `keep`, at reset, after each step and in `set_state`, and puts the snapshot
    that it gets wherever its kind wants one. Everything else about images is done here.
    """

    snapshot_size = SNAPSHOT_SIZE
    grain = 1.0

    @cached_property
    def pixels(self) -> KeptPixels:
        """The kept images of this env."""
        return KeptPixels(type(self))

    def keep(self, *images: NDArray[np.uint8]) -> FloatArray:
        """Keeps the images [H, W, 3] uint8 of the present moment, one of each of `cameras` where an env has these, and
        returns the snapshot [S] that stands for them.

        Raises:
            UsageError: one of them is no such image, or of another size than before.
        """
        return self.pixels.keep(images).copy()

    def snapshot(self) -> FloatArray:
        """[S] of the images that were kept last."""
        return self.pixels.newest.copy()

    def draw(self, snapshots: FloatArray, size_px: int | None = None, camera: str = "") -> Frames:
        """Images of `snapshots` [N, S], `size_px` wide and high, or as `image_px` of an env in turns says; by a
        camera, the first one by default.

        Raises:
            RunError: an image is not kept here.
        """
        any_env: Any = self
        height, width = any_env.image_px if size_px is None else (size_px, size_px)
        return self.pixels.draw(snapshots, height, width, any_env.cameras.index(camera) if camera else 0)


def resized(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """`image` [H, W, 3] as [height, width, 3]."""
    if image.shape[:2] == (height, width):
        return image
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR))
