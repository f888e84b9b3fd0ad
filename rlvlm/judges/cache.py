"""A judge that remembers: the same pictures, goal and stamp are asked once. Wraps any judge, local or served."""

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from rlvlm.judges.judge import Judge
from rlvlm.types import Clip, Frames, Label, Query, Score, Stamp, Status, Verdict

logger = logging.getLogger(__name__)

Item = TypeVar("Item", Query, Clip)
Answer = TypeVar("Answer", Verdict, Score)


class CachedJudge:
    """Answers from memory what was asked before, and asks the rest.

    Failed answers are never kept, so they are asked again. With a file, answers outlive the process: one line per
    answer, each with its own checksum, on the disk before the answer is handed out.
    """

    def __init__(self, judge: Judge, file: Path | None = None) -> None:
        """Reads the answers in `file`, if there is one.

        Args:
            judge: is asked what is not known yet.
            file: append-only; created with the first answer. None remembers within this process alone.
        """
        self._judge = judge
        self._file = file
        self._known: dict[str, Any] = {} if file is None else read_answers(file)
        self.hits = 0
        """Questions answered from memory."""
        self.misses = 0
        """Questions put to the judge."""

    @property
    def stamp(self) -> Stamp:
        """The stamp of the judge inside."""
        return self._judge.stamp

    def compare(self, queries: Sequence[Query]) -> list[Verdict]:
        """One verdict per query, in order; a remembered one is as it was given."""
        stamp = self.stamp
        return self._answer([query_key(query, stamp) for query in queries], queries, self._judge.compare)

    def score(self, clips: Sequence[Clip]) -> list[Score]:
        """One score per clip, in order; a remembered one is as it was given."""
        stamp = self.stamp
        return self._answer([clip_key(clip, stamp) for clip in clips], clips, self._judge.score)

    def _answer(
        self, keys: list[str], items: Sequence[Item], ask: Callable[[Sequence[Item]], list[Answer]]
    ) -> list[Answer]:
        unknown = {key: item for key, item in zip(keys, items, strict=True) if key not in self._known}
        fresh = dict(zip(unknown, ask(list(unknown.values())), strict=True)) if unknown else {}
        keep = {key: answer for key, answer in fresh.items() if answer.status is not Status.FAILED}
        if self._file is not None and keep:
            append_answers(self._file, keep)
        self._known.update(keep)
        self.misses += len(fresh)
        self.hits += len(keys) - len(fresh)
        return [fresh[key] if key in fresh else self._known[key] for key in keys]


def query_key(query: Query, stamp: Stamp) -> str:
    """SHA-256 over everything that decides a query's answer: pictures, goal and stamp."""
    return _key("compare", query.goal, stamp, [query.left, query.right])


def clip_key(clip: Clip, stamp: Stamp) -> str:
    """SHA-256 over everything that decides a clip's score."""
    return _key("score", clip.goal, stamp, [clip.frames])


def append_answers(file: Path, answers: dict[str, Verdict | Score]) -> None:
    """Adds one checked line per answer to `file` and waits until the disk has them."""
    lines = "".join(_line(key, answer) for key, answer in answers.items())
    with file.open("ab") as stream:
        stream.write(lines.encode())
        stream.flush()
        os.fsync(stream.fileno())


def read_answers(file: Path) -> dict[str, Verdict | Score]:
    """The answers in `file` by key. A last line torn by a crash is cut off; other damaged lines are skipped."""
    if not file.exists():
        return {}
    data = file.read_bytes()
    whole, _, torn = data.rpartition(b"\n")
    if torn:
        logger.warning("%s ends in a torn line; it is cut off", file)
        os.truncate(file, len(data) - len(torn))
    answers = {}
    for number, line in enumerate(whole.splitlines(), start=1):
        checksum, _, body = line.partition(b" ")
        if checksum != _checksum(body):
            logger.warning("line %d of %s is damaged; its question will be asked again", number, file)
            continue
        record = json.loads(body)
        answers[record["key"]] = _answer_from(record)
    return answers


def _key(kind: str, goal: str, stamp: Stamp, clips: Sequence[Frames]) -> str:
    digest = hashlib.sha256(json.dumps([kind, goal, asdict(stamp), [clip.shape for clip in clips]]).encode())
    for clip in clips:
        digest.update(clip.tobytes())
    return digest.hexdigest()


def _line(key: str, answer: Verdict | Score) -> str:
    kind = "verdict" if isinstance(answer, Verdict) else "score"
    body = json.dumps({"key": key, "kind": kind, **asdict(answer)})
    return f"{_checksum(body.encode()).decode()} {body}\n"


def _checksum(body: bytes) -> bytes:
    return f"{zlib.crc32(body):08x}".encode()


def _answer_from(record: dict[str, Any]) -> Verdict | Score:
    """The answer that `_line` wrote."""
    shared = {"status": Status(record["status"]), "stamp": Stamp(**record["stamp"]), "text": record["text"],
              "latency_s": record["latency_s"]}
    if record["kind"] == "score":
        return Score(value=record["value"], **shared)
    label, probabilities = record["label"], record["probabilities"]
    return Verdict(
        label=None if label is None else Label(label),
        probabilities=None if probabilities is None else tuple(probabilities),
        **shared,
    )
