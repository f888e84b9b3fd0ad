"""The file of a frozen suite: a zip of questions and pixels with a hash of both, so that judges are compared on the
same images whatever renders them. `frozen` makes items of it.

        suite.json      facts; for each task: name, note, groups of images of one size, SHA-256 of their pixels
        0.items.jsonl   questions of the first task with their truth, one a line; 1.items.jsonl of the second, and so on
        0.pixels        its images in order, each minus the one before it, so that unchanged pixels compress well

Archives without pixels still show the questions; their hashes are the same. All content is untrusted.
"""

import hashlib
import json
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlvlm.core.disk import replacing
from rlvlm.core.errors import UsageError
from rlvlm.core.foreign import MAX_JSON_BYTES, open_regular, parse_json
from rlvlm.core.steps import Frames
from rlvlm.labels.images import MAX_PIXELS, is_digest

VERSION = 1
SUFFIX = ".zip"
MAX_FRAMES = 64
MAX_TASK_BYTES = 2**29
"""Limit on the pixels of one task, in bytes: they are in memory together."""
_MAX_TASKS = 1_000
_HEAD = "suite.json"
_DAMAGES = (
    OSError, ValueError, KeyError, TypeError, EOFError, RecursionError, NotImplementedError, RuntimeError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip
FIX = "fetch it anew, or make it with `rlvlm judge-bench freeze`"


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchivedTask:
    """Questions about one task, and the images that they show."""

    task: str
    note: str
    """Substitute for the truth if the env measures no progress; else empty."""
    groups: tuple[tuple[int, int, int], ...]
    """Number, height and width of consecutive images of one size."""
    pixels: str
    """SHA-256 of all images [H, W, 3] uint8, in order."""
    questions: str
    """SHA-256 of the lines of questions."""

    @property
    def num_images(self) -> int:
        """Number of images N over all groups."""
        return sum(number for number, _, _ in self.groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class Archive:
    """Frozen suite whose facts were read and checked."""

    path: Path
    suite: str
    frames: int
    """Maximum number of images per episode."""
    turns: bool
    """Whether single turns are scored instead of episodes."""
    tasks: tuple[ArchivedTask, ...]
    digest: str
    """SHA-256 of facts, questions and decoded pixels."""

    def task_digest(self, number: int) -> str:
        """Returns the SHA-256 of a task's questions and pixels."""
        return hashlib.sha256(json.dumps(asdict(self.tasks[number]), sort_keys=True).encode()).hexdigest()

    def lines(self, number: int) -> Iterator[tuple[str, Any]]:
        """Yields a task's questions, each with its location for error messages.

        Raises:
            UsageError: they cannot be read, or do not match their hash.
        """
        member = f"{number}.items.jsonl"
        with _reading(self.path, member) as archive:
            text = _read(archive, member, MAX_JSON_BYTES)
            if hashlib.sha256(text).hexdigest() != self.tasks[number].questions:
                raise ValueError("it was altered: the hash of its questions is another one")
        for line, row in enumerate(text.splitlines(), start=1):
            with _reading(self.path, f"{member}, line {line}"):
                value = parse_json(row)
            yield f"{self.path}: {member}, line {line}", value

    def images(self, number: int) -> tuple[Frames, ...]:
        """Returns a task's images, group by group.

        Raises:
            UsageError: there are none, they cannot be read, or do not match their hash.
        """
        member, digest, found = f"{number}.pixels", hashlib.sha256(), []
        with _reading(self.path, member) as archive, archive.open(member) as stream:
            for count, height, width in self.tasks[number].groups:
                # bounded read: a member may claim any size
                content = stream.read(count * height * width * 3)
                if len(content) != count * height * width * 3:
                    raise ValueError("it is truncated")
                changes = np.frombuffer(content, np.uint8).reshape(count, height, width, 3)
                found.append(np.add.accumulate(changes, axis=0, dtype=np.uint8))
                digest.update(found[-1].data)
            if stream.read(1):
                raise ValueError("it has more pixels than images")
            if digest.hexdigest() != self.tasks[number].pixels:
                raise ValueError("it was altered: the hash of its pixels is another one")
        return tuple(found)


def open_archive(path: Path) -> Archive:
    """Reads and checks the facts of a frozen suite; questions and pixels are checked as they are read.

    Raises:
        UsageError: the file is no frozen suite, is damaged, or was altered.
    """
    with _reading(path, _HEAD) as archive:
        facts = parse_json(_read(archive, _HEAD, MAX_JSON_BYTES))
        if facts.pop("version") != VERSION:
            raise ValueError(f"it is not of version {VERSION}")
        digest, rows = facts.pop("digest"), facts.pop("tasks")
        if not isinstance(rows, list) or not 0 < len(rows) <= _MAX_TASKS:
            raise ValueError(f"it has not 1 to {_MAX_TASKS} tasks")
        tasks = tuple(ArchivedTask(**row | {"groups": tuple(map(tuple, row["groups"]))}) for row in rows)
        found = Archive(path=path, tasks=tasks, digest=digest, **facts)
        _check(found)
        if digest != _digest(found):
            raise ValueError("it was altered: its content does not have the hash that it names")
    return found


def _check(archive: Archive) -> None:
    """Raises ValueError if a fact is out of bounds."""
    names = [archive.suite, *(task.task for task in archive.tasks)]
    if not all(isinstance(name, str) and 0 < len(name) <= 200 and name.isprintable() for name in names):
        raise ValueError("a suite or task has no name of a line of text")
    if len(set(names[1:])) < len(archive.tasks):
        raise ValueError("two tasks have one name")
    if not (_is_count(archive.frames, MAX_FRAMES) and isinstance(archive.turns, bool)):
        raise ValueError(f"frames is 1 to {MAX_FRAMES} and turns true or false")
    for task in archive.tasks:
        is_text = isinstance(task.note, str) and len(task.note) <= 500 and task.note.isprintable()
        if not (is_text and is_digest(task.pixels) and is_digest(task.questions)):
            raise ValueError(f"{task.task} lacks a hash, or its note is no line of text")
        for count, height, width in task.groups:
            if not (_is_count(count, 2**24) and _is_count(height, MAX_PIXELS) and _is_count(width, MAX_PIXELS)):
                raise ValueError(f"{task.task} has images of {count} x {height} x {width}")
        num_bytes = sum(3 * count * height * width for count, height, width in task.groups)
        if num_bytes > MAX_TASK_BYTES:
            raise ValueError(f"{task.task} has {num_bytes:,} bytes of pixels, at most {MAX_TASK_BYTES:,} are read")


def _is_count(value: object, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


class ArchiveWriter:
    """Writes an archive task by task.

    Args:
        path: path of the file.
        suite: name of the suite.
        frames: maximum number of images per episode.
        turns: whether single turns are scored.
        has_pixels: False leaves the images out.
    """

    def __init__(self, path: Path, suite: str, *, frames: int, turns: bool, has_pixels: bool = True) -> None:
        self.archive = Archive(path=path, suite=suite, frames=frames, turns=turns, tasks=(), digest="")
        """Facts written so far; `digest` is set at the end."""
        self._has_pixels = has_pixels

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Opens the file for the block, which calls `add`; it appears whole at the end of the block, or not at all."""
        with replacing(self.archive.path) as partial, zipfile.ZipFile(partial, "w") as self._zip:
            yield
            self.archive = replace(self.archive, digest=_digest(self.archive))
            head = {"version": VERSION, "digest": self.archive.digest} | _facts(self.archive)
            self._write(_HEAD, json.dumps(head, indent=1).encode())

    def add(self, task: str, note: str, rows: Sequence[object], groups: Sequence[Frames]) -> None:
        """Adds a task.

        Args:
            task: name of the task.
            note: see `ArchivedTask`.
            rows: questions, as JSON values.
            groups: images, one [N, H, W, 3] for each size.

        Raises:
            UsageError: it exceeds the limits on reading.
        """
        number, digest = len(self.archive.tasks), hashlib.sha256()
        text = "".join(f"{json.dumps(row, allow_nan=False)}\n" for row in rows).encode()
        for frames in groups:
            digest.update(np.ascontiguousarray(frames).data)
        added = ArchivedTask(
            task=task,
            note=note,
            groups=tuple((len(frames), *frames.shape[1:3]) for frames in groups),
            pixels=digest.hexdigest(),
            questions=hashlib.sha256(text).hexdigest(),
        )
        self.archive = replace(self.archive, tasks=(*self.archive.tasks, added))
        try:
            _check(self.archive)
        except ValueError as error:
            what = f"{self.archive.suite} cannot be frozen: {error}"
            raise UsageError(what, "fewer --pairs and --episodes, or a smaller --image-px") from error
        self._write(f"{number}.items.jsonl", text)
        if self._has_pixels:
            changes = [np.diff(frames, axis=0, prepend=np.zeros_like(frames[:1])) for frames in groups]
            self._write(f"{number}.pixels", b"".join(change.tobytes() for change in changes))

    def _write(self, name: str, content: bytes) -> None:
        # without the time of day: the same suite gives the same file
        self._zip.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED, compresslevel=9)


def _facts(archive: Archive) -> dict[str, Any]:
    facts = {"suite": archive.suite, "frames": archive.frames, "turns": archive.turns}
    return facts | {"tasks": [asdict(task) for task in archive.tasks]}


def _digest(archive: Archive) -> str:
    return hashlib.sha256(json.dumps([VERSION, _facts(archive)], sort_keys=True).encode()).hexdigest()


@contextmanager
def _reading(path: Path, member: str) -> Iterator[zipfile.ZipFile]:
    """Opens the archive to read a member; errors name file and member."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            yield archive
    except _DAMAGES as error:
        said = f"it has no {member}" if isinstance(error, KeyError) else error
        raise UsageError(f"{path}: {member} is no part of a frozen suite: {said}", FIX) from error


def _read(archive: zipfile.ZipFile, member: str, most: int) -> bytes:
    with archive.open(member) as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content
