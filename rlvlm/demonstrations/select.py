"""What of a collection is learned from: filters that count what they leave out, and a split that lets nothing leak."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

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
    min_quality: float | None = None
    """Least score of a judge, in [0, 1]; steps without one are left out. None: scores are not looked at."""
    min_return: float | None = None
    """Least true return of an episode; None: returns are not looked at."""

    def __post_init__(self) -> None:
        if self.min_quality is not None and not 0 <= self.min_quality <= 1:
            raise ValueError(f"min_quality must be in [0, 1], got {self.min_quality}")


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
    if config.min_quality is not None and step.quality is None:
        return "no quality score"
    if config.min_quality is not None and (step.quality or 0.0) < config.min_quality:
        return "quality too low"
    return ""
