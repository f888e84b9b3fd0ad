"""Stored images of envs that cannot draw their past again: compressed, each stored once, with the snapshot as its key.

A robot, a recorded video, a simulator on a GPU and most Gymnasium envs pass the images of each moment to `keep` and get
a snapshot in return: a digest of five numbers. Replays, queries, episodes and pages store and compare it as they do any
snapshot, and `draw` looks up the images, so no code above the envs needs to know which kind of env it has.

Images are in a temporary file of the process, `PIXELS`, shared by all its envs. Images that another process needs
(`write`, `read`) travel with the episodes; checkpoints and folders of demonstrations hold the images of their
snapshots; images that nothing needs any more are dropped after a checkpoint.
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
"""S, the size of a snapshot: a digest of 120 bits, 24 in each number, which float32 holds exactly."""
_SIZE = struct.Struct("<I")
_MAX_ENTRY_BYTES = 2**26
_MAX_PX = 4096
_MAX_LOSSLESS_PX = 96
"""Side in pixels: images of at most this many pixels squared are stored as PNG, larger ones as JPEG of quality 95."""
_WASTE_BYTES = 2**24
"""Size of dropped images in the file, in bytes, above which it is rewritten."""


class _Entry(NamedTuple):
    begin: int
    """Offset of its bytes in the file."""
    size: int
    number: int
    """Sequence number of when it was last kept."""


class _Owner(NamedTuple):
    needed: frozenset[bytes]
    """Keys of the owner's newest checkpoint."""
    before: int
    """Sequence number of the newest entry at the checkpoint before that one."""
    newest: int
    """Sequence number of the newest entry at the newest checkpoint."""


class PixelStore:
    """Images by key, in a temporary file that disappears with the process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._entries: dict[bytes, _Entry] = {}
        self._file: IO[bytes] | None = None
        self._end = self._number = 0
        self._owners: WeakKeyDictionary[object, _Owner] = WeakKeyDictionary()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, content: bytes) -> FloatArray:
        """Stores the images of a moment, as encoded by `encode`; returns their snapshot [S].

        Raises:
            MachineError: the disk is full.
        """
        packed = np.frombuffer(blake2b(content, digest_size=3 * SNAPSHOT_SIZE).digest(), np.uint8).reshape(-1, 3)
        snapshot = (packed @ np.array([2**16, 2**8, 1])).astype(np.float32)
        key = snapshot.tobytes()
        with self._lock:
            self._number += 1
            if key in self._entries:  # move it to the end too: entries are ordered by age
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
        """Returns the image stored for a snapshot [S].

        Raises:
            RunError: no image was stored for it, or it was dropped.
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

    def known(self, arrays: Iterable[object]) -> frozenset[bytes]:
        """Returns the keys of the stored images whose snapshots [..., S] occur in `arrays`."""
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
        """Stores the images that `write` wrote; keys are computed from the content, so none can be filed under
        another's.

        Raises:
            ValueError: the stream is truncated.
        """
        while head := stream.read(_SIZE.size):
            size = _SIZE.unpack(head)[0] if len(head) == _SIZE.size else 0
            content = stream.read(size) if 0 < size <= _MAX_ENTRY_BYTES else b""
            if len(content) != size or not content:
                raise ValueError("the kept images are torn")
            self.add(content)

    def pack(self, arrays: Iterable[object]) -> bytes:
        """Returns the images of the snapshots in `arrays` for another process's `unpack`; empty if there are none."""
        stream = io.BytesIO()
        self.write(stream, self.known(arrays))
        return stream.getvalue()

    def unpack(self, packed: bytes) -> None:
        """Stores the images that `pack` or `take_all` returned."""
        self.read(io.BytesIO(packed))

    def take_all(self) -> bytes:
        """Returns all images for another process and drops them here: for workers that play and never look back."""
        with self._lock:
            stream = io.BytesIO()
            self.write(stream, frozenset(self._entries))
            self.clear()
            return stream.getvalue()

    def clear(self) -> None:
        """Drops all images."""
        with self._lock:
            self._entries.clear()
            self._end = 0
            if self._file is not None:
                self._file.truncate(0)

    def register(self, owner: object) -> None:
        """Registers `owner`: images that it may need are kept until `release` or until it is garbage-collected."""
        self._owners.setdefault(owner, _Owner(frozenset(), 0, 0))

    def release(self, owner: object) -> None:
        """Declares that `owner` needs no images any more."""
        self._owners.pop(owner, None)

    def drop(self, owner: object, needed: frozenset[bytes]) -> None:
        """Drops images that no owner's newest checkpoint needs and that were stored before the checkpoint preceding it:
        younger ones may still be viewed, such as the episodes of the last evaluation.

        Args:
            owner: object that has just saved a checkpoint.
            needed: keys of all snapshots in the checkpoint, which suffice to resume the run.
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
        """Rewrites the file without dropped images; leaves it as it is if the disk is too full for that."""
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
"""Images of this process."""


def encode(images: Sequence[NDArray[np.uint8]]) -> bytes:
    """Compresses the images [H, W, 3] of all cameras at one moment; small images without loss."""
    parts = []
    for image in images:
        pil_image, data = Image.fromarray(np.ascontiguousarray(image)), io.BytesIO()
        # 300 x 300 pixels: a PNG takes 2 ms (of a photograph 9 ms, with little compression), a JPEG 0.5 ms
        if image.size <= _MAX_LOSSLESS_PX**2 * 3:
            pil_image.save(data, "png", compress_level=1)
        else:
            pil_image.save(data, "jpeg", quality=95, subsampling=0)
        parts.append(data.getvalue())
    return b"".join(_SIZE.pack(len(part)) + part for part in parts)


def decode(content: bytes, camera: int) -> NDArray[np.uint8]:
    """Returns the image [H, W, 3] of one of the cameras, counted from 0.

    Raises:
        RunError: the content does not come from `encode`.
    """
    try:
        for _ in range(camera):
            content = content[_SIZE.size + _SIZE.unpack_from(content)[0] :]
        part = content[_SIZE.size :][: _SIZE.unpack_from(content)[0]]
        image = Image.open(io.BytesIO(part), formats=["PNG", "JPEG"])
        # only the header was read so far: a small file can claim any number of pixels
        if max(image.size) > _MAX_PX or image.mode != "RGB":
            raise ValueError(f"at most {_MAX_PX} x {_MAX_PX} pixels in RGB are wanted, got {image.mode} {image.size}")
        return np.asarray(image)
    except (OSError, SyntaxError, ValueError, struct.error, Image.DecompressionBombError) as error:
        fix = "go on without the folder that it came with, or collect it anew"
        raise RunError(f"a kept image cannot be read: {error}", fix) from error


class KeptPixels:
    """Images of one env.

    Args:
        source: the env's class, for messages.
    """

    def __init__(self, source: type) -> None:
        self._source = source
        self._shapes: list[tuple[int, ...]] = []
        self._num_kept = self._num_bytes = 0
        self.newest: FloatArray = np.zeros(SNAPSHOT_SIZE, np.float32)
        """[S] snapshot of the most recent images."""

    def keep(self, images: Sequence[NDArray[np.uint8]]) -> FloatArray:
        """Stores the images [H, W, 3] of all cameras at a moment; returns their snapshot [S].

        Raises:
            UsageError: one of them is not such an image, or has another size than before.
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
        """Returns images [N, height, width, 3] of `snapshots` [N, S] by a camera, counted from 0."""
        frames = np.empty((len(snapshots), height, width, 3), np.uint8)
        for frame, snapshot in zip(frames, snapshots, strict=True):
            frame[:] = resized(decode(PIXELS.get(snapshot), camera), height, width)
        return frames

    @property
    def note(self) -> str:
        """Describes the stored images and their size, measured so far."""
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
    """Mixin for an env of any kind that cannot draw its past again: `class Robot(PixelEnv, ChunkEnv)`.

    The env passes each moment's images to `keep`, at reset, after each step and in `set_state`, and stores the returned
    snapshot wherever its kind needs one. Everything else about images is done here.
    """

    snapshot_size = SNAPSHOT_SIZE
    grain = 1.0

    @cached_property
    def pixels(self) -> KeptPixels:
        """Stored images of this env."""
        return KeptPixels(type(self))

    def keep(self, *images: NDArray[np.uint8]) -> FloatArray:
        """Stores the images [H, W, 3] uint8 of the present moment, one per camera in `cameras` if the env has these,
        and returns their snapshot [S].

        Raises:
            UsageError: one of them is not such an image, or has another size than before.
        """
        return self.pixels.keep(images).copy()

    def snapshot(self) -> FloatArray:
        """Returns [S], the snapshot of the most recent images."""
        return self.pixels.newest.copy()

    def draw(self, snapshots: FloatArray, size_px: int | None = None, camera: str = "") -> Frames:
        """Returns images of `snapshots` [N, S] by a camera, the first by default: `size_px` wide and high or, for an
        env in turns, of size `image_px`.

        Raises:
            RunError: an image is not stored here.
        """
        any_env: Any = self
        height, width = any_env.image_px if size_px is None else (size_px, size_px)
        return self.pixels.draw(snapshots, height, width, any_env.cameras.index(camera) if camera else 0)


def resized(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Returns `image` [H, W, 3] scaled to [height, width, 3]."""
    if image.shape[:2] == (height, width):
        return image
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR))
