"""Rows of the one table of judges' answers, `rlvlm.labels.export.SCHEMA`, from items and answers, and back."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from rlvlm.core.judging import Stamp
from rlvlm.judge_bench.asking import Answer
from rlvlm.judge_bench.figures import outcome_of
from rlvlm.judge_bench.items import Item


def answer_rows(
    items: Sequence[Item], answers: Iterable[Answer], stamp: Stamp, run: str = "", *, has_frames: bool = False
) -> Iterator[dict[str, Any]]:
    """Yields a row for each answer to an item.

    Args:
        items: [N] items.
        answers: [N] answers to them.
        stamp: judge that gave them.
        run: name of the run or bench that asked.
        has_frames: whether snapshots are (episode, frame), as those of recorded data.
    """
    for item, answer in zip(items, answers, strict=True):
        order = -1 if answer.swapped else 1  # as shown
        truth = [None if math.isnan(value) else value for value in item.truth[::order]]
        end = outcome_of(item, answer) if item.is_pair else ""
        ends = [side[-1].astype(int).tolist() for side in item.sides[::order]] if has_frames else []
        row = asdict(stamp) | {
            "run": run,
            "task": answer.task,
            "kind": item.kind,
            "case": item.case,
            "goal": item.goal,
            "action": item.action,
            "status": answer.status,
            "label": answer.label or None,
            "text": answer.text,
            "latency_s": answer.latency_s,
            "correct": {"right": True, "wrong": False}.get(end),
            "colours": [value for colour in answer.colours for value in colour],
            **{name: getattr(answer, name) for name in ("item", "swapped")},
            **{name: getattr(item, name) for name in ("success", "source", "track")},
            **{name: _or_none(getattr(answer, name)) for name in ("value", "tokens", "cost_usd")},
        }
        for name, values in (("p_left p_right p_tie", answer.p or ()), ("progress_left progress_right", truth)):
            row |= dict(zip(name.split(), values, strict=False))
        for side, moment in zip(("left", "right"), ends, strict=False):
            row |= {f"{side}_episode": moment[0], f"{side}_frame": moment[1]}
        yield row


def read_rows(rows: Iterable[Mapping[str, Any]]) -> tuple[list[Item], list[Answer]]:
    """Returns items without images, and answers, from rows of one judge; those of a label store are pairs of their own.

    Raises:
        ValueError, TypeError, KeyError: a row makes no sense.
    """
    items, answers = [], []
    for place, row in enumerate(rows):
        is_pair = row["kind"] in ("pair", "compare")
        names = ("progress_left", "progress_right")[: 2 if is_pair else 1]
        truth = tuple(math.nan if row[name] is None else float(row[name]) for name in names)
        numbers: dict[str, Any] = {
            name: math.nan if row[name] is None else float(row[name]) for name in ("value", "tokens", "cost_usd")
        }
        shares = [row[name] for name in ("p_left", "p_right", "p_tie")]
        colours = np.reshape(row["colours"] or (), (-1, 3)).tolist()
        swapped = bool(row["swapped"])
        items.append(
            Item(
                kind="pair" if is_pair else row["kind"],
                case=row["case"] or "pair",
                goal=row["goal"] or "",
                sides=(),
                truth=truth[::-1] if swapped else truth,
                success=bool(row["success"]),
                source=-1 if row["source"] is None else row["source"],
                track=-1 if row["track"] is None else row["track"],
                action=row["action"] or "",
            )
        )
        answer = Answer(
            task=row["task"] or "",
            item=place if row["item"] is None else row["item"],
            swapped=swapped,
            status=row["status"],
            label=row["label"] or "",
            text=row["text"] or "",
            latency_s=row["latency_s"] or 0.0,
            colours=tuple((red, green, blue) for red, green, blue in colours),
            **numbers,
        )
        answers.append(answer if None in shares else replace(answer, p=(shares[0], shares[1], shares[2])))
    return items, answers


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
