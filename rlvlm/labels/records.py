"""Records on the lines of a store: an answer with its question and origin, or the truth about a question."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any, Literal, Self, TypeVar

from pydantic import TypeAdapter

from rlvlm.core.errors import first_line
from rlvlm.core.judging import Clip, Label, Query, Score, Stamp, Verdict
from rlvlm.core.steps import Frames
from rlvlm.labels.images import image_digest, is_digest
from rlvlm.labels.segments import CorruptLine

T = TypeVar("T")
PERSON_PREFIX = "human:"
"""Prefix of the judge's name in the stamp of a person's answer."""
Answer = Verdict | Score
Images = Sequence[tuple[str, Any]]
"""Digests and pixels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question, with images by their digests; the same for every judge."""

    kind: Literal["compare", "score"]
    goal: str
    left: tuple[str, ...]
    """Images of the left side, or of the clip to score, in order of time."""
    right: tuple[str, ...] = ()
    """Images of the right side; empty for a score."""
    goal_picture: tuple[str, ...] = ()
    """Image of the reached goal, if one was shown."""
    action: str = ""
    """Action within the clip, if the judge is told it."""

    @property
    def is_pair(self) -> bool:
        """Whether two sides are compared, as opposed to one that is scored."""
        return self.kind == "compare"

    @property
    def id(self) -> str:
        """SHA-256 of the question: the same for its truth and for the answers of all judges."""
        content = [self.kind, self.goal, self.left, self.right, self.goal_picture]
        content = [*content, self.action] if self.action else content  # without an action as before actions existed
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def swapped(self) -> Self:
        """The same question with left and right exchanged."""
        return type(self)(
            kind=self.kind, goal=self.goal, left=self.right, right=self.left, goal_picture=self.goal_picture
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Run that wrote a line."""

    run: str = ""
    """Name of the run's folder, without its path."""
    task: str = ""
    seed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredAnswer:
    """An answer with its question, time and origin."""

    key: str
    """`answer_key` of question and stamp."""
    question: Question
    answer: Answer
    when: float
    """Unix time of the line, seconds."""
    origin: Origin = field(default_factory=Origin)


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """Simulator's knowledge about a question. Judges never see it: it comes from the run's records, afterwards."""

    question: str
    """`Question.id`."""
    progress: tuple[float, float] | None = None
    """True progress of left and right, in [0, 1]."""
    returns: tuple[float, float] | None = None
    """True returns of left and right, in units of the env's reward."""
    when: float = 0.0
    origin: Origin = field(default_factory=Origin)

    @property
    def values(self) -> tuple[float, float]:
        """Progress if known, returns otherwise: the larger side is nearer to the goal."""
        values = self.progress or self.returns
        assert values is not None, "a truth has progress or returns"
        return values

    @property
    def better(self) -> Label:
        """Side nearer to the goal, tie if both are equally near."""
        return Label.of(*self.values)

    @property
    def swapped(self) -> "Truth":
        """Truth with left and right exchanged; it keeps the original question's id."""
        progress, returns = self.progress, self.returns
        return replace(self, progress=progress and progress[::-1], returns=returns and returns[::-1])


def describe(item: Query | Clip) -> tuple[Question, Images]:
    """Returns a question by content, and the images that it shows."""
    left, right = (item.left, item.right) if isinstance(item, Query) else (item.frames, None)
    sides = [_digests(frames) for frames in (left, right, item.goal_picture)]
    # pixels are named by content, so the same question has the same id in every run
    digests = [tuple(digest for digest, _ in side) for side in sides]
    kind = "compare" if isinstance(item, Query) else "score"
    action = "" if isinstance(item, Query) else item.action
    question = Question(
        kind=kind, goal=item.goal, left=digests[0], right=digests[1], goal_picture=digests[2], action=action
    )
    return question, [image for side in sides for image in side]


def truth_about(question: Question, truths: Mapping[str, Truth]) -> Truth | None:
    """Returns the truth in `LabelStore.truths` about a question, or about the same question in the other order."""
    if question.id in truths:
        return truths[question.id]
    # judges are asked in both orders, the simulator states a truth once
    mirrored = truths.get(question.swapped.id)
    return None if mirrored is None else mirrored.swapped


def answer_key(question: str, stamp: Stamp) -> str:
    """Returns the SHA-256 of everything that determines an answer: the question's `Question.id` and the stamp."""
    return hashlib.sha256(json.dumps([question, *asdict(stamp).values()]).encode()).hexdigest()


def to_record(item: StoredAnswer | Truth) -> dict[str, Any]:
    """Returns the JSON object of a line; `from_record` restores an equal item."""
    if isinstance(item, Truth):
        return {"kind": "truth", **_without_empty(asdict(item))}
    answer = asdict(item.answer)
    for name in ("question", "num_frames"):  # stored elsewhere; determined by the form, which the stamp names
        answer.pop(name, None)
    if not all(map(math.isfinite, answer.get("probabilities") or ())):
        answer["probabilities"] = None  # from a broken network; JSON has no such numbers
    return {
        "kind": "verdict" if isinstance(item.answer, Verdict) else "score",
        "key": item.key,
        "question": {"id": item.question.id, **_without_empty(asdict(item.question))},
        "answer": _without_empty(answer),
        "when": item.when,
        "origin": _without_empty(asdict(item.origin)),
    }


def from_record(record: dict[str, Any]) -> StoredAnswer | Truth:
    """Returns the item of a line's JSON object.

    Raises:
        CorruptLine: its kind is unknown, or a field is missing, of the wrong type, or contradicts another.
    """
    try:
        if record["kind"] == "truth":
            truth = read_as(Truth, record)
            if not is_digest(truth.question) or (truth.progress is None and truth.returns is None):
                raise CorruptLine("a truth names a question, and progress or returns")
            return truth
        # ids and keys are computed anew: a line's claims about itself are not trusted
        question = read_question(record["question"])
        kind, empty = _KINDS[record["kind"]]
        answer = replace(read_as(kind, {empty: None, **record["answer"]}), question=question.id)
        key = answer_key(question.id, answer.stamp)
        if key != record["key"]:
            raise CorruptLine("its key is not that of its question and stamp")
        when, origin = read_as(float, record["when"]), read_as(Origin, record["origin"])
        return StoredAnswer(key=key, question=question, answer=answer, when=when, origin=origin)
    except CorruptLine:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptLine(f"its record makes no sense: {type(error).__name__} {first_line(error)}") from error


def read_question(record: dict[str, Any]) -> Question:
    """Returns the question of a JSON object, whose empty fields may be left out.

    Raises:
        CorruptLine: an image is not named by its digest.
        ValueError, TypeError: a field is missing, or of the wrong type.
    """
    question = read_as(Question, {"goal": "", "left": [], **record})
    if not all(map(is_digest, (*question.left, *question.right, *question.goal_picture))):
        raise CorruptLine("a question names its images by digest")
    return question


_KINDS = {"verdict": (Verdict, "label"), "score": (Score, "value")}
"""Kinds of answers on lines, and the field that is left out if there is no value."""


_adapter = cache(TypeAdapter)  # a validator takes milliseconds to build


def read_as(kind: type[T], value: object) -> T:
    """Converts `value`, from a JSON object, to `kind`; ValueError if it has another type or is not finite."""
    if _has_odd_number(value):
        raise ValueError("a finite number is wanted")
    # not `validate_json`, whose parser refuses texts outside of UTF-8
    return _adapter(kind).validate_python(value)


def _has_odd_number(value: object) -> bool:
    """Returns whether a JSON value holds true, false, NaN or infinity, which pydantic accepts as numbers."""
    if isinstance(value, dict | list):
        return any(map(_has_odd_number, value.values() if isinstance(value, dict) else value))
    return isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value))


def _digests(frames: Frames | None) -> list[tuple[str, object]]:
    """Returns digest and pixels of each frame; anything but a stack of images counts as one malformed image."""
    if frames is None:
        return []
    images = list(frames) if getattr(frames, "ndim", 0) == 4 else [frames]
    return [(image_digest(image), image) for image in images]


def _without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, "", ())}
