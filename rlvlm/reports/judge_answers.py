"""Answers of one judge as columns, out of a run's query log or a label store. What every figure is made of."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Stamp, Verdict
from rlvlm.labels.records import StoredAnswer, Truth, answer_key, truth_about
from rlvlm.labels.store import LabelStore, is_store, open_store
from rlvlm.runs.folder import RunFolder, find_folder

Floats = NDArray[np.floating]

MAX_TEXT = 1_000
"""Characters kept of an answer's text."""
_TRUTHS = ("ground_truth_score_1", "ground_truth_score_2")
_CODES = {"0": "left", "1": "right"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """N answers of one judge to comparisons, one column per fact. An empty text or NaN is what nobody knows."""

    name: str
    """Short enough for a legend."""
    about: str
    """One line: judge, prompt, decoding, goal."""
    task: str
    status: NDArray[np.str_]
    """[N] as of `types.Status`."""
    label: NDArray[np.str_]
    """[N] left, right or tie."""
    swapped: NDArray[np.str_]
    """[N] the same judge's label where the images were shown in the other order."""
    p: Floats
    """[N, 3] probabilities of left, right and tie."""
    truth: Floats
    """[N, 2] what is true of left and right; the larger is nearer to the goal."""
    scale: float
    """What a gap in truth is divided by: 1 for progress, the widest gap for returns."""
    latency_s: Floats
    """[N] of the batch in which the answer came."""
    tokens: Floats
    """[N] read and written."""
    cost_usd: Floats
    """[N]."""
    images: Sequence[tuple[str, str]]
    """[N] digests of the last image of each side."""
    text: Sequence[str]
    """[N] untrusted, cut to `MAX_TEXT`."""
    store: LabelStore | None
    """Where the images are."""

    def __len__(self) -> int:
        return len(self.status)


def read_sources(paths: Sequence[Path]) -> list[Answers]:
    """The answers that `paths` name: of runs, of label stores (one entry per judge in it), of folders full of runs.

    Raises:
        UsageError: no path, nothing to report under one, or a run or store that cannot be read.
    """
    if not paths:
        raise UsageError("name at least one run's folder or label store", "rlvlm judge-report runs/drawer_open/<time>")
    found: list[Answers] = []
    for path in paths:
        if is_store(path):
            found += read_store(path)
            continue
        below = sorted(file.parent for file in path.glob("**/command.txt")) if path.is_dir() else []
        found += [read_run(folder) for folder in map(find_folder, below or [path])]
    found = [answers for answers in found if len(answers)]
    if not found:
        raise UsageError(
            f"no comparison was asked in {', '.join(map(str, paths))}",
            "name a run with --reward.source preference, or a store with verdicts; what a judge scored is on the run's "
            "own judge_panel.html",
        )
    return _with_distinct_names(found)


def read_run(folder: RunFolder) -> Answers:
    """The answers in a run's query log, with images and prices from its store where it has one."""
    config = folder.config()
    rows = folder.queries.read()
    place = config.labels(folder.labels)
    store = open_store(place) if is_store(place) else None  # none for runs without a judge, or whose store is gone
    asked = {row["question"] for row in rows if row.get("question")}
    items: dict[str, StoredAnswer] = {}
    for item in store.answers() if store else ():
        if item.question.id in asked:
            items.setdefault(item.question.id, item)  # of several judges' answers the first
    chosen = [items.get(row.get("question", "")) for row in rows]
    stamps = {item.answer.stamp for item in chosen if item is not None}
    judge = f"{_describe(next(iter(stamps)))}; " if len(stamps) == 1 else ""
    return Answers(
        name=folder.path.name,
        about=judge + config.title,
        task=config.task,
        status=np.array([row["status"] for row in rows]),
        label=np.array([_label(row) for row in rows]),
        swapped=np.array(["" if item is None else _swapped_label(store, item) for item in chosen]),
        p=np.array([[_number(row[name]) for name in ("p_left", "p_right", "p_tie")] for row in rows]).reshape(-1, 3),
        truth=np.array([[_number(row[name]) for name in _TRUTHS] for row in rows]).reshape(-1, 2),
        scale=1.0,
        latency_s=np.array([_number(row["latency_s"]) for row in rows]),
        tokens=np.array([_tokens(item) for item in chosen], np.float32),
        cost_usd=np.array([_cost(item) for item in chosen], np.float32),
        images=[("", "") if item is None else _last(item) for item in chosen],
        text=[row["text"][:MAX_TEXT] for row in rows],
        store=store,
    )


def read_store(folder: Path) -> list[Answers]:
    """The comparisons in a store, one entry per stamp and task.

    Raises:
        UsageError: it is no store, or of a newer schema.
    """
    store = open_store(folder)
    truths = store.truths()
    groups: dict[tuple[Stamp, str], list[StoredAnswer]] = defaultdict(list)
    for item in store.answers():
        if isinstance(item.answer, Verdict):
            groups[item.answer.stamp, item.origin.task].append(item)
    return [_of_items(stamp, task, items, truths, store) for (stamp, task), items in groups.items()]


def _of_items(
    stamp: Stamp, task: str, items: Sequence[StoredAnswer], truths: Mapping[str, Truth], store: LabelStore
) -> Answers:
    known = [truth_about(item.question, truths) for item in items]
    truth = np.array([(np.nan, np.nan) if one is None else one.values for one in known], np.float32).reshape(-1, 2)
    has_progress = any(one is not None and one.progress is not None for one in known)
    gaps = np.abs(truth[:, 1] - truth[:, 0])
    widest = float(np.nanmax(gaps)) if np.isfinite(gaps).any() else 1.0
    verdicts = [item.answer for item in items if isinstance(item.answer, Verdict)]
    goals = sorted({item.question.goal for item in items})
    return Answers(
        name=f"{stamp.judge} {stamp.prompt}".strip(),
        about=f"{_describe(stamp)}; goal {', '.join(goals[:3])}",
        task=task,
        status=np.array([str(verdict.status) for verdict in verdicts]),
        label=np.array([str(verdict.label or "") for verdict in verdicts]),
        swapped=np.array([_swapped_label(store, item) for item in items]),
        p=np.array([verdict.probabilities or (np.nan,) * 3 for verdict in verdicts], np.float32).reshape(-1, 3),
        truth=truth,
        scale=1.0 if has_progress else max(widest, 1e-6),
        latency_s=np.array([verdict.latency_s for verdict in verdicts], np.float32),
        tokens=np.array([_tokens(item) for item in items], np.float32),
        cost_usd=np.array([_cost(item) for item in items], np.float32),
        images=[_last(item) for item in items],
        text=[verdict.text[:MAX_TEXT] for verdict in verdicts],
        store=store,
    )


def _swapped_label(store: LabelStore | None, item: StoredAnswer) -> str:
    """What the same judge said with the images in the other order, where that was asked."""
    if store is None:
        return ""
    found = store.find(answer_key(item.question.swapped.id, item.answer.stamp))
    return str(found.label or "") if isinstance(found, Verdict) else ""


def _label(row: Mapping[str, str]) -> str:
    if row["status"] == "no_preference":
        return "tie"
    return _CODES.get(row["vlm_predicted_label"], "") if row["status"] == "ok" else ""


def _number(cell: str) -> float:
    return float(cell) if cell else np.nan


def _last(item: StoredAnswer) -> tuple[str, str]:
    return (item.question.left or ("",))[-1], (item.question.right or ("",))[-1]


def _tokens(item: StoredAnswer | None) -> float:
    usage = None if item is None else item.answer.usage
    return np.nan if usage is None else usage.tokens_in + usage.tokens_out


def _cost(item: StoredAnswer | None) -> float:
    usage = None if item is None else item.answer.usage
    return np.nan if usage is None or usage.cost_usd is None else usage.cost_usd


def _describe(stamp: Stamp) -> str:
    parts = (stamp.judge, f"revision {stamp.revision[:12]}" if stamp.revision else "", stamp.prompt, stamp.decoding)
    return ", ".join(part for part in parts if part)


def _with_distinct_names(found: Iterable[Answers]) -> list[Answers]:
    """Numbered where two sources would share a name in the legend."""
    met: dict[str, int] = defaultdict(int)
    named = []
    for answers in found:
        met[answers.name] += 1
        number = met[answers.name]
        named.append(answers if number == 1 else replace(answers, name=f"{answers.name} ({number})"))
    return named
