"""Measures a judge on held-out scenes: `python -m rlvlm.pocket.judge.evaluate` prints a table and writes JSON.

The judge is asked exactly as in a run, through `judges.build`; with `--judge` options any other judge can be measured.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from rlvlm.core.judging import Label, Query, Status, Verdict
from rlvlm.core.steps import FloatArray
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.judge import Judge
from rlvlm.pocket.scenes.pairs import Scenes, draw_gap_pairs, draw_uniform_pairs, find_provider

NUM_BINS = 10
"""Difficulty bins: equal parts of the gap in progress, 0 to 1; the last ones are the easiest."""
_SWAPPED = {Label.LEFT: Label.RIGHT, Label.RIGHT: Label.LEFT, Label.TIE: Label.TIE, None: None}


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """What is measured."""

    scenes: str = "rlvlm.pocket.scenes:all_tasks"
    """Scene provider, `module:function`; its held-out split is used."""
    prompts: tuple[str, ...] = ("direct", "single_stage", "two_stage")
    """Ways of asking."""
    num_pairs: int = 400
    """Pairs per set-up and draw."""
    num_setups: int = 4
    """Set-ups measured of each task, the provider's first ones."""
    seed: int = 0
    """Of scenes and pairs."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    """Who is measured; its prompt is replaced by each of `prompts`."""
    out: Path | None = None
    """JSON file of the results."""
    threads: int = 1
    """CPU threads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How a judge did on one set of pairs."""

    task: str
    setup: str
    draw: str
    """balanced: as many pairs in each difficulty bin; uniform: as the preference loop draws."""
    prompt: str
    right: float
    """Share of decided labels that name the image with more progress."""
    undecided: float
    """Share of answers that saw no difference."""
    unread: float
    """Share of answers that were invalid or failed."""
    swapped: float
    """Share of pairs whose label swaps when the images swap; no difference must stay so."""
    right_by_bin: tuple[float, ...]
    """[10] `right` per difficulty bin, NaN where nothing was decided."""
    undecided_by_bin: tuple[float, ...]
    """[10]."""
    pairs_by_bin: tuple[int, ...]
    """[10]."""
    pairs_per_s: float
    """Questions answered per second, images included."""


def grade(gaps: FloatArray, verdicts: Sequence[Verdict], swapped: Sequence[Verdict]) -> dict[str, Any]:
    """Returns the shares of a `Result`.

    Args:
        gaps: [N] progress of the right image minus that of the left.
        verdicts: [N] answers.
        swapped: [N] answers to the same pairs with the images swapped.
    """
    is_decided = np.array([verdict.status is Status.OK for verdict in verdicts])
    is_tie = np.array([verdict.status is Status.NO_PREFERENCE for verdict in verdicts])
    is_right = np.array(
        [verdict.label is (Label.RIGHT if gap > 0 else Label.LEFT) for verdict, gap in zip(verdicts, gaps, strict=True)]
    )
    bins = np.minimum((np.abs(gaps) * NUM_BINS).astype(int), NUM_BINS - 1)
    in_bin = [bins == number for number in range(NUM_BINS)]
    return {
        "right": _share(is_right, is_decided),
        "undecided": float(is_tie.mean()),
        "unread": float((~is_decided & ~is_tie).mean()),
        "swapped": float(
            np.mean([_SWAPPED[one.label] is other.label for one, other in zip(verdicts, swapped, strict=True)])
        ),
        "right_by_bin": tuple(_share(is_right, is_decided & mask) for mask in in_bin),
        "undecided_by_bin": tuple(_share(is_tie, mask) for mask in in_bin),
        "pairs_by_bin": tuple(int(mask.sum()) for mask in in_bin),
    }


def draw_balanced_pairs(scenes: Scenes, num_pairs: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Returns [num_pairs, 2] images, as many in each difficulty bin, in random order."""
    sizes = (np.arange(num_pairs) % NUM_BINS + rng.random(num_pairs)) / NUM_BINS
    signs = rng.choice([-1, 1], size=num_pairs)
    return draw_gap_pairs(scenes, (sizes * signs).astype(np.float32), rng)


def measure(judge: Judge, scenes: Scenes, draw: str, pairs: NDArray[np.int64]) -> Result:
    """Returns how `judge` does on `pairs` [N, 2] of `scenes`, each asked in both orders."""

    def ask(order: NDArray[np.int64]) -> list[Verdict]:
        return judge.compare(
            [
                Query(goal=scenes.goal, left=scenes.images[left : left + 1], right=scenes.images[right : right + 1])
                for left, right in order
            ]
        )

    start = time.perf_counter()
    verdicts, swapped = ask(pairs), ask(pairs[:, ::-1])
    elapsed_s = time.perf_counter() - start
    gaps = scenes.progress[pairs[:, 1]] - scenes.progress[pairs[:, 0]]
    return Result(
        task=scenes.task,
        setup=scenes.name,
        draw=draw,
        prompt=judge.stamp.prompt,
        pairs_per_s=2 * len(pairs) / elapsed_s,
        **grade(gaps, verdicts, swapped),
    )


def evaluate(config: EvaluateConfig) -> Iterator[Result]:
    """Yields one result per set-up, draw and way of asking."""
    rng = np.random.default_rng(config.seed)
    judges = [build_judge(replace(config.judge, prompt=prompt)) for prompt in config.prompts]
    seen: Counter[str] = Counter()
    for scenes in find_provider(config.scenes)("held_out", config.seed):
        seen[scenes.task] += 1
        if seen[scenes.task] > config.num_setups:
            continue
        balanced = draw_balanced_pairs(scenes, config.num_pairs, rng)
        uniform = draw_uniform_pairs(scenes, config.num_pairs, rng)
        for judge in judges:
            yield measure(judge, scenes, "balanced", balanced)
            yield measure(judge, scenes, "uniform", uniform)


def table_of(results: Sequence[Result]) -> Table:
    """Returns the results as a table, in percent."""
    table = Table(title="decided labels right, per difficulty bin (gap in progress 0.0-0.1 ... 0.9-1.0), in percent")
    bins = (str(number + 1) for number in range(NUM_BINS))
    for column in ("task", "set-up", "draw", "prompt", "right", "undecided", "unread", "swapped", *bins, "/s"):
        table.add_column(column)
    for each in results:
        shares = (each.right, each.undecided, each.unread, each.swapped, *each.right_by_bin)
        table.add_row(
            each.task,
            each.setup,
            each.draw,
            each.prompt,
            *(f"{100 * share:.0f}" for share in shares),
            f"{each.pairs_per_s:.0f}",
        )
    return table


def _share(is_hit: NDArray[np.bool_], among: NDArray[np.bool_]) -> float:
    return float(is_hit[among].mean()) if among.any() else float("nan")


def _without_nan(value: Any) -> Any:
    """The same tree with None for NaN, which JSON does not know."""
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and np.isnan(value) else value


def main() -> None:
    """Measures and shows."""
    logging.basicConfig(level=logging.WARNING)
    config = tyro.cli(EvaluateConfig, description=__doc__)
    torch.set_num_threads(config.threads)
    results = list(evaluate(config))
    if config.out:
        config.out.write_text(json.dumps(_without_nan([asdict(each) for each in results]), indent=1) + "\n")
    Console(width=200).print(table_of(results))


if __name__ == "__main__":
    main()
