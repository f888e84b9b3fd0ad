"""Judges with one planted fault each, to test whether `rlvlm judge-bench` names the fault, and refuses a good grade to
a judge that a policy can fool.

Most answer from the truth of the bench's items except for their fault; those of `fooled` measure a property of the
images. `benchmarks/planted_faults.py` prints the bench's result for each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlvlm.core.judging import Label, Score, Verdict
from rlvlm.core.steps import FloatArray
from rlvlm.judge_bench.items import Item
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.judge import Judge
from rlvlm.testing import fooled
from rlvlm.testing.item_judge import ItemJudge, chance, honest, true_label, true_value

_HARD = 0.4
"""Gap in progress below which a pair is hard."""
_DRAWER, _BLOCK = "open the drawer", "push the "
"""First words of the goals of two tasks of `tiny`."""


class CopiesBefore(ItemJudge):
    """Repeats the previous answer in two of three questions."""

    def answers(self, asked: Sequence[tuple[Item, bool]]) -> list[Verdict | Score]:
        said = ItemJudge.answers(self, asked)
        return [said[place - place % 3] for place in range(len(said))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Planted:
    """A fault, and the result that the bench must give."""

    what: str
    """Description in a few words."""
    judge: Callable[[], Judge | ItemJudge]
    names: frozenset[str] = frozenset()
    """Names of faults of which one must be found; empty if the fault cannot be detected."""
    pairs: str = ""
    """Task whose comparisons show the fault."""
    scores: str = ""
    """Task whose scores show the fault."""
    grades: frozenset[str] = frozenset()
    """Grades on that task, one of which the judge must get; empty for any."""


def _measuring(name: str) -> Callable[[], Judge]:
    return lambda: getattr(fooled, name)(JudgeConfig())


def _by_value(value: Callable[[Item, float, FloatArray], float]) -> ItemJudge:
    """Returns a judge by a value of each image: a function of the item, its true progress, and the image."""

    def label(item: Item, _: bool) -> Label:
        left, right = (value(item, truth, side) for truth, side in zip(item.truth, item.sides, strict=True))
        return Label.of(left, right)

    return ItemJudge(value=lambda item: value(item, true_value(item), item.sides[0]), label=label)


def _when(is_affected: Callable[[Item], bool], spoilt: ItemJudge) -> ItemJudge:
    """Returns a judge with the true answers, except for affected items, which `spoilt` answers."""
    return ItemJudge(
        value=lambda item: spoilt.value(item) if is_affected(item) else true_value(item),
        label=lambda item, swapped: spoilt.label(item, swapped) if is_affected(item) else true_label(item),
    )


def guessing() -> ItemJudge:
    """Returns a judge that answers at random, depending on the whole question."""
    return ItemJudge(
        value=lambda item: chance(item, ""),
        label=lambda item, swapped: Label.LEFT if chance(item, str(swapped)) < 0.5 else Label.RIGHT,
    )


_INVERTED = ItemJudge(value=lambda item: 1 - true_value(item), label=lambda item, _: true_label(item).swapped)
_NO_GOAL = frozenset({"scores a success as high when it is shown backwards"})
_WEAK = frozenset({"too weak", "probably too weak"})
_FOOLED = _WEAK | {"can be fooled"}
_UNCERTAIN = _FOOLED | {"uncertain"}


def _misread(item: Item, value: float, side: FloatArray) -> float:
    is_right = chance(item, "same third", side[-1]) >= 1 / 3
    if item.is_pair:
        return value if is_right else 1 - value
    return 0.9 if item.success == is_right else 0.1


def _at(moment: Callable[[Sequence[float]], float]) -> ItemJudge:
    """Returns a judge that scores an episode by the progress of one of its images, whatever the question."""

    def value(item: Item) -> float | None:
        if not item.is_video or item.case in ("other task", "other goal", "noise"):
            return true_value(item)
        progress = moment(item.progress)
        return 1.0 if progress >= 0.99 else 0.9 * progress

    return ItemJudge(value=value)


def _is_hard(item: Item) -> bool:
    return abs(item.gap) < _HARD if item.is_pair else item.truth[0] >= 0.5


PLANTED: Mapping[str, Planted] = {
    # faults on which the bench was silent, or named something else
    "motion": Planted(
        what="scores by how much the clip moves", judge=_measuring("motion"), scores="push_block",
        names=_NO_GOAL, grades=_FOOLED,
    ),
    "near misses": Planted(
        what="calls every near miss a success", scores="push_block",
        judge=lambda: ItemJudge(value=lambda item: 1.0 if item.case == "near miss" else true_value(item)),
        names=frozenset({"calls near misses successes"}), grades=_FOOLED,
    ),
    "one of four": Planted(
        what="knows one task of four and guesses on the others", pairs="push_block", scores="push_block",
        judge=lambda: _when(lambda item: item.goal != _DRAWER, guessing()),
        names=frozenset({"does not tell nearer from farther"}), grades=_UNCERTAIN,
    ),
    "inverted": Planted(
        what="inverted on one task", pairs="push_block", scores="push_block",
        judge=lambda: _when(lambda item: item.goal.startswith(_BLOCK), _INVERTED),
        names=frozenset({"prefers the side that is farther from the goal"}), grades=_WEAK,
    ),
    "same third": Planted(
        what="wrong about the same third of images every time", judge=lambda: _by_value(_misread),
        pairs="drawer_open", scores="push_block",
        names=frozenset({"makes the same mistakes again"}), grades=_FOOLED,
    ),
    "wide gaps": Planted(
        what="right from a gap of 0.4 on, chance below", pairs="drawer_open",
        judge=lambda: ItemJudge(label=_when(_is_hard, guessing()).label),
        names=frozenset({"does not tell nearer from farther at small gaps"}), grades=_UNCERTAIN,
    ),
    "unreadable": Planted(
        what="40 % of answers cannot be read", pairs="drawer_open", scores="push_block",
        judge=lambda: _when(
            lambda item: chance(item, "unread") < 0.4, ItemJudge(value=lambda _: None, label=lambda *_: None)
        ),
        names=frozenset({"often gives no answer that can be read"}), grades=_UNCERTAIN,
    ),
    "hard ones alike": Planted(
        what="one score and no preference for all that is hard", pairs="drawer_open", scores="push_block",
        judge=lambda: _when(_is_hard, ItemJudge(value=lambda _: 0.5, label=lambda *_: Label.TIE)),
        names=frozenset({"sees no difference at small gaps"}), grades=_UNCERTAIN,
    ),
    "first image": Planted(
        what="sees the first image only", judge=lambda: _at(lambda progress: progress[0]), scores="push_block",
        names=frozenset({"sees the first image only"}), grades=_WEAK,
    ),
    "best image": Planted(
        what="takes the best image anywhere in the clip", judge=lambda: _at(max), scores="push_block",
        names=frozenset({"scores the best image anywhere in the clip"}), grades=_FOOLED,
    ),
    "constant": Planted(
        what="one answer to everything", pairs="cartpole", scores="cartpole",
        judge=lambda: ItemJudge(value=lambda _: 0.5, label=lambda _, swapped: Label.RIGHT if swapped else Label.LEFT),
        names=frozenset({"scores everything alike"}), grades=_WEAK,
    ),
    "redder": Planted(
        what="prefers the redder image", judge=_measuring("redness"), pairs="push_block", scores="push_block",
        names=frozenset({"chooses the redder image"}), grades=_FOOLED,
    ),
    # documented faults
    "prefers left": Planted(
        what="says left in three of four questions", pairs="drawer_open",
        judge=lambda: ItemJudge(
            label=lambda item, swapped: (
                (Label.RIGHT if swapped else Label.LEFT) if chance(item, f"{swapped}") < 0.75 else true_label(item)
            )
        ),
        names=frozenset({"prefers the left image"}),
    ),
    "brighter": Planted(
        what="prefers the brighter image", judge=_measuring("brightness"), pairs="push_block", scores="push_block",
        names=frozenset({"chooses the brighter image"}), grades=_FOOLED,
    ),
    "no instruction": Planted(
        what="ignores the instruction", scores="push_block",
        judge=lambda: ItemJudge(
            value=lambda item: 1.0 if item.case in ("other task", "other goal") else true_value(item),
            label=lambda item, _: Label.of(item.sides[0][-1].sum(), item.sides[1][-1].sum())
            if item.case == "other task" else true_label(item),
        ),
        names=frozenset({"ignores the instruction when it scores"}), grades=_FOOLED,
    ),
    "last frame": Planted(
        what="sees the last image only", judge=lambda: _at(lambda progress: progress[-1]), scores="push_block",
        names=frozenset({"sees the last frame only"}),
    ),
    "copies": Planted(
        what="copies the answer before in two of three questions", judge=CopiesBefore,
        pairs="drawer_open", scores="push_block", names=frozenset({"copies the answer before"}),
    ),
    # further faults
    "hand": Planted(
        what="scores by the distance of the hand from its start", judge=_measuring("hand_distance"),
        scores="push_block", names=_NO_GOAL, grades=_FOOLED,
    ),
    "contrast": Planted(
        what="compares by contrast", judge=_measuring("contrast"), pairs="drawer_open",
        names=frozenset({"follows contrast"}), grades=_FOOLED,
    ),
    "wrong block": Planted(
        what="pays for any goal of the scene", scores="push_block",
        judge=lambda: ItemJudge(value=lambda item: 1.0 if item.case == "other goal" else true_value(item)),
        names=frozenset({"scores a success as high under another goal of the scene"}), grades=_FOOLED,
    ),
    "stillness": Planted(
        what="pays for an episode in which nothing happens", scores="push_block",
        judge=lambda: ItemJudge(value=lambda item: 1.0 if item.case == "still" else true_value(item)),
        names=frozenset({"scores an episode as high in which nothing happens"}), grades=_FOOLED,
    ),
    "noise": Planted(
        what="takes noise for a success", scores="push_block",
        judge=lambda: ItemJudge(value=lambda item: 1.0 if item.case == "noise" else true_value(item)),
        names=frozenset({"scores noise as high as a success"}),
    ),
    "never decides": Planted(
        what="never has a preference", pairs="drawer_open", judge=lambda: ItemJudge(label=lambda *_: Label.TIE),
        names=frozenset({"never decides"}), grades=_WEAK,
    ),
    "always decides": Planted(
        what="chooses a side of two equal images", pairs="drawer_open",
        judge=lambda: _when(lambda item: item.case == "same image", guessing()),
        names=frozenset({"prefers one of two equal images"}),
    ),
    "light": Planted(
        what="takes the side with more light wherever it was changed", pairs="drawer_open",
        judge=lambda: ItemJudge(
            label=lambda item, _: true_label(item).swapped if item.case == "brighter" else true_label(item)
        ),
        names=frozenset({"follows brightness"}), grades=_FOOLED,
    ),
    "words": Planted(
        what="guesses where the goal is put in other words", pairs="drawer_open", scores="push_block",
        judge=lambda: _when(lambda item: item.case == "reworded", guessing()),
        names=frozenset({"errs more often where the goal is put in other words"}),
    ),
    "pixels": Planted(
        what="guesses where the image is moved by a few pixels", pairs="drawer_open", scores="push_block",
        judge=lambda: _when(lambda item: item.case == "shifted", guessing()),
        names=frozenset({"errs more often where the images are moved by a few pixels"}),
    ),
    "mirrored": Planted(
        what="guesses where the image is mirrored", pairs="push_block", scores="push_block",
        judge=lambda: _when(lambda item: item.case == "mirrored", guessing()),
        names=frozenset({"errs more often where the images are mirrored"}),
    ),
    "half way": Planted(
        what="calls half of the way a success", scores="push_block",
        judge=lambda: ItemJudge(value=lambda item: 1.0 if item.case == "cut short" else true_value(item)),
        names=frozenset({"calls episodes cut short successes"}), grades=_FOOLED,
    ),
    "too sure": Planted(
        what="right in 70 % and always sure (its calibration error is a figure, and no fault)",
        judge=lambda: honest(0.7), pairs="drawer_open", scores="push_block",
    ),
    "arm": Planted(
        what="scores by the arm in view", judge=_measuring("arm_in_view"), scores="push_block",
        names=frozenset({"does not tell success from failure"}), grades=_UNCERTAIN,
    ),
    "length": Planted(
        what="scores by the length of the episode", judge=_measuring("long_episodes"), scores="push_block",
        names=frozenset({"does not tell success from failure"}), grades=_UNCERTAIN,
    ),
    "rare state": Planted(
        what="pays for a state that no script meets (see suites of a run's own)", judge=ItemJudge, scores="push_block",
    ),
}  # fmt: skip
