"""What of a collection is learned from, and the card of a folder: what is in it, in counts."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from rlvlm.demonstrations.folder import DemonstrationFolder
from rlvlm.demonstrations.records import EpisodeRecord, StepRecord

_STEPS_OF_HASH = 2**64


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterConfig:
    """Which steps are good enough."""

    valid: bool = True
    """Leaves out replies that the env could not read."""
    successful: bool = False
    """Leaves out episodes that did not end in success."""
    noise: bool = True
    """Keeps replies that were spoilt on purpose."""
    min_return: float | None = None
    """Least true return of an episode; None: returns are not looked at."""


Kept = list[tuple[EpisodeRecord, tuple[int, ...]]]
"""Episodes, and the places of those of their steps that are learned from; an episode in chunks has place 0."""


def select(records: Iterable[EpisodeRecord], config: FilterConfig) -> tuple[Kept, Counter[str]]:
    """What passes, and how many steps were left out for which reason; each is counted once, for the first."""
    kept: Kept = []
    reasons: Counter[str] = Counter()
    for record in records:
        reason = _reason_against(record, config)
        if reason:
            reasons[reason] += max(len(record.steps), 1)
            continue
        verdicts = [_reason_against_step(step, config) for step in record.steps] or [""]
        reasons.update(filter(None, verdicts))
        places = tuple(place for place, verdict in enumerate(verdicts) if not verdict)
        if places:
            kept.append((record, places))
    return kept, reasons


def split(records: Iterable[EpisodeRecord], held_out: float) -> tuple[list[EpisodeRecord], list[EpisodeRecord]]:
    """Episodes to learn from, and those held out: by seed, so that no start is on both sides, whoever played it.

    An episode's side depends on its task and seed alone: it stays where it is as a collection grows.

    Args:
        records: any.
        held_out: share in [0, 1) of seeds that is held out, on average.

    Raises:
        ValueError: the share is out of range.
    """
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out must be in [0, 1), got {held_out}")
    sides: tuple[list[EpisodeRecord], list[EpisodeRecord]] = [], []
    for record in records:
        digest = hashlib.sha256(f"{record.task}:{record.seed}".encode()).digest()
        sides[int.from_bytes(digest[:8]) < held_out * _STEPS_OF_HASH].append(record)
    return sides


def _reason_against(record: EpisodeRecord, config: FilterConfig) -> str:
    if config.successful and not record.success:
        return "episode without success"
    if config.min_return is not None and record.env_return < config.min_return:
        return "return too small"
    return ""


def _reason_against_step(step: StepRecord, config: FilterConfig) -> str:
    if config.valid and step.action is None:
        return "unreadable reply"
    if not config.noise and step.is_noise:
        return "spoilt on purpose"
    return ""


SHEET = "episodes.png"
"""A contact sheet beside the card, where one was drawn."""


@dataclass(slots=True)
class Census:
    """Counts of a collection."""

    episodes: int = 0
    steps: int = 0
    successes: int = 0
    noisy: int = 0
    returns: float = 0.0
    players: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    chunks: int = 0
    goals: Counter[str] = field(default_factory=Counter)
    """Episodes by instruction, of tasks in chunks."""
    won: Counter[str] = field(default_factory=Counter)
    """Those that succeeded."""
    rejected: Counter[str] = field(default_factory=Counter)
    pictures: set[str] = field(default_factory=set)


def census(records: Iterable[EpisodeRecord], config: FilterConfig | None = None) -> Census:
    """Counts what is there; `rejected` is what the filter would leave out, and why."""
    counts = Census()
    for record in records:
        counts.episodes += 1
        counts.steps += len(record.steps)
        counts.successes += record.success
        counts.returns += record.env_return
        counts.players[record.player] += 1
        counts.pictures |= record.digests()
        counts.rejected += select([record], config or FilterConfig(successful=record.kind == "chunks"))[1]
        if record.kind == "chunks":
            counts.chunks += len(record.arrays.get("actions", ()))
            counts.steps += int(np.sum(record.arrays.get("steps", 0)))
            counts.goals[record.goal] += 1
            counts.won[record.goal] += record.success
        for step in record.steps:
            counts.noisy += step.is_noise
            counts.actions[step.action or "(none)"] += 1
    return counts


def write_card(folder: DemonstrationFolder) -> Census:
    """Counts the folder's episodes and writes its `README.md`."""
    counts = census(folder.episodes())
    lines = [f"# Demonstrations of {folder.task}", ""]
    lines += _of_chunks(folder, counts) if folder.kind == "chunks" else _of_turns(counts)
    if folder.num_damaged:
        lines += [f"{folder.num_damaged} damaged lines were left out.", ""]
    if (folder.path / SHEET).exists():
        lines += [f"![Episodes]({SHEET})", ""]
    lines += [
        "`episodes.jsonl` has one episode per line; its images lie in `pictures/` under the digests of their pixels,",
        "its arrays in `arrays/` under its id. "
        + (
            f"`python -m rlvlm.run {folder.task} --sft.demonstrations DIR` learns from them."
            if folder.kind == "chunks"
            else "`rlvlm data export` writes chat formats and Parquet."
        ),
    ]
    folder.write_card("\n".join(lines) + "\n")
    return counts


def _of_turns(counts: Census) -> list[str]:
    lines = [
        f"{counts.episodes:,} episodes, {counts.steps:,} steps, {len(counts.pictures):,} distinct images; "
        f"success {_share(counts.successes, counts.episodes)}, mean return "
        f"{counts.returns / max(counts.episodes, 1):.3g}.",
        "",
        *_table("player", "episodes", counts.players),
        *_table("action", "steps", counts.actions),
        f"Spoilt on purpose: {_share(counts.noisy, counts.steps)} of steps.",
        "",
        *_table("left out by the default filter", "steps", counts.rejected),
    ]
    return lines


def _of_chunks(folder: DemonstrationFolder, counts: Census) -> list[str]:
    kept = f"{len(counts.pictures):,} distinct images are kept" if counts.pictures else "images are drawn from states"
    return [
        f"{counts.episodes:,} episodes, {counts.chunks:,} chunks, {counts.steps:,} env steps; success "
        f"{_share(counts.successes, counts.episodes)}; {kept}.",
        "",
        *_table("player", "episodes", counts.players),
        "| instruction | episodes | successes |",
        "|---|---|---|",
        *(f"| {goal} | {number:,} | {counts.won[goal]:,} |" for goal, number in counts.goals.most_common()),
        "",
        *_table("not learned from", "episodes", counts.rejected),
        "| of the chunks | |",
        "|---|---|",
        *(f"| {name} | {_in_words(value)} |" for name, value in folder.chunks.items()),
        "",
    ]


def _in_words(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _share(part: int, whole: int) -> str:
    return f"{part / max(whole, 1):.1%}"


def _table(name: str, unit: str, counts: Counter[str]) -> list[str]:
    if not counts:
        return []
    rows = [f"| `{key}` | {count:,} |" for key, count in counts.most_common()]
    return [f"| {name} | {unit} |", "|---|---|", *rows, ""]
