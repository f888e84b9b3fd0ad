"""Answers of one judge as columns, out of a run's query log or a label store. What every figure is made of."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Stamp, Verdict
from rlvlm.labels.records import StoredAnswer, answer_key, truth_about
from rlvlm.labels.store import LabelStore, is_store, open_store
from rlvlm.runs.folder import RunFolder, find_folders

Floats = NDArray[np.floating]

MAX_TEXT = 1_000
"""Characters kept of an answer's text."""
_TRUTHS, _SHARES = ("ground_truth_score_1", "ground_truth_score_2"), ("p_left", "p_right", "p_tie")
"""Columns of a run's query log."""


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
        found += map(read_run, find_folders(path))
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
    stamps = {item.answer.stamp for item in items.values()}
    judge = f"{_describe(next(iter(stamps)))}; " if len(stamps) == 1 else ""
    labels = {"0": "left", "1": "right"}
    columns: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        label = labels.get(row["vlm_predicted_label"], "") if row["status"] == "ok" else ""
        numbers = {name: float(row[name]) if row[name] else np.nan for name in (*_TRUTHS, *_SHARES, "latency_s")}
        facts = {
            "status": row["status"],
            "label": "tie" if row["status"] == "no_preference" else label,
            "p": [numbers[name] for name in _SHARES],
            "truth": [numbers[name] for name in _TRUTHS],
            "latency_s": numbers["latency_s"],
            "text": row["text"],
        }
        _append(columns, facts, items.get(row.get("question", "")), store)
    name, about = folder.path.name, judge + config.title
    return _to_answers(columns, name=name, about=about, task=config.task, scale=1.0, store=store)


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
    found = []
    for (stamp, task), items in groups.items():
        known = [truth_about(item.question, truths) for item in items]
        columns: dict[str, list[Any]] = defaultdict(list)
        for item, truth in zip(items, known, strict=True):
            verdict = item.answer
            assert isinstance(verdict, Verdict), "scores were left out above"
            facts = {
                "status": str(verdict.status),
                "label": str(verdict.label or ""),
                "p": verdict.probabilities or (np.nan,) * 3,
                "truth": (np.nan, np.nan) if truth is None else truth.values,
                "latency_s": verdict.latency_s,
                "text": verdict.text,
            }
            _append(columns, facts, item, store)
        gaps = [abs(left - right) for left, right in columns["truth"] if not np.isnan(left - right)]
        has_progress = any(one is not None and one.progress is not None for one in known)
        scale = 1.0 if has_progress else max(*gaps, 1e-6) if gaps else 1.0
        goals = sorted({item.question.goal for item in items})
        name, about = f"{stamp.judge} {stamp.prompt}".strip(), f"{_describe(stamp)}; goal {', '.join(goals[:3])}"
        found.append(_to_answers(columns, name=name, about=about, task=task, scale=scale, store=store))
    return found


def _append(
    columns: dict[str, list[Any]], facts: Mapping[str, Any], item: StoredAnswer | None, store: LabelStore | None
) -> None:
    """Adds one answer to the columns: its `facts`, and what the store knows of it."""
    swapped = usage = None
    images = ("", "")
    if item is not None and store is not None:
        images = (item.question.left or ("",))[-1], (item.question.right or ("",))[-1]
        swapped = store.find(answer_key(item.question.swapped.id, item.answer.stamp))
        usage = item.answer.usage
    stored = {
        "swapped": str(swapped.label or "") if isinstance(swapped, Verdict) else "",
        "tokens": np.nan if usage is None else usage.tokens_in + usage.tokens_out,
        "cost_usd": np.nan if usage is None or usage.cost_usd is None else usage.cost_usd,
        "images": images,
    }
    for name, value in {**facts, **stored}.items():
        columns[name].append(value)


def _to_answers(
    columns: Mapping[str, list[Any]], *, name: str, about: str, task: str, scale: float, store: LabelStore | None
) -> Answers:
    return Answers(
        name=name,
        about=about,
        task=task,
        status=np.array(columns["status"], np.str_),
        label=np.array(columns["label"], np.str_),
        swapped=np.array(columns["swapped"], np.str_),
        p=np.array(columns["p"], np.float64).reshape(-1, 3),
        truth=np.array(columns["truth"], np.float64).reshape(-1, 2),
        scale=scale,
        latency_s=np.array(columns["latency_s"], np.float64),
        tokens=np.array(columns["tokens"], np.float64),
        cost_usd=np.array(columns["cost_usd"], np.float64),
        images=columns["images"],
        text=[text[:MAX_TEXT] for text in columns["text"]],
        store=store,
    )


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
