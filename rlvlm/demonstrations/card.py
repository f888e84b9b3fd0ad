"""Selection of the steps to learn from, and the card of a folder, which counts its contents."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from rlvlm.core.disk import write_whole
from rlvlm.core.foreign import visible
from rlvlm.demonstrations.folder import DemonstrationFolder
from rlvlm.demonstrations.records import EpisodeRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterConfig:
    """Filter of the steps to learn from."""

    valid: bool = True
    """Whether to leave out replies that the env could not read."""
    successful: bool = False
    """Whether to leave out episodes that did not end in success."""
    noise: bool = True
    """Whether to keep replies that were corrupted on purpose."""
    min_return: float | None = None
    """Minimum true return of an episode; None: no minimum."""


Kept = list[tuple[EpisodeRecord, tuple[int, ...]]]
"""Episodes, with the indices of their steps to learn from; an episode in chunks has index 0."""


def select(records: Iterable[EpisodeRecord], config: FilterConfig) -> tuple[Kept, Counter[str]]:
    """Returns the steps that pass, and the number left out by reason; each step counts for its first reason only."""
    kept: Kept = []
    reasons: Counter[str] = Counter()
    for record in records:
        is_lost = config.successful and not record.success
        is_poor = config.min_return is not None and record.env_return < config.min_return
        if is_lost or is_poor:
            # counted in steps, as for every reason; an episode in chunks counts as one
            reasons["episode without success" if is_lost else "return too small"] += max(len(record.steps), 1)
            continue
        places = [] if record.steps else [0]  # an episode in chunks is kept or left out as a whole
        for place, step in enumerate(record.steps):
            if config.valid and step.action is None:
                reasons["unreadable reply"] += 1
            elif not config.noise and step.is_noise:
                reasons["spoilt on purpose"] += 1
            else:
                places.append(place)
        if places:
            kept.append((record, tuple(places)))
    return kept, reasons


def split(records: Iterable[EpisodeRecord], held_out: float) -> tuple[list[EpisodeRecord], list[EpisodeRecord]]:
    """Returns the episodes to learn from, and those held out: split by seed, so that no start is on both sides.

    An episode's side depends only on its task and seed, whoever the player: it stays the same as a collection grows.

    Args:
        records: episodes of any kind.
        held_out: share of seeds to hold out on average, in [0, 1).

    Raises:
        ValueError: the share is out of range.
    """
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out must be in [0, 1), got {held_out}")
    sides: tuple[list[EpisodeRecord], list[EpisodeRecord]] = [], []
    for record in records:
        # hashed rather than drawn: an episode keeps its side as the folder grows
        digest = hashlib.sha256(f"{record.task}:{record.seed}".encode()).digest()
        is_held_out = int.from_bytes(digest[:8]) < held_out * 2**64
        sides[is_held_out].append(record)
    return sides


SHEET = "episodes.png"
"""File name of the contact sheet beside the card, if there is one."""


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
    """Episodes by instruction, for tasks in chunks."""
    won: Counter[str] = field(default_factory=Counter)
    """Successful episodes by instruction."""
    rejected: Counter[str] = field(default_factory=Counter)
    images: set[str] = field(default_factory=set)
    """Digests of the distinct images."""


def census(records: Iterable[EpisodeRecord]) -> Census:
    """Counts the episodes; `rejected` counts what the default filter would leave out, by reason."""
    counts = Census()
    for record in records:
        counts.episodes += 1
        counts.steps += len(record.steps)
        counts.successes += record.success
        counts.returns += record.env_return
        counts.players[record.player] += 1
        counts.images |= record.digests()
        # of episodes in chunks only successes are learned from
        counts.rejected += select([record], FilterConfig(successful=record.has_chunks))[1]
        if record.has_chunks:
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
    success = f"success {counts.successes / max(counts.episodes, 1):.1%}"
    players = _table("player", "episodes", counts.players)
    if folder.has_chunks:
        num = len(counts.images)
        kept = f"{num:,} distinct images are kept" if num else "images are drawn from states"
        said = f"{counts.episodes:,} episodes, {counts.chunks:,} chunks, {counts.steps:,} env steps; {success}; {kept}."
        # the settings by which chunks were made are on the card in full: a second import must use the same
        lists = {name: ", ".join(map(str, value)) for name, value in folder.chunks.items() if isinstance(value, list)}
        lines = [
            *(said, "", *players, "| instruction | episodes | successes |", "|---|---|---|"),
            *(f"| {_cell(goal)} | {number:,} | {counts.won[goal]:,} |" for goal, number in counts.goals.most_common()),
            *("", *_table("not learned from", "episodes", counts.rejected), "| of the chunks | |", "|---|---|"),
            *(f"| {_cell(name)} | {_cell(value)} |" for name, value in ({**folder.chunks} | lists).items()),
            "",
        ]
        what_for = f"`python -m rlvlm.run {_cell(folder.task)} --sft.demonstrations DIR` learns from them."
    else:
        lines = [
            f"{counts.episodes:,} episodes, {counts.steps:,} steps, {len(counts.images):,} distinct images; "
            f"{success}, mean return {counts.returns / max(counts.episodes, 1):.3g}.",
            *("", *players, *_table("action", "steps", counts.actions)),
            f"Deliberate mistakes: {counts.noisy / max(counts.steps, 1):.1%} of steps.",
            *("", *_table("left out by the default filter", "steps", counts.rejected)),
        ]
        what_for = "`rlvlm data export` writes chat formats and Parquet."
    if folder.num_damaged:
        lines += [f"{folder.num_damaged} damaged lines were left out.", ""]
    if (folder.path / SHEET).exists():
        lines += [f"![Episodes]({SHEET})", ""]
    lines += [
        "`episodes.jsonl` has one episode per line; its images lie in `pictures/` under the digests of their pixels,",
        f"its arrays in `arrays/` under its id. {what_for}",
    ]
    write_whole(folder.path / "README.md", "\n".join([f"# Demonstrations of {_cell(folder.task)}", "", *lines]) + "\n")
    return counts


def _table(name: str, unit: str, counts: Counter[str]) -> list[str]:
    if not counts:
        return []
    rows = [f"| `{_cell(key)}` | {count:,} |" for key, count in counts.most_common()]
    return [f"| {name} | {unit} |", "|---|---|", *rows, ""]


def _cell(value: object) -> str:
    """A cell of a table, whatever other people's texts hold: in one line, without the marks of cells and code."""
    return visible(" ".join(str(value).split())).replace("|", r"\|").replace("`", "'")
