"""The label store: a folder of answers that any number of runs read and write at once."""

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.disk import write_whole
from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Stamp, Status, Verdict
from rlvlm.labels.images import ImageStore
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
"""Rises when older code could no longer read what newer code writes."""
_MARK, _WHAT = "store.json", "rlvlm label store"


class LabelStore:
    """Answers by content, for every judge that ever answered into the folder.

    `store.json` names the schema, `lines/` holds the segments, `pictures/` one PNG per distinct image. Nothing is
    ever changed or removed, there is no lock, and a line that is there twice is harmless: the first one counts. What a
    crash tears or a disk flips is known by its checksum and costs that one line.

    In memory there is where each answer stands, about 300 bytes; texts and images stay on the disk.

    Args:
        folder: made with the first line.
        origin: written beside every line, so that a shared store knows who asked.

    Raises:
        UsageError: the folder holds something else, or a store of a newer schema.
    """

    def __init__(self, folder: Path, origin: Origin | None = None) -> None:
        self.folder = Path(folder)
        self._image_store = ImageStore(self.folder / "pictures")
        self._origin = origin or Origin()
        self._is_marked = _check_mark(self.folder)
        self._lines = Segments(self.folder / "lines")
        # plain tuples and 32 bytes for a key's 64 characters: a million answers then take 300 MB
        self._places: dict[bytes, tuple[Path, int, int]] = {}

    @property
    def num_damaged(self) -> int:
        """Lines met so far that were not believed."""
        return len(self._lines.damaged)

    def __len__(self) -> int:
        """Distinct answers known; call `refresh` to see what others wrote meanwhile."""
        return len(self._places)

    def refresh(self) -> None:
        """Takes in what was written since the last look, by any process. Costs a folder listing when nothing was."""
        for place, record in self._lines.new_records():
            if record.get("kind") == "truth":
                continue
            try:  # where it stands; it is parsed once it is asked for
                key, is_failed = bytes.fromhex(record["key"]), record["answer"]["status"] == Status.FAILED
            except (KeyError, TypeError, ValueError) as error:
                self._lines.report(place, f"its record makes no sense: {type(error).__name__}")
                continue
            if not is_failed:  # of several answers to one question the first counts
                self._places.setdefault(key, (place.file, place.offset, place.length))

    def find(self, key: str) -> Answer | None:
        """The answer of that `answer_key`, None where there is none that can be believed."""
        place = self._places.get(bytes.fromhex(key))
        if place is None:
            return None
        try:
            item = from_record(read_record(Place(*place)))
        except (CorruptLine, OSError) as error:
            self._lines.report(Place(*place), str(error))
            del self._places[bytes.fromhex(key)]
            return None
        # the line was read again just now, so what it says is checked again
        return item.answer if isinstance(item, StoredAnswer) and item.key == key else None

    def add_answers(self, answers: Sequence[tuple[Question, Answer]]) -> None:
        """Appends answers; they are on the disk when this returns. Failed ones are noted but never found.

        Raises:
            OSError: the disk refused; nothing was added.
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
        """Appends what the simulator knows about questions, under this store's origin and time.

        Raises:
            OSError: the disk refused; nothing was added.
        """
        now = time.time()
        self._append([replace(truth, when=now, origin=self._origin) for truth in truths])

    def keep_images(self, images: Images) -> None:
        """Writes those images of `describe` that are not there yet. Keep them before the answers about them.

        Raises:
            OSError: the disk refused.
        """
        self.mark()
        self._image_store.keep(images)

    def image(self, digest: str) -> NDArray[np.uint8]:
        """The image `[H, W, 3]` of that digest.

        Raises:
            MissingImage: it is not there, or its file is damaged.
        """
        return self._image_store.load(digest)

    def mark(self) -> None:
        """Makes the folder a label store. The first answer or image does so too, so a run that asks no judge leaves no
        empty store behind.
        """
        if not self._is_marked:
            # in one move; several writers may do so at once, with the same words
            write_whole(self.folder / _MARK, json.dumps({"what": _WHAT, "schema": SCHEMA}) + "\n")
            self._is_marked = True

    def has_images(self, question: Question) -> bool:
        """Whether a file is there for every image of the question."""
        return all(map(self._image_store.has, (*question.left, *question.right, *question.goal_picture)))

    def answers(self) -> Iterator[StoredAnswer]:
        """Every answer, failed ones included, in the order of the segments; of equal keys the first that is no failure.

        Reads from the disk, in constant memory but for the keys met.
        """
        # the same answer may stand in several runs' segments; failures are kept apart, as each was an attempt
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
        """What is known about questions, by `Question.id`; of several lines the first that knows the progress."""
        known: dict[str, Truth] = {}
        for item in self._items():
            if isinstance(item, Truth):
                before = known.get(item.question)
                # progress says more than returns, which depend on the segment's length
                if before is None or (before.progress is None and item.progress is not None):
                    known[item.question] = item
        return known

    def stamps(self) -> Counter[Stamp]:
        """Who answered, and how often; failed answers do not count."""
        counts: Counter[Stamp] = Counter()
        # of the bare records: only who answered is wanted, and validating whole answers costs most of a read
        for _, record in Segments(self.folder / "lines").new_records():
            with suppress(KeyError, TypeError, AttributeError):  # a record that makes no sense is skipped
                if record["kind"] != "truth" and record["answer"]["status"] != Status.FAILED:
                    stamp = record["answer"]["stamp"]
                    counts[Stamp(**{name: str(text) for name, text in stamp.items()})] += 1
        return counts

    def count_lines(self) -> Counter[str]:
        """How many lines there are of each kind, damaged and unfinished ones among them."""
        reader, counts = Segments(self.folder / "lines"), Counter[str]()
        for item in self._items(reader):
            is_verdict = isinstance(item, StoredAnswer) and isinstance(item.answer, Verdict)
            counts["truth" if isinstance(item, Truth) else "verdict" if is_verdict else "score"] += 1
        return counts + Counter(damaged=len(reader.damaged), unfinished=reader.num_unfinished())

    def _items(self, reader: Segments | None = None) -> Iterator[StoredAnswer | Truth]:
        """Every line that makes sense, read from the start."""
        reader = reader or Segments(self.folder / "lines")
        for place, record in reader.new_records():
            try:
                yield from_record(record)
            except CorruptLine as damage:
                reader.report(place, str(damage))

    def _append(self, items: Sequence[StoredAnswer | Truth]) -> None:
        if items:
            self.mark()
            self._lines.append([to_record(item) for item in items])


def is_store(folder: Path) -> bool:
    """Whether `folder` is a label store, of whatever schema."""
    return (Path(folder) / _MARK).is_file()


def open_store(folder: Path) -> LabelStore:
    """A store that must be there already.

    Raises:
        UsageError: it is not, or is of a newer schema.
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
    """Whether the folder is marked as a store of a schema that we read.

    Raises:
        UsageError: it is a store of another schema, or is in use for something else.
    """
    file = folder / _MARK
    if not file.is_file():
        # a draft of the mark is another writer's, who is about to make it
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
    if schema > SCHEMA:  # writing into it could harm what newer code relies on
        raise UsageError(
            f"{folder} is a label store of schema {schema}; this rlvlm reads schemas up to {SCHEMA}",
            "use the rlvlm that wrote it, or a newer one",
        )
    return True


def _schema_of(file: Path) -> int | None:
    """The schema that a mark names; None where it is no mark of ours."""
    try:
        with open(file, "rb") as stream:
            mark = json.loads(stream.read(4_096))  # a mark is short; anything else of that name may be huge
        schema = mark["schema"] if mark["what"] == _WHAT else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return schema if type(schema) is int and schema >= 1 else None  # `true` is an int to isinstance
