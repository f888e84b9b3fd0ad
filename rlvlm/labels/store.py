"""The label store: a folder of answers that any number of runs read and write at once."""

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import RLock

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.disk import write_whole
from rlvlm.core.errors import UsageError
from rlvlm.core.foreign import open_inside
from rlvlm.core.judging import Stamp, Status, Verdict
from rlvlm.labels.images import ImageStore
from rlvlm.labels.index import Index
from rlvlm.labels.records import (
    Answer,
    Images,
    Origin,
    Question,
    StoredAnswer,
    Truth,
    answer_key,
    from_record,
    to_record,
)
from rlvlm.labels.segments import CorruptLine, Place, Segments, read_record

SCHEMA = 1
"""Version of the format; it rises when older code can no longer read what newer code writes."""
_MARK, _WHAT, _INDEX = "store.json", "rlvlm label store", "index.bin"
_INDEXED_FROM = 20_000
"""Answers from which positions are written into an index."""


class LabelStore:
    """Answers by content, from every judge that ever answered into the folder.

    `store.json` names the schema, `lines/` holds the segments, `pictures/` one PNG per distinct image. Nothing is ever
    changed or removed, there is no lock, and a duplicate line is harmless: the first one counts. Lines damaged by a
    crash or the disk are detected by their checksums and affect no others.

    The positions of answers lie in `index.bin`, those of the latest 20,000, or a sixteenth of all, in memory; texts and
    images stay on disk.

    Args:
        folder: folder of the store, created with the first line.
        origin: written beside every line, so that a shared store shows who asked.

    Raises:
        UsageError: the folder holds something else, or a store of a newer schema.
    """

    def __init__(self, folder: Path, origin: Origin | None = None) -> None:
        self.folder = Path(folder)
        self._image_store = ImageStore(self.folder / "pictures")
        self._origin = origin or Origin()
        self._is_marked = _check_mark(self.folder)
        self._lines = Segments(self.folder / "lines")
        self._index = Index.read(self.folder / _INDEX, self.folder / "lines")
        self._lines.skip(self._index.covered)
        # of what the index lacks; plain tuples and 32 bytes for a key's 64 characters
        self._places: dict[bytes, tuple[Path, int, int]] = {}
        self._lost: set[Place] = set()
        self._lock = RLock()

    @property
    def num_damaged(self) -> int:
        """Number of rejected lines so far."""
        return len(self._lines.damaged)

    def __len__(self) -> int:
        """Number of distinct known answers; `refresh` adds those that others wrote meanwhile."""
        known = len(np.unique(self._index.keys)) + self._index.num_new(iter(self._places))
        return known - len(self._lost)

    def refresh(self) -> None:
        """Reads what any process wrote since the last call; costs a folder listing if there is nothing new."""
        with self._lock:
            for place, record in self._lines.new_records():
                if record.get("kind") == "truth":
                    continue
                try:  # only its position; it is parsed when it is asked for
                    key, is_failed = bytes.fromhex(record["key"]), record["answer"]["status"] == Status.FAILED
                except (KeyError, TypeError, ValueError) as error:
                    self._lines.report(place, f"its record makes no sense: {type(error).__name__}")
                    continue
                if not is_failed:
                    # of several answers to one question the first of the earliest segment counts, whoever reads and
                    # however often
                    known, found = self._places.get(key), (place.file, place.offset, place.length)
                    self._places[key] = found if known is None else min(known, found)
            if len(self._places) >= max(_INDEXED_FROM, len(self._index.keys) // 16):
                self._write_index()

    def find(self, key: str) -> Answer | None:
        """Returns the answer with this `answer_key`; None if there is no valid one."""
        name = bytes.fromhex(key)
        places = [*self._index.find(name), *([Place(*self._places[name])] if name in self._places else [])]
        for place in sorted(places, key=lambda place: (place.file, place.offset)):
            if place in self._lost:
                continue
            try:
                item = from_record(read_record(place))
            except (CorruptLine, OSError) as error:
                self._lines.report(place, str(error))
                self._lost.add(place)
                continue
            # the line was read again just now, so its content is checked again
            if isinstance(item, StoredAnswer) and item.key == key:
                return item.answer
        return None

    def add_answers(self, answers: Sequence[tuple[Question, Answer]]) -> None:
        """Appends answers to disk before it returns. Failed ones are recorded but never found.

        Raises:
            OSError: the disk cannot be written; nothing was added.
        """
        now = time.time()
        self._append(
            [
                StoredAnswer(
                    key=answer_key(question.id, answer.stamp),
                    question=question,
                    answer=answer,
                    when=now,
                    origin=self._origin,
                )
                for question, answer in answers
            ]
        )

    def add_truths(self, truths: Iterable[Truth]) -> None:
        """Appends the simulator's truths about questions, under this store's origin and time.

        Raises:
            OSError: the disk cannot be written; nothing was added.
        """
        now = time.time()
        self._append([replace(truth, when=now, origin=self._origin) for truth in truths])

    def keep_images(self, images: Images) -> None:
        """Writes those images of `describe` that are not stored yet. Keep them before the answers about them.

        Raises:
            OSError: the disk cannot be written.
        """
        self.mark()
        self._image_store.keep(images)

    def image(self, digest: str) -> NDArray[np.uint8]:
        """Returns the image `[H, W, 3]` with this digest.

        Raises:
            MissingImage: it is missing, or its file is damaged.
        """
        return self._image_store.load(digest)

    def mark(self) -> None:
        """Makes the folder a label store.

        The first answer or image does so too, so a run that asks no judge leaves no empty store behind.
        """
        if not self._is_marked:
            # in one move; several writers may do so at once, with the same content
            write_whole(self.folder / _MARK, json.dumps({"what": _WHAT, "schema": SCHEMA}) + "\n")
            self._is_marked = True

    def has_images(self, question: Question) -> bool:
        """Returns whether a file exists for every image of the question."""
        return all(map(self._image_store.has, (*question.left, *question.right, *question.goal_picture)))

    def answers(self) -> Iterator[StoredAnswer]:
        """Yields every answer in the order of the segments, also failed ones; of equal keys the first that did not
        fail.

        Reads from disk, in constant memory except for the keys.
        """
        # the same answer may be in several runs' segments; failures are all yielded, as each was an attempt
        met: set[bytes] = set()
        for item in self._items():
            if isinstance(item, StoredAnswer):
                key = bytes.fromhex(item.key)
                if item.answer.status is Status.FAILED:
                    yield item
                elif key not in met:
                    met.add(key)
                    yield item

    def truths(self) -> dict[str, Truth]:
        """Returns the truths by `Question.id`; of several lines the first with progress counts."""
        known: dict[str, Truth] = {}
        for item in self._items():
            if isinstance(item, Truth):
                before = known.get(item.question)
                # progress says more than returns, which depend on the segment's length
                if before is None or (before.progress is None and item.progress is not None):
                    known[item.question] = item
        return known

    def stamps(self) -> Counter[Stamp]:
        """Returns the judges' stamps with their numbers of answers, without failed ones."""
        counts: Counter[Stamp] = Counter()
        # from the bare records: only stamps are needed, and validating whole answers costs most of a read
        for _, record in Segments(self.folder / "lines").new_records():
            with suppress(KeyError, TypeError, AttributeError):  # a record that makes no sense is skipped
                if record["kind"] != "truth" and record["answer"]["status"] != Status.FAILED:
                    stamp = record["answer"]["stamp"]
                    counts[Stamp(**{name: str(text) for name, text in stamp.items()})] += 1
        return counts

    def count_lines(self) -> Counter[str]:
        """Returns the number of lines by kind, damaged and unfinished ones included."""
        reader, counts = Segments(self.folder / "lines"), Counter[str]()
        for item in self._items(reader):
            is_verdict = isinstance(item, StoredAnswer) and isinstance(item.answer, Verdict)
            counts["truth" if isinstance(item, Truth) else "verdict" if is_verdict else "score"] += 1
        return counts + Counter(damaged=len(reader.damaged), unfinished=reader.num_unfinished())

    def _items(self, reader: Segments | None = None) -> Iterator[StoredAnswer | Truth]:
        """Yields the item of every valid line, from the start."""
        reader = reader or Segments(self.folder / "lines")
        for place, record in reader.new_records():
            try:
                yield from_record(record)
            except CorruptLine as damage:
                reader.report(place, str(damage))

    def _write_index(self) -> None:
        """Moves the positions from memory into the index."""
        file, joined = self.folder / _INDEX, self._index.joined(self._places, self._lines.read_to)
        # of a folder that cannot be written it stays in memory, at a tenth of what it took
        with suppress(OSError):
            joined.write(file)
            joined = Index.read(file, joined.folder)
        self._index, self._places = joined, {}

    def _append(self, items: Sequence[StoredAnswer | Truth]) -> None:
        if items:
            records = [to_record(item) for item in items]
            with self._lock:
                self.mark()
                self._lines.append(records)


def is_store(folder: Path) -> bool:
    """Returns whether `folder` is a label store, of any schema."""
    return (Path(folder) / _MARK).is_file()


def open_store(folder: Path) -> LabelStore:
    """Opens an existing store.

    Raises:
        UsageError: there is none, or it has a newer schema.
    """
    if not is_store(folder):
        raise UsageError(
            f"{folder} is no label store: it has no {_MARK}",
            "name one that --judge.store or `rlvlm labels import` made, or `labels` in a run's folder",
        )
    store = LabelStore(folder)
    store.refresh()
    return store


def _check_mark(folder: Path) -> bool:
    """Returns whether the folder is marked as a store of a schema that we read.

    Raises:
        UsageError: it is a store of another schema, or is in use for something else.
    """
    file = folder / _MARK
    if not file.is_file():
        # a draft of the mark belongs to another writer, who is about to create it
        is_foreign = (
            not entry.name.startswith(f".{_MARK}.") for entry in (folder.iterdir() if folder.is_dir() else ())
        )
        is_used = folder.exists() and (not folder.is_dir() or any(is_foreign))
        if is_used and not file.is_file():  # another writer may have marked and filled it meanwhile
            raise UsageError(f"{folder} is no label store and not empty", "name a new folder, or one with store.json")
        if not is_used:
            return False
    schema = _schema_of(file)
    if schema is None:
        raise UsageError(
            f"{file} does not say which label store this is",
            f'if the rest is whole, write {{"what": "{_WHAT}", "schema": {SCHEMA}}} into it',
        )
    if schema > SCHEMA:  # writing into it could break what newer code relies on
        raise UsageError(
            f"{folder} is a label store of schema {schema}; this rlvlm reads schemas up to {SCHEMA}",
            "use the rlvlm that wrote it, or a newer one",
        )
    return True


def _schema_of(file: Path) -> int | None:
    """Returns the schema in a mark; None if the mark is not ours."""
    try:
        with open_inside(file.parent, file) as stream:
            mark = json.loads(stream.read(4_096))  # a mark is short; a foreign file of that name may be huge
        schema = mark["schema"] if mark["what"] == _WHAT else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return schema if type(schema) is int and schema >= 1 else None  # `true` is an int to isinstance
