"""The page of judge-bench: figures, faults and the worst answers with their images."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rlvlm.core.steps import Frames, spread
from rlvlm.judge_bench.asking import Answer
from rlvlm.judge_bench.changes import changed
from rlvlm.judge_bench.figures import outcome_of
from rlvlm.judge_bench.items import CASES, Item, TaskItems
from rlvlm.pages.bench_row import (
    GRADE_HEADS,
    TASK_HEADS,
    cells,
    grade_lines,
    grade_notes,
    judge_name,
    percent,
    task_lines,
    way_of_asking,
)
from rlvlm.pages.charts import to_svg
from rlvlm.runs.records import encode_png
from rlvlm.templates import inline, render

MAX_WORST = 8
"""Wrong answers shown of each kind."""
_CARD_PX = 160
_SHOWN = 4
"""Images of an episode on the page."""


class WorstAnswers:
    """Collects the worst answers with their images, task by task, since an env exists only while it is asked about.

    Args:
        num_frames: maximum number of images per episode that the judge was shown.
    """

    def __init__(self, num_frames: int) -> None:
        self._num_frames = num_frames
        self._pairs: list[tuple[float, dict[str, Any]]] = []
        self._scores: list[tuple[float, dict[str, Any]]] = []

    def add(self, made: TaskItems, answers: Sequence[Answer]) -> None:
        """Takes in the answers to a task."""
        judged = [(made.items[answer.item], answer) for answer in answers]
        # wrong labels with the widest gaps, one order of each pair
        wrong = {
            answer.item: (item, answer)
            for item, answer in judged
            if item.case == "pair" and outcome_of(item, answer) == "wrong"
        }
        widest = sorted(wrong.values(), key=lambda pair: -abs(pair[0].gap))[:MAX_WORST]
        # drawn now, a few more than are shown: the task's env is closed when the next one begins
        self._pairs += [(abs(item.gap), _pair_card(made, item, answer)) for item, answer in widest]
        # scores of episodes, turns and controls that are farthest from the truth, 0 or 1
        scored = [
            (abs(answer.value - item.success), item, answer)
            for item, answer in judged
            if item.kind in ("video", "turn") and math.isfinite(answer.value) and item.case != "jump"
        ]
        farthest = sorted(scored, key=lambda row: -row[0])[:MAX_WORST]
        self._scores += [(miss, self._score_card(made, item, answer)) for miss, item, answer in farthest]

    @property
    def pairs(self) -> list[dict[str, Any]]:
        """Cards of pairs, the worst first."""
        return [card for _, card in sorted(self._pairs, key=lambda row: -row[0])[:MAX_WORST]]

    @property
    def scores(self) -> list[dict[str, Any]]:
        """Cards of scores, the worst first."""
        return [card for _, card in sorted(self._scores, key=lambda row: -row[0])[:MAX_WORST]]

    def _score_card(self, made: TaskItems, item: Item, answer: Answer) -> dict[str, Any]:
        (side,) = item.sides
        shown = side[-1:] if self._num_frames == 1 else spread(side, min(_SHOWN, self._num_frames))
        (frames,) = changed(item, [made.draw_side(item, 0, shown)])
        truth = "a success" if item.success else "no success"
        kind = item.case if item.case in CASES else f"control: {item.case}"
        return {
            "title": f"{answer.task}: {item.goal}",
            "said": f"scored {answer.value:.2f}; {truth} ({kind}, progress {item.truth[0]:.2f})",
            "pictures": _small(frames),
            "text": answer.text,
        }


def bench_page(
    row: Mapping[str, Any], worst: WorstAnswers, teaches: Mapping[str, Figure], answered: Mapping[str, Figure]
) -> str:
    """Returns the page's HTML: figures and faults of `summarise`, the figures of `draw_bench` by title, and the worst
    answers.
    """
    bins = row["figures"]["pairs"].get("by_difficulty", [])
    difficulty = [
        (f"{place / 10:.1f} to {(place + 1) / 10:.1f}", percent(right, right + wrong), right, wrong, rest)
        for place, (right, wrong, rest) in enumerate(bins)
    ]
    means = row["figures"]["scores"].get("means", {})
    confusion: Sequence[Sequence[int]] = row["figures"].get("published", {}).get("confusion") or []
    return render(
        "judge_bench.html.j2",
        title=f"{judge_name(row)} on {row['bench']['suite']}",
        facts={
            name: [fact for fact in table.items() if fact[1] != "-"]
            for name, table in cells(row).items()
            if set(table.values()) != {"-"}
        },
        faults=row["faults"],
        ways=[way_of_asking(way) for way in row["remedies"]],
        grade_heads=GRADE_HEADS,
        grades=grade_lines(row),
        grade_notes=grade_notes(row),
        teaches=[(name, inline(to_svg(figure), "svg+xml")) for name, figure in teaches.items()],
        answered=[(name, inline(to_svg(figure), "svg+xml")) for name, figure in answered.items()],
        is_whole=row["bench"]["is_whole"],
        left_out=row["bench"]["left_out"],
        truth=row["bench"].get("truth", {}),
        task_heads=("task", *TASK_HEADS),
        tasks=task_lines(row),
        difficulty=difficulty,
        means=[(case, f"{value:.2f}") for case, value in means.items()],
        confusion=[(f"{rating}", *counts) for rating, counts in enumerate(confusion, start=1)],
        worst_pairs=worst.pairs,
        worst_scores=worst.scores,
    )


def _pair_card(made: TaskItems, item: Item, answer: Answer) -> dict[str, Any]:
    order = (1, 0) if answer.swapped else (0, 1)
    sides = []
    for name, place in zip(("left", "right"), order, strict=True):
        (image,) = _small(made.draw_side(item, place, item.sides[place][-1:]))
        sides.append({"name": name, "picture": image, "truth": item.truth[place], "is_said": answer.label == name})
    sure = "" if answer.p is None else f", {100 * max(answer.p[:2]):.0f} % sure"
    return {
        "title": f"{answer.task}: {item.goal}",
        "said": f"said {answer.label}{sure}",
        "sides": sides,
        "text": answer.text,
    }


def _small(frames: Frames) -> list[str]:
    """Returns encoded images with longer sides of about `_CARD_PX`."""
    step = max(1, max(frames.shape[1:3]) // _CARD_PX)
    return [f"data:image/png;base64,{encode_png(np.ascontiguousarray(frame[::step, ::step]))}" for frame in frames]
