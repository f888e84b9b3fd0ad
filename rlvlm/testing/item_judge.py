"""A judge that answers a bench's items from their known truth, but for the faults that it is given."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlvlm.core.judging import Label, Score, Stamp, Status, Verdict
from rlvlm.core.steps import FloatArray
from rlvlm.judge_bench.asking import ask
from rlvlm.judge_bench.bench import Measured
from rlvlm.judge_bench.items import Item, TaskItems
from rlvlm.judge_bench.suites import Suite
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.judge import Judge


def chance(item: Item, salt: str, *sides: FloatArray) -> float:
    """Returns a number in [0, 1) that depends on the question alone, or only on `sides` if they are given."""
    key = hashlib.sha256(salt.encode())
    if not sides:
        key.update(repr((item.kind, item.case, item.goal, item.truth, item.change, item.camera)).encode())
    for side in sides or item.sides:
        key.update(side.tobytes())
    return int.from_bytes(key.digest()[:8], "big") / 2**64


def true_value(item: Item) -> float:
    """Returns 1 for a success, 0 for a control that is none; else less than 1 and rising with progress."""
    return 1.0 if item.success else 0.9 * item.truth[0]


def true_label(item: Item) -> Label:
    """Returns the side with more progress, in the item's own order."""
    return Label.of(*item.truth)


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemJudge:
    """Answers from the known truth of an item.

    Attributes:
        value: function that scores an item, in [0, 1]; None is an unreadable answer.
        label: function that labels a pair in its own order; None is an unreadable answer. The flag says whether its
            sides are shown exchanged, for judges with a preference for a side.
    """

    value: Callable[[Item], float | None] = true_value
    label: Callable[[Item, bool], Label | None] = lambda item, _: true_label(item)
    stamp: Stamp = field(default_factory=lambda: Stamp(judge="planted", revision="", prompt="none", decoding=""))

    def answers(self, asked: Sequence[tuple[Item, bool]]) -> list[Verdict | Score]:
        said: list[Verdict | Score] = []
        for item, swapped in asked:
            if not item.is_pair:
                value = self.value(item)
                status = Status.INVALID if value is None else Status.OK
                said.append(Score(status=status, value=value, stamp=self.stamp))
                continue
            label = self.label(item, swapped)
            label = label.swapped if label is not None and swapped else label
            said.append(Verdict(status=Status.of(label), label=label, stamp=self.stamp))
        return said


def honest(accuracy: float, salt: str = "") -> ItemJudge:
    """Returns a judge that is right in `accuracy` of the questions, wrong at random: every bench must let it pass."""

    def value(item: Item) -> float:
        if item.is_image:
            return min(max(item.truth[0] + (1 - accuracy) * (chance(item, f"noise{salt}") - 0.5), 0.0), 1.0)
        is_right = chance(item, f"right{salt}") < accuracy
        return (0.6 if item.success == is_right else 0.1) + 0.3 * chance(item, f"jitter{salt}")

    def label(item: Item, swapped: bool) -> Label:
        truth = true_label(item)
        return truth if chance(item, f"right{salt}{swapped}") < accuracy else truth.swapped

    return ItemJudge(value=value, label=label)


def bench(suite: Suite, made: Mapping[str, TaskItems], judge: Judge | ItemJudge, num_frames: int = 8) -> Measured:
    """Returns the result of `bench.measure` for existing items."""
    found = Measured(
        suite=suite, stamp=judge.stamp, config=JudgeConfig(), num_frames=num_frames, seed=0, made=dict(made)
    )  # fmt: skip
    for task, items in made.items():
        found.answers[task] = [answer for block in ask(judge, items, num_frames, 0) for answer in block]
    return found
