"""What a line of a store means: an answer with its question and origin, or the truth about a question."""

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
Answer = Verdict | Score
Images = Sequence[tuple[str, Any]]
"""Digests and pixels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question, with images by their digests; the same for every judge."""

    kind: Literal["compare", "score"]
    goal: str
    left: tuple[str, ...]
    """Images of the left side, in order of time; of the clip, where one is scored."""
    right: tuple[str, ...] = ()
    """Images of the right side; none where one clip is scored."""
    goal_picture: tuple[str, ...] = ()
    """The image of the goal reached, where one was shown."""
    action: str = ""
    """The action within the clip, where the judge is given it."""

    @property
    def id(self) -> str:
        """SHA-256 of the question: what truths and answers of several judges have in common."""
        content = [self.kind, self.goal, self.left, self.right, self.goal_picture]
        content = [*content, self.action] if self.action else content  # as it was before there were actions
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def swapped(self) -> Self:
        """The same question with left and right exchanged."""
        return type(self)(
            kind=self.kind, goal=self.goal, left=self.right, right=self.left, goal_picture=self.goal_picture
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """On whose behalf a line was written."""

    run: str = ""
    """Name of the run's folder, without its path."""
    task: str = ""
    seed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredAnswer:
    """An answer with everything that is known about it."""

    key: str
    """`answer_key` of question and stamp."""
    question: Question
    answer: Answer
    when: float
    """Unix time of the line, seconds."""
    origin: Origin = field(default_factory=Origin)


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """What the simulator knows about a question. Judges never see it: it comes from the run's records, afterwards."""

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
        """Progress where it is known, returns otherwise: the larger side is nearer to the goal."""
        values = self.progress or self.returns
        assert values is not None, "a truth has progress or returns"
        return values

    @property
    def better(self) -> Label:
        """The side nearer to the goal, tie where both are equally near."""
        return Label.of(*self.values)

    @property
    def swapped(self) -> "Truth":
        """What is true where left and right are exchanged; still named after the question as it was."""
        progress, returns = self.progress, self.returns
        return replace(self, progress=progress and progress[::-1], returns=returns and returns[::-1])


def describe(item: Query | Clip) -> tuple[Question, Images]:
    """A question by content, and the images it shows."""
    left, right = (item.left, item.right) if isinstance(item, Query) else (item.frames, None)
    sides = [_digests(frames) for frames in (left, right, item.goal_picture)]
    # pixels are named by content, so the same question of another run, or of another day, is the same question
    digests = [tuple(digest for digest, _ in side) for side in sides]
    kind = "compare" if isinstance(item, Query) else "score"
    action = "" if isinstance(item, Query) else item.action
    question = Question(
        kind=kind, goal=item.goal, left=digests[0], right=digests[1], goal_picture=digests[2], action=action
    )
    return question, [image for side in sides for image in side]


def truth_about(question: Question, truths: Mapping[str, Truth]) -> Truth | None:
    """What `LabelStore.truths` know about a question, from itself or from the same in the other order."""
    if question.id in truths:
        return truths[question.id]
    # judges are asked in both orders, the simulator states a truth once
    mirrored = truths.get(question.swapped.id)
    return None if mirrored is None else mirrored.swapped


def answer_key(question: str, stamp: Stamp) -> str:
    """SHA-256 over everything that decides an answer: the question, by its `Question.id`, and who is asked and how."""
    return hashlib.sha256(json.dumps([question, *asdict(stamp).values()]).encode()).hexdigest()


def to_record(item: StoredAnswer | Truth) -> dict[str, Any]:
    """The JSON object of a line; `from_record` gives an equal item back."""
    if isinstance(item, Truth):
        return {"kind": "truth", **_without_empty(asdict(item))}
    answer = asdict(item.answer)
    for name in ("question", "num_frames"):  # stands elsewhere; of the way it was asked, which the stamp says
        answer.pop(name, None)
    if not all(map(math.isfinite, answer.get("probabilities") or ())):
        answer["probabilities"] = None  # a broken network's; JSON has no such numbers
    return {
        "kind": "verdict" if isinstance(item.answer, Verdict) else "score",
        "key": item.key,
        "question": {"id": item.question.id, **_without_empty(asdict(item.question))},
        "answer": _without_empty(answer),
        "when": item.when,
        "origin": _without_empty(asdict(item.origin)),
    }


def from_record(record: dict[str, Any]) -> StoredAnswer | Truth:
    """The item of a line's JSON object.

    Raises:
        CorruptLine: it has no such kind, or a field is missing, of the wrong type, or contradicts another.
    """
    try:
        if record["kind"] == "truth":
            truth = read_as(Truth, record)
            if not is_digest(truth.question) or (truth.progress is None and truth.returns is None):
                raise CorruptLine("a truth names a question, and progress or returns")
            return truth
        # ids and keys are computed anew: what a line claims about itself is not believed
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
    """The question of a JSON object, whose empty fields may be left out.

    Raises:
        CorruptLine: an image is not named by its digest.
        ValueError, TypeError: a field is missing, or of the wrong type.
    """
    question = read_as(Question, {"goal": "", "left": [], **record})
    if not all(map(is_digest, (*question.left, *question.right, *question.goal_picture))):
        raise CorruptLine("a question names its images by digest")
    return question


_KINDS = {"verdict": (Verdict, "label"), "score": (Score, "value")}
"""What answers a line may hold, and the field that is left out where there is none."""


_adapter = cache(TypeAdapter)  # a validator takes milliseconds to build


def read_as(kind: type[T], value: Any) -> T:
    """`value`, of a JSON object, as `kind`; ValueError where it is of another type or not finite."""
    if _has_odd_number(value):
        raise ValueError("a finite number is wanted")
    # not `validate_json`, whose parser refuses texts that are no UTF-8
    return _adapter(kind).validate_python(value)


def _has_odd_number(value: Any) -> bool:
    """Whether a JSON value holds what pydantic takes for a number and we do not: true, NaN or infinity."""
    if isinstance(value, dict | list):
        return any(map(_has_odd_number, value.values() if isinstance(value, dict) else value))
    return isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value))


def _digests(frames: Frames | None) -> list[tuple[str, Any]]:
    """Digest and pixels of each frame; anything but a stack of images counts as one odd image."""
    if frames is None:
        return []
    images = list(frames) if getattr(frames, "ndim", 0) == 4 else [frames]
    return [(image_digest(image), image) for image in images]


def _without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, "", ())}
