"""Entries of a table of judges: one small JSON file per judge, with figures recomputed from its answers.

An entry belongs to a frozen suite: it names the suite's hash, and has the answers in the order of asking, with the
replies behind them where the judge wrote any. Questions, truth and colours come from the suite's file, so that no entry
can claim its own truth. All content is untrusted, answers too, since the truth is public: see `checks`.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from rlvlm.core.disk import write_whole
from rlvlm.core.errors import UsageError
from rlvlm.core.foreign import read_json
from rlvlm.core.judging import Label, Stamp, Status
from rlvlm.judge_bench.archive import MAX_FRAMES, SUFFIX, Archive, open_archive
from rlvlm.judge_bench.asking import Answer, asking_order, first_for_person
from rlvlm.judge_bench.bench import Measured, summarise
from rlvlm.judge_bench.figures import cost_figures
from rlvlm.judge_bench.frozen import FrozenItems, frozen_items
from rlvlm.judge_bench.prediction import predict_row, read_curve
from rlvlm.judge_bench.suites import Suite, questions_of_person
from rlvlm.judges.config import JudgeConfig, ScoreMode

VERSION = 1
ENTRY_FILE = "entry.json"
SHOWN = {"accuracy": "pairs", "undecided": "pairs", "consistent": "pairs", "auc": "scores", "voc": "scores"}
"""Figures of an entry, with the kind of question behind each."""
COSTS = ("answers_per_s", "usd_per_1000")
"""Figures of an entry's own machine and bill, which cannot be recomputed from its answers."""
ALL = "all tasks"
_MAX_BYTES = 4 * 2**20
_MAX_COST = 1e9
_MAX_TEXT = 500
"""Characters of a reply, as many as a bench keeps."""
_LETTERS = {
    "l": (Status.OK, Label.LEFT), "r": (Status.OK, Label.RIGHT), "t": (Status.NO_PREFERENCE, Label.TIE),
    "x": (Status.INVALID, None), "f": (Status.FAILED, None),
}  # fmt: skip
"""Letters for answers to pairs: left, right, tie, unreadable, failed."""
_NO_SCORES = {"x": Status.INVALID, "f": Status.FAILED}
_DIGITS = 6
_EXACT = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """Frozen suite without its images."""

    archive: Archive
    tasks: Mapping[str, FrozenItems]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A judge in the table."""

    name: str
    row: Mapping[str, Any]
    """Row as returned by `bench.summarise`, with `prediction`; all but its cost is computed from the answers."""
    figures: Mapping[str, Any]
    """Figures as returned by `figures_of`."""
    cost: Mapping[str, float | None]
    """Figures named in `COSTS`; None if not reported."""
    asked: str
    """SHA-256 of judge, questions and answers."""


def read_questions(path: Path) -> Questions:
    """Returns the questions of a frozen suite; its images are not needed.

    Raises:
        UsageError: the file is damaged or was altered.
    """
    archive = open_archive(path)
    return Questions(
        archive=archive, tasks={entry.task: frozen_items(archive, entry.task, None) for entry in archive.tasks}
    )


def suite_beside(entry: Path) -> Path:
    """Returns the only frozen suite in the folder of an entry.

    Raises:
        UsageError: there are several, or none.
    """
    beside = sorted(entry.parent.glob(f"*{SUFFIX}"))
    if len(beside) != 1:
        what = f"{entry.parent} has {len(beside)} files of frozen suites, and one says what was asked"
        raise UsageError(what, f"--items FILE{SUFFIX}")
    return beside[0]


def write_entry(found: Measured, name: str, folder: Path) -> None:
    """Writes the entry of a judge that was asked all of a frozen suite into the bench's folder; else nothing."""
    if found.suite.frozen is not None and found.is_whole:
        entry = entry_of(found, name, read_questions(found.suite.frozen.path))
        write_whole(folder / ENTRY_FILE, entry_text(entry))


def entry_of(found: Measured, name: str, questions: Questions) -> dict[str, Any]:
    """Returns the content of `ENTRY_FILE` for a judge that was asked about a frozen suite.

    A person was asked only its first questions.

    Args:
        found: answers of the judge.
        name: name in the table; empty for the judge's stamp.
        questions: questions of the suite.
    """
    answers: dict[str, Any] = {}
    letters = {str(label or status): letter for letter, (status, label) in _LETTERS.items()}
    for task, given in found.answers.items():
        pairs = [answer for answer in given if found.made[task].items[answer.item].is_pair]
        scores = [answer for answer in given if not found.made[task].items[answer.item].is_pair]
        answers[task] = {"pairs": "".join(letters[answer.label or answer.status] for answer in pairs)}
        if any(answer.p is not None for answer in pairs):
            rounded = [None if answer.p is None else [round(float(p), 4) for p in answer.p] for answer in pairs]
            answers[task]["p"] = rounded
        answers[task]["scores"] = [
            round(float(answer.value), _DIGITS) if math.isfinite(answer.value) else
            ("f" if answer.status == Status.FAILED else "x")
            for answer in scores
        ]  # fmt: skip
        replies = {"pairs": [answer.text for answer in pairs], "scores": [answer.text for answer in scores]}
        if any(any(texts) for texts in replies.values()):
            answers[task]["replies"] = replies
    cost = cost_figures(found.rows()[1])
    value = {
        "version": VERSION,
        "name": name or " ".join(filter(None, (found.stamp.judge, found.stamp.prompt))),
        "judge": asdict(found.stamp),
        "suite": found.suite.name,
        "digest": questions.archive.digest,
        "frames": found.num_frames,
        "seed": found.seed,
        "score": found.config.score,
        "cost": {key: cost[key] for key in COSTS},
        "answers": answers,
    }
    # from the rounded numbers in the entry, and not from the original answers
    return value | {"figures": figures_of(_row(_measured(value, questions)))}


def entry_text(value: Mapping[str, Any]) -> str:
    """Returns an entry as JSON with one line per task, so that diffs are readable."""
    lines = []
    for key, part in value.items():
        text = json.dumps(part, allow_nan=False)
        if key in ("figures", "answers"):
            rows = ",\n".join(f"  {json.dumps(task)}: {json.dumps(own, allow_nan=False)}" for task, own in part.items())
            text = f"{{\n{rows}\n }}"
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_entry(path: Path, questions: Questions) -> Entry:
    """Reads a judge of the table, and computes its figures from its answers.

    Raises:
        UsageError: the file is no entry, is about other items, or its figures do not follow from its answers.
    """
    # whatever a file may hold ends in this one error, so that one bad entry does not end a page of many
    fix = "rlvlm judge-bench FILE.zip writes one"
    try:
        value = read_json(path, _MAX_BYTES)
        if not isinstance(value, dict) or value.get("version") != VERSION:
            raise ValueError(f"it is not of version {VERSION}")
        if value["digest"] != questions.archive.digest:
            asked = (
                f"hash {str(value['digest'])[:12]!r}, and {questions.archive.path} has {questions.archive.digest[:12]}"
            )
            raise UsageError(f"{path} was asked about other items: {asked}", "ask the judge about that file")
        name, cost = value["name"], {key: value["cost"][key] for key in COSTS}
        if not (isinstance(name, str) and 0 < len(name) <= 120 and name.isprintable()):
            raise ValueError("its name is no line of up to 120 characters")
        if not all(number is None or (_is_number(number) and 0 <= number <= _MAX_COST) for number in cost.values()):
            raise ValueError(f"its cost is no number in [0, {_MAX_COST:.0e}]")
        row = _row(_measured(value, questions))
        figures = figures_of(row)
        for place, claimed, own in _different(value["figures"], figures, ()):
            said = f"{', '.join(place)} is {claimed!r:.60}, and its answers give {own!r:.60}"
            raise UsageError(f"{path}: its figures do not follow from its answers: {said}", fix)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise UsageError(f"{path} is no entry: {type(error).__name__}: {error}", fix) from error
    asked = {key: value[key] for key in ("judge", "digest", "frames", "seed", "score", "answers")}
    return Entry(
        name=name,
        row=row,
        figures=figures,
        cost=cost,
        asked=hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest(),
    )


def figures_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an entry's figures: for all tasks together and for each, value and 95 % interval of `SHOWN` (None if
    nothing was asked) and the grade of each kind of question; and the names of the faults.
    """
    parts = {ALL: row["figures"], **row["tasks"]}
    found: dict[str, Any] = {"faults": sorted(fault["name"] for fault in row["faults"])}
    for task, own in parts.items():
        figures = {name: own[kind].get(name) for name, kind in SHOWN.items()}
        found[task] = {
            name: None if figure is None else [round(figure[end], _DIGITS) for end in ("value", "low", "high")]
            for name, figure in figures.items()
        }
    for expected in row["prediction"]:
        found[expected["task"]][f"grade of {expected['kind']}"] = expected["grade"]
    return found


def _row(found: Measured) -> dict[str, Any]:
    row = summarise(found)
    expected = [asdict(each) for each in predict_row(row, read_curve()) if each.is_asked]
    return row | {"prediction": expected}


def _measured(value: Mapping[str, Any], questions: Questions) -> Measured:
    """Returns an entry's answers in the form of the bench.

    Raises:
        ValueError, TypeError, KeyError: they do not fit the questions, or are malformed.
    """
    stamp = value["judge"]
    if not all(isinstance(text, str) and len(text) <= 2_000 and text.isprintable() for text in stamp.values()):
        raise ValueError("its judge is not described by lines of text")
    archive, frames, seed = questions.archive, value["frames"], value["seed"]
    if not (type(frames) is int and 1 <= frames <= min(MAX_FRAMES, archive.frames) and type(seed) is int and seed >= 0):
        raise ValueError(f"frames is 1 to {archive.frames} and seed a number >= 0, got {frames!r:.20} and {seed!r:.20}")
    if value["score"] not in get_args(ScoreMode) or (value["score"] == "utility") != archive.turns:
        raise ValueError(f"score is none that the items can be asked with, got {value['score']!r:.40}")
    config = JudgeConfig(score=value["score"])
    suite = Suite(name=archive.suite, tasks=tuple(questions.tasks), frozen=archive)
    found = Measured(suite=suite, stamp=Stamp(**stamp), config=config, num_frames=frames, seed=seed)
    if value["answers"].keys() != questions.tasks.keys():
        raise ValueError(f"it does not answer to each of {', '.join(questions.tasks)}, or to other tasks")
    for task, frozen in questions.tasks.items():
        found.made[task] = frozen.made
        order = asking_order(frozen.made, seed)
        if found.stamp.judge.startswith("human"):
            order = first_for_person(frozen.made, order, questions_of_person(suite))
        found.answers[task] = list(_answers(value["answers"][task], frozen, order))
    return found


def _answers(
    given: Mapping[str, Any], frozen: FrozenItems, order: Mapping[str, Sequence[tuple[int, bool]]]
) -> Iterator[Answer]:
    """Yields the answers to a task; raises as `_measured` does."""
    task, probabilities = frozen.made.task, given.get("p") or [None] * len(given["pairs"])
    if len(probabilities) != len(given["pairs"]):
        raise ValueError(f"{task} has {len(probabilities)} probabilities for {len(given['pairs'])} pairs")
    for kind in ("pairs", "scores"):
        # a judge that only scores, or only compares, leaves the other kind out
        if len(given[kind]) not in (0, len(order[kind])):
            raise ValueError(f"{task} has {len(given[kind])} answers to {len(order[kind])} {kind}")
        texts = given["replies"][kind] if "replies" in given else [""] * len(given[kind])
        if len(texts) != len(given[kind]) or not all(
            isinstance(text, str) and len(text) <= _MAX_TEXT for text in texts
        ):
            raise ValueError(f"{task} has not one reply of up to {_MAX_TEXT} characters for each of its {kind}")
        for place, ((item, swapped), said) in enumerate(zip(order[kind], given[kind], strict=False)):
            colours = frozen.colours[item][::-1] if swapped else frozen.colours[item]
            label, numeric, p = None, math.nan, None
            if kind == "pairs":
                (status, label), p = _LETTERS[said], _probabilities(probabilities[place])
            elif isinstance(said, str):
                status = _NO_SCORES[said]
            elif _is_number(said) and 0 <= said <= 1:
                status, numeric = Status.OK, float(said)
            else:
                raise ValueError(f"{task} has the score {said!r:.40}, which is none in [0, 1]")
            yield Answer(
                task=task,
                item=item,
                swapped=swapped,
                status=str(status),
                label=str(label or ""),
                value=numeric,
                p=p,
                text=texts[place],
                colours=colours,
            )


def _probabilities(said: Any) -> tuple[float, float, float] | None:
    if said is None:
        return None
    if len(said) != 3 or not all(_is_number(p) and 0 <= p <= 1 for p in said):
        raise ValueError(f"{said!r:.60} are no three probabilities")
    left, right, tie = map(float, said)
    return left, right, tie


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _different(claimed: Any, own: Any, place: Sequence[str]) -> Iterator[tuple[Sequence[str], Any, Any]]:
    """Yields the differences beyond rounding between two JSON values: the path, and both values."""
    if isinstance(own, dict) and isinstance(claimed, dict) and claimed.keys() == own.keys():
        for key, part in own.items():
            yield from _different(claimed[key], part, (*place, key))
    elif isinstance(own, list) and isinstance(claimed, list) and len(own) == len(claimed):
        for mine, theirs in zip(own, claimed, strict=True):
            yield from _different(theirs, mine, place)
    elif claimed != own and not (_is_number(claimed) and _is_number(own) and abs(claimed - own) <= _EXACT):  # type: ignore[operator]
        yield place, claimed, own
