"""Answers of one judge as columns, out of a run's query log or a label store, and what they are worth.

The measures are pure functions of the columns; every figure of a judge report is made of them.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Stamp, Verdict
from rlvlm.judges.agreement import wilson_interval
from rlvlm.labels.records import StoredAnswer, answer_key, truth_about
from rlvlm.labels.store import LabelStore, is_store, open_store
from rlvlm.reports.results import mean_known
from rlvlm.runs.folder import RunFolder, find_folders

Floats = NDArray[np.floating]

MAX_TEXT = 1_000
"""Characters kept of an answer's text."""
_TRUTHS, _SHARES = ("ground_truth_score_1", "ground_truth_score_2"), ("p_left", "p_right", "p_tie")
"""Columns of a run's query log."""
NUM_BINS = 10
"""Difficulty bins: equal parts of the gap in truth; the first has the hardest pairs."""
CONFIDENCE_BINS = 10
"""Equal parts of [0.5, 1]."""
OUTCOMES = ("correct", "incorrect", "truth ties", "not checked", "no preference", "invalid", "failed")
"""What can become of an answer. Not checked: decided, and nobody knows the truth."""
TRUTHS = ("left", "right", "tie", "unknown")
GIVEN = ("left", "right", "no preference", "invalid", "failed")
_SMALLEST_GAP = 1e-6
_SWAP = {"left": "right", "right": "left", "tie": "tie"}


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
    met = Counter[str]()  # two sources of one name are numbered in the legend
    for place, answers in enumerate(found):
        met[answers.name] += 1
        if (number := met[answers.name]) > 1:
            found[place] = replace(answers, name=f"{answers.name} ({number})")
    return found


def read_run(folder: RunFolder) -> Answers:
    """The answers in a run's query log, with images and prices from its store where it has one."""
    config = folder.config()
    logged = folder.queries.read()
    place = config.labels(folder.labels)
    store = open_store(place) if is_store(place) else None  # none for runs without a judge, or whose store is gone
    # a store that several runs share has more answers than this run's
    asked = {row["question"] for row in logged if row["question"]}
    items: dict[str, StoredAnswer] = {}
    for item in store.answers() if store else ():
        if item.question.id in asked:
            items.setdefault(item.question.id, item)  # of several judges' answers the first
    stamps = {item.answer.stamp for item in items.values()}
    judge = f"{_describe(next(iter(stamps)))}; " if len(stamps) == 1 else ""
    labels = {("ok", "0"): "left", ("ok", "1"): "right"}
    rows = []
    for row in logged:
        numbers = {name: float(row[name]) if row[name] else np.nan for name in (*_TRUTHS, *_SHARES, "latency_s")}
        label = labels.get((row["status"], row["vlm_predicted_label"]), "")
        facts = {
            "status": row["status"],
            "label": "tie" if row["status"] == "no_preference" else label,
            "p": [numbers[name] for name in _SHARES],
            "truth": [numbers[name] for name in _TRUTHS],
            "latency_s": numbers["latency_s"],
            "text": row["text"],
        }
        rows.append(facts | _stored(items.get(row["question"]), store))
    return _to_answers(rows, folder.path.name, judge + config.title, config.task, store)


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
        rows = []
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
            rows.append(facts | _stored(item, store))
        gaps = [abs(left - right) for left, right in (row["truth"] for row in rows) if not np.isnan(left - right)]
        has_progress = any(one is not None and one.progress is not None for one in known)
        scale = 1.0 if has_progress or not gaps else max(*gaps, 1e-6)
        # a judge's answers about several goals are one entry; the first few name it
        goals = sorted({item.question.goal for item in items})
        name, about = f"{stamp.judge} {stamp.prompt}".strip(), f"{_describe(stamp)}; goal {', '.join(goals[:3])}"
        found.append(_to_answers(rows, name, about, task, store, scale))
    return found


def _stored(item: StoredAnswer | None, store: LabelStore | None) -> dict[str, Any]:
    """What the store knows of an answer: its images, the answer in the other order, and its price."""
    if item is None or store is None:
        return {"swapped": "", "tokens": np.nan, "cost_usd": np.nan, "images": ("", "")}
    swapped, usage = store.find(answer_key(item.question.swapped.id, item.answer.stamp)), item.answer.usage
    return {
        "swapped": str(swapped.label or "") if isinstance(swapped, Verdict) else "",
        "tokens": np.nan if usage is None else usage.tokens_in + usage.tokens_out,
        "cost_usd": np.nan if usage is None or usage.cost_usd is None else usage.cost_usd,
        "images": ((item.question.left or ("",))[-1], (item.question.right or ("",))[-1]),
    }


def _to_answers(
    rows: Sequence[Mapping[str, Any]], name: str, about: str, task: str, store: LabelStore | None, scale: float = 1.0
) -> Answers:
    """The rows as columns; arguments as of `Answers`."""

    def column(key: str, kind: type, *shape: int) -> NDArray[Any]:
        return np.array([row[key] for row in rows], kind).reshape(-1, *shape)

    return Answers(
        name=name,
        about=about,
        task=task,
        status=column("status", np.str_),
        label=column("label", np.str_),
        swapped=column("swapped", np.str_),
        p=column("p", np.float64, 3),
        truth=column("truth", np.float64, 2),
        scale=scale,
        latency_s=column("latency_s", np.float64),
        tokens=column("tokens", np.float64),
        cost_usd=column("cost_usd", np.float64),
        images=[row["images"] for row in rows],
        text=[row["text"][:MAX_TEXT] for row in rows],
        store=store,
    )


def _describe(stamp: Stamp) -> str:
    parts = (stamp.judge, f"revision {stamp.revision[:12]}" if stamp.revision else "", stamp.prompt, stamp.decoding)
    return ", ".join(part for part in parts if part)


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """How sure a judge is where it decides, against how often it is right. Empty bins are NaN."""

    confidence: Floats
    """[10] mean probability of the chosen side, against the other."""
    accuracy: Floats
    """[10] share of these answers that are right."""
    counts: NDArray[np.int64]
    """[10]."""
    ece: float
    """Expected calibration error: mean distance of the two, weighted by counts; NaN without probabilities."""


def truth_sides(truth: Floats) -> NDArray[np.str_]:
    """[N] left, right, tie or unknown: which side of `truth` [N, 2] is the larger."""
    # left is nearer where the gain is negative; numbers that differ by rounding alone are ties
    gain = truth[:, 1] - truth[:, 0]
    return np.select([np.isnan(gain), np.abs(gain) <= _SMALLEST_GAP, gain < 0], ["unknown", "tie", "left"], "right")


def outcomes(answers: Answers) -> NDArray[np.str_]:
    """[N] what became of each answer, as in `OUTCOMES`."""
    truth = truth_sides(answers.truth)
    decided = answers.status == "ok"
    return np.select(
        [~decided, truth == "unknown", truth == "tie", answers.label == truth],
        [np.char.replace(answers.status, "_", " "), "not checked", "truth ties", "correct"],
        "incorrect",
    )


def by_bin(answers: Answers) -> dict[str, NDArray[np.int64]]:
    """[10] counts of each outcome, by difficulty; of answers whose truth is known."""
    gaps, found = np.abs(answers.truth[:, 1] - answers.truth[:, 0]) / answers.scale, outcomes(answers)
    is_known = np.isfinite(gaps)
    bins = np.minimum(np.nan_to_num(gaps) * NUM_BINS, NUM_BINS - 1).astype(int)  # 0 the hardest
    return {name: np.bincount(bins[(found == name) & is_known], minlength=NUM_BINS) for name in OUTCOMES}


def wilson(hits: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
    """Share, lower and upper end of its 95 % interval, NaN where nothing was counted."""
    nothing = (np.nan, np.nan)
    ends = [wilson_interval(*pair) if pair[1] else nothing for pair in zip(hits.tolist(), counts.tolist(), strict=True)]
    low, high = np.array(ends, float).reshape(-1, 2).T
    return hits / np.where(counts > 0, counts, np.nan), low, high


def confusion(answers: Answers) -> NDArray[np.int64]:
    """[4, 5] counts: the truth (`TRUTHS`) against what was given (`GIVEN`)."""
    truth = truth_sides(answers.truth)
    given = np.where(answers.status == "ok", answers.label, np.char.replace(answers.status, "_", " "))
    return np.array([[int(((truth == row) & (given == column)).sum()) for column in GIVEN] for row in TRUTHS])


def calibration(answers: Answers) -> Calibration:
    """Reliability of decided answers whose truth is known, over ten bins of confidence.

    Source: Guo et al. 2017, arXiv:1706.04599, for the error. Departure: a comparison has two sides, so confidence is
    the probability of the chosen one against the other, without the tie's, and the bins cover [0.5, 1].
    """
    found = outcomes(answers)
    sides = answers.p[:, :2]
    used = np.isin(found, ("correct", "incorrect")) & np.isfinite(sides).all(1) & (sides.sum(1) > 0)
    # p(chosen) / (p(left) + p(right)): the tie's share says nothing about which side is nearer
    confidence = sides[used].max(1) / sides[used].sum(1)
    is_right = found[used] == "correct"
    bins = np.minimum(((confidence - 0.5) * 2 * CONFIDENCE_BINS).astype(int), CONFIDENCE_BINS - 1)
    counts = np.bincount(bins, minlength=CONFIDENCE_BINS)
    n = np.where(counts > 0, counts, np.nan)
    mean = np.bincount(bins, confidence, CONFIDENCE_BINS) / n
    accuracy = np.bincount(bins, is_right, CONFIDENCE_BINS) / n
    ece = float(np.nansum(counts * np.abs(mean - accuracy)) / counts.sum()) if counts.sum() else np.nan
    return Calibration(confidence=mean, accuracy=accuracy, counts=counts, ece=ece)


def swap_consistency(answers: Answers) -> tuple[int, int]:
    """How many answers were also asked in the other order, and in how many of them the label swapped with it."""
    # only pairs that were asked in both orders, and answered in both
    asked = (answers.swapped != "") & (answers.label != "")
    mirrored = np.array([_SWAP.get(label, "") for label in answers.label], dtype=answers.swapped.dtype.type)
    return int(asked.sum()), int((asked & (mirrored == answers.swapped)).sum())


def summarise(answers: Answers) -> dict[str, float | int | str | None]:
    """One row of figures, as in `judge_report.json`; None where nothing can be said."""
    found = outcomes(answers)
    count = {name: int((found == name).sum()) for name in OUTCOMES}
    checked = count["correct"] + count["incorrect"]
    share, low, high = wilson(np.array([count["correct"]]), np.array([checked]))
    decided = answers.status == "ok"
    pairs, mirrored = swap_consistency(answers)
    latency = answers.latency_s[(answers.latency_s > 0) & (answers.status != "failed")]
    return {
        "source": answers.name,
        "about": answers.about,
        "answers": len(answers),
        **{name.replace(" ", "_"): number for name, number in count.items()},
        "accuracy": mean_known(share),
        "accuracy_low": mean_known(low),
        "accuracy_high": mean_known(high),
        "ece": mean_known([calibration(answers).ece]),
        "said_left": mean_known(answers.label[decided] == "left"),
        "asked_both_ways": pairs,
        "swap_consistency": mirrored / pairs if pairs else None,
        "latency_p50_s": float(np.median(latency)) if len(latency) else None,
        "latency_p95_s": float(np.quantile(latency, 0.95)) if len(latency) else None,
        "tokens_per_answer": mean_known(answers.tokens),
        "usd_per_1000_answers": mean_known(1_000 * answers.cost_usd),
    }
