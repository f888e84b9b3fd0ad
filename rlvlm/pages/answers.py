"""One judge's answers with the truth, from a bench, a run's query log or a label store: what every page and chart of a
judge reads.

The bench's figures and faults (`judge_bench.faults.grade`) apply to all of them: a judge report is a judge bench on
recorded labels.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Stamp, Verdict
from rlvlm.demonstrations.tables import DAMAGES, read_table
from rlvlm.judge_bench.asking import Answer
from rlvlm.judge_bench.faults import Graded, grade
from rlvlm.judge_bench.figures import cost_figures, difficulty_of, outcome_of
from rlvlm.judge_bench.items import NUM_BINS, Item
from rlvlm.judge_bench.table import read_rows
from rlvlm.labels.export import SCHEMA
from rlvlm.labels.records import Question, StoredAnswer, answer_key, truth_about
from rlvlm.labels.store import LabelStore, is_store, open_store
from rlvlm.runs.files.answers import MAX_TEXT, logged_pairs, pair_of
from rlvlm.runs.files.folder import RunFolder, find_folders

ANSWERS_FILE = "answers.parquet"
"""Table of answers in a bench's folder, and in that of a report."""
OUTCOMES = {
    "correct": "right",
    "incorrect": "wrong",
    "truth ties": "tie",
    "not checked": "unknown",
    "no preference": "undecided",
    "invalid": "invalid",
    "failed": "failed",
}
"""Outcomes of an answer, each with its name in `outcome_of`; unread answers are named by their status. Not checked:
decided, but the truth is unknown."""
TRUTHS = ("left", "right", "tie", "unknown")
GIVEN = ("left", "right", "no preference", "invalid", "failed")


@dataclass(kw_only=True)
class Answers:
    """N answers of one judge."""

    name: str
    """Short name for a legend."""
    about: str = ""
    """One line: judge, prompt, decoding, goal."""
    judge: str = ""
    """Name of the answerer, from the stamp."""
    task: str = ""
    store: LabelStore | None = None
    """Store that has the images."""
    num_frames: int = 1
    """Maximum number of images shown per episode."""
    scale: float = 1.0
    """Scale by which truths were divided: 1 for progress, the widest gap for returns."""
    items: list[Item] = field(default_factory=list)
    """[N] item of each answer; truths may be NaN. A pair that was asked in both orders is one item."""
    answers: list[Answer] = field(default_factory=list)
    """[N] answers as in the bench, without colours."""
    images: list[tuple[str, str]] = field(default_factory=list)
    """[N] digests of the last image of each side, as shown."""
    keys: list[str] = field(default_factory=list)
    """[N] keys of the queries, shared with other answerers of the same queries; empty for the other order."""

    def __len__(self) -> int:
        return len(self.answers)

    def add(self, item: Item, answer: Answer, images: tuple[str, str], key: str = "") -> None:
        """Adds one answer."""
        self.keys.append(key)
        self.items.append(item)
        self.answers.append(answer)
        self.images.append(images)

    @property
    def latencies(self) -> NDArray[np.float64]:
        """[M] seconds until answers came, M <= N, without failures, whose time is that of waiting in vain, and without
        0, which stores hold for answers that were not timed.
        """
        return np.array(
            [answer.latency_s for answer in self.answers if answer.latency_s > 0 and answer.status != "failed"]
        )

    @cached_property
    def graded(self) -> Graded:
        """Figures and faults of the answers, of which none may be added afterwards."""
        return grade(self.items, self.answers, self.num_frames)

    @property
    def by_difficulty(self) -> NDArray[np.int64]:
        """[10, 3] counts of right, wrong and other answers to pairs by tenths of the gap in the truth."""
        return np.array(self.graded.pairs.get("by_difficulty", np.zeros((NUM_BINS, 3))), np.int64)

    @property
    def has_truth(self) -> bool:
        """Whether the truth about any pair is known."""
        return any(item.case == "pair" and np.isfinite(item.gap) for item in self.items)


def read_sources(paths: Sequence[Path]) -> list[Answers]:
    """Reads the answers in `paths`: runs, label stores (one entry per judge), or folders that contain runs.

    Raises:
        UsageError: there is no path, nothing to report under one, or a run or store that cannot be read.
    """
    if not paths:
        raise UsageError("name at least one run's folder or label store", "rlvlm judge-report runs/drawer_open/<time>")
    found: list[Answers] = []
    for path in paths:
        if (file := path / ANSWERS_FILE if path.is_dir() else path).suffix == ".parquet" and file.exists():
            found += read_answers(file)
            continue
        if is_store(path):
            found += read_store(path)
            continue
        for folder in find_folders(path):
            found += read_run(folder)
    found = [answers for answers in found if len(answers)]
    if not found:
        raise UsageError(
            f"no comparison was asked in {', '.join(map(str, paths))}",
            "name a run with --reward.source preference, or a store with verdicts; what a judge scored is on the run's "
            "own judge_panel.html",
        )
    met = Counter[str]()  # sources of the same name are numbered in the legend
    for place, answers in enumerate(found):
        met[answers.name] += 1
        if (number := met[answers.name]) > 1:
            found[place] = replace(answers, name=f"{answers.name} ({number})")
    return found


def read_run(folder: RunFolder) -> list[Answers]:
    """Returns the answers in a run's query log, one entry per answerer.

    Images and prices come from the run's store if it has one, and so do answers about the same pairs in the other order
    (`--ask-swapped`).
    """
    config = folder.config()
    logged = folder.queries.read()
    place = config.labels(folder.labels)
    store = open_store(place) if is_store(place) else None  # none for runs without a judge, or if the store is gone
    # a shared store has answers of other runs too
    asked = {row["question"] for row in logged if row["question"]}
    stored: dict[str, list[StoredAnswer]] = defaultdict(list)
    for entry in store.answers() if store else ():
        if entry.question.id in asked:
            stored[entry.question.id].append(entry)
    # a log without names is of one judge
    by = list(dict.fromkeys(row.get("answered_by") or "" for row in logged))
    sources = {
        name: Answers(
            name=f"{folder.path.name} by {name}" if len(by) > 1 else folder.path.name,
            about=config.title, judge=name, task=config.task, store=store,
        )
        for name in by
    }  # fmt: skip
    has_goal = config.reward.asks_judge or config.kind.asks_person(config)
    items, answers = logged_pairs(logged, config.task, config.judge_goal if has_goal else "")
    for row, item, answer in zip(logged, items, answers, strict=True):
        name = row.get("answered_by") or ""
        found = sources[name]
        key = row["question"] or f"{folder.path}: {row['session']}, {row['index']}"
        by_name = (entry for entry in stored[row["question"]] if _is_by(entry.answer.stamp.judge, name))
        entry = next(by_name, None)
        if entry is None or store is None or not isinstance(entry.answer, Verdict):
            found.add(item, answer, ("", ""), key)
            continue
        # the log has the answer itself, the store its price
        kept = _answer(entry.answer, config.task, answer.item, swapped=False)
        found.add(item, replace(answer, tokens=kept.tokens, cost_usd=kept.cost_usd), _shown(entry.question), key)
        found.about = f"{_describe(entry.answer.stamp)}; {config.title}"
        other = store.find(answer_key(entry.question.swapped.id, entry.answer.stamp))
        if isinstance(other, Verdict) and entry.question.swapped.id not in asked:
            swapped = _answer(other, config.task, answer.item, swapped=True)
            found.add(item, swapped, _shown(entry.question.swapped))
    return list(sources.values())


def read_store(folder: Path) -> list[Answers]:
    """Returns the comparisons in a store, one entry per stamp and task.

    Raises:
        UsageError: the folder is no store, or has a newer schema.
    """
    store = open_store(folder)
    truths = store.truths()
    groups: dict[tuple[Stamp, str], list[StoredAnswer]] = defaultdict(list)
    for entry in store.answers():
        if isinstance(entry.answer, Verdict):
            groups[entry.answer.stamp, entry.origin.task].append(entry)
    found = []
    for (stamp, task), stored in groups.items():
        known = {entry.question.id: truth_about(entry.question, truths) for entry in stored}
        values = {name: (np.nan, np.nan) if truth is None else truth.values for name, truth in known.items()}
        gaps = [abs(left - right) for left, right in values.values() if not np.isnan(left - right)]
        has_progress = any(truth is not None and truth.progress is not None for truth in known.values())
        # progress is in [0, 1]; returns have the env's scale, and are divided by the widest gap
        scale = 1.0 if has_progress or not gaps else max(*gaps, 1e-6)
        # a judge's answers about several goals are one entry; the first few goals name it
        goals = sorted({entry.question.goal for entry in stored})
        source = Answers(
            name=f"{stamp.judge} {stamp.prompt}".strip(),
            about=f"{_describe(stamp)}; goal {', '.join(goals[:3])}",
            judge=f"{stamp.judge} {stamp.prompt}",
            task=task,
            store=store,
            scale=scale,
        )
        indices: dict[str, int] = {}
        pairs: dict[int, Item] = {}
        for entry in stored:
            # the order that came first defines the pair, and the other is the same pair swapped
            swapped = entry.question.swapped.id in indices
            number = indices.setdefault(entry.question.swapped.id if swapped else entry.question.id, len(indices))
            left, right = values[entry.question.id]
            item = pairs.setdefault(number, pair_of(entry.question.goal, (left / scale, right / scale)))
            assert isinstance(entry.answer, Verdict), "scores were left out above"
            key = "" if swapped else entry.question.id
            source.add(item, _answer(entry.answer, task, number, swapped), _shown(entry.question), key)
        found.append(source)
    return found


def read_answers(file: Path) -> list[Answers]:
    """Returns the answers in a table of a bench, of scored data or of `labels export`, one entry per judge and task; a
    bench's tasks are one.

    Raises:
        UsageError: it is no such table.
    """
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    try:
        for row in read_table(file, SCHEMA.names.__contains__).to_pylist():
            if row["item"] is not None or row["kind"] == "compare":  # scores of a store say no case
                groups[row["judge"], row["prompt"] or "", "" if row["item"] is not None else row["task"]].append(row)
        found = []
        for (judge, prompt, task), rows in groups.items():
            name = " ".join(filter(None, (judge, prompt)))
            source = Answers(name=name, about=f"{file}", judge=name, task=task)
            for item, answer in zip(*read_rows(rows), strict=True):
                source.add(item, answer, ("", ""))
            found.append(source)
    except DAMAGES as error:
        what = f"{file} is no table of answers: {type(error).__name__}: {error}"
        raise UsageError(what, "name a bench's folder, or a file of rlvlm labels export") from error
    return found


def _is_by(judge: str, name: str) -> bool:
    """Returns whether an answer stamped with `judge` was given by `name` of a query log.

    `name` is empty in older logs, and `human` for people, whose names only the store has.
    """
    return not name or judge == name or judge.startswith(f"{name}:")


def _answer(verdict: Verdict, task: str, place: int, swapped: bool) -> Answer:
    return Answer(
        task=task,
        item=place,
        swapped=swapped,
        status=str(verdict.status),
        label=str(verdict.label or ""),
        p=verdict.probabilities,
        text=verdict.text[:MAX_TEXT],
        latency_s=verdict.latency_s,
        tokens=np.nan if verdict.usage is None else verdict.usage.tokens_in + verdict.usage.tokens_out,
        cost_usd=np.nan if verdict.usage is None or verdict.usage.cost_usd is None else verdict.usage.cost_usd,
    )


def _shown(question: Question) -> tuple[str, str]:
    return (question.left or ("",))[-1], (question.right or ("",))[-1]


def _describe(stamp: Stamp) -> str:
    parts = (stamp.judge, f"revision {stamp.revision[:12]}" if stamp.revision else "", stamp.prompt, stamp.decoding)
    return ", ".join(part for part in parts if part)


def outcomes(source: Answers) -> NDArray[np.str_]:
    """Returns the [N] outcomes of the answers, as in `OUTCOMES`; `scored` for a score that could be read."""
    names = {outcome: name for name, outcome in OUTCOMES.items()}
    found = []
    for item, answer in zip(source.items, source.answers, strict=True):
        end = outcome_of(item, answer) if len(item.truth) == 2 else "unread"
        end = answer.status if end == "unread" else end
        found.append(names.get(end, "scored"))
    return np.array(found)


def by_bin(source: Answers) -> dict[str, NDArray[np.int64]]:
    """Returns [10] counts of each outcome by difficulty, for answers whose truth is known."""
    counts = {name: np.zeros(NUM_BINS, np.int64) for name in OUTCOMES}
    for item, outcome in zip(source.items, outcomes(source), strict=True):
        if item.case == "pair" and np.isfinite(item.gap):
            counts[str(outcome)][difficulty_of(item)] += 1
    return counts


def confusion(source: Answers) -> NDArray[np.int64]:
    """Returns [4, 5] counts of truths (`TRUTHS`) against answers (`GIVEN`)."""
    table = np.zeros((len(TRUTHS), len(GIVEN)), np.int64)
    for item, answer in zip(source.items, source.answers, strict=True):
        if item.case != "pair":
            continue
        # the right answer: the label left would be right if the left side is nearer
        as_left = outcome_of(item, replace(answer, label="left"))
        truth = {"right": "left", "wrong": "right"}.get(as_left, as_left)
        table[
            TRUTHS.index(truth), GIVEN.index(answer.label if answer.status == "ok" else answer.status.replace("_", " "))
        ] += 1
    return table


def summarise(source: Answers) -> dict[str, Any]:
    """Returns one row of `judge_report.json`.

    Returns:
        `source`, `about`, `answers` and the count of each outcome; `figures`: `pairs`, `scores` and `cost`,
        with `latency_p50_s` and `latency_p95_s`; `faults` as in a bench.json.
    """
    found, graded = outcomes(source), source.graded
    times = np.quantile(source.latencies, [0.5, 0.95]).tolist() if len(source.latencies) else (None, None)
    cost = cost_figures(source.answers)
    cost |= {"answers_per_s": None}  # each answer has the time of its whole batch
    return {
        "source": source.name,
        "about": source.about,
        "answers": len(source),
        **{name.replace(" ", "_"): int((found == name).sum()) for name in OUTCOMES},
        "figures": {
            "pairs": graded.pairs,
            "scores": graded.scores,
            "cost": cost | {"latency_p50_s": times[0], "latency_p95_s": times[1]},
        },
        "faults": [asdict(fault) for fault in graded.faults],
    }
