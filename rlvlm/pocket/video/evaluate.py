"""Measures a judge on held-out clips of LIBERO, suite by suite: `python -m rlvlm.pocket.video.evaluate --clips FILE`.

The judge is asked exactly as in a run, through `judges.build`; with `--judge` options any other can be measured.
"""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import tyro
from numpy.typing import NDArray

from rlvlm.core.judging import Clip
from rlvlm.core.steps import FloatArray
from rlvlm.judges.agreement import area_under_curve, calibration_error
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.judge import Judge
from rlvlm.pocket.video.dataset import MOMENTS, Clips, suite_of

Figures = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """What is measured."""

    clips: Path
    """File that `play --held-out` wrote."""
    num_frames: tuple[int, ...] = (2, 8)
    """Frames shown of each clip."""
    judge: JudgeConfig = field(default_factory=lambda: JudgeConfig(model="video", score="success"))
    """Who is measured."""
    out: Path | None = None
    """JSON file of the figures."""
    threads: int = 1
    """CPU threads."""


def measure(judge: Judge, clips: Clips, num_frames: int) -> Figures:
    """How a judge tells held-out successes from failures, at `num_frames` frames of each.

    Failures are of three kinds: as they were played, the first halves of successes, and both together. What the judge
    gave no score for is counted (of wholes and halves), and no figure of scores has it.

    Raises:
        ValueError: it scored no whole success or no failure.
    """
    moments = np.linspace(0, MOMENTS - 1, num_frames).round().astype(int)
    halves = np.linspace(0, MOMENTS // 2, num_frames).round().astype(int)
    goals = sorted(set(clips.instructions))
    others = [goals[(goals.index(own) + 1) % len(goals)] for own in clips.instructions]
    other_goals = np.array([one != own for one, own in zip(others, clips.instructions, strict=True)])

    def ask(order: NDArray[np.int64], asked_for: Sequence[str] = clips.instructions) -> FloatArray:
        asked = [Clip(goal=goal, frames=clips.frames[row][order]) for row, goal in enumerate(asked_for)]
        return np.array([np.nan if one.value is None else one.value for one in judge.score(asked)], np.float32)

    whole, success = ask(moments), clips.success
    cut = ask(halves)[success]
    told = np.isfinite(whole)
    asked, answered = len(whole) + len(cut), cut[np.isfinite(cut)]
    right, wrong = whole[told & success], whole[told & ~success]
    both = np.concatenate([wrong, answered])
    if not (len(right) and len(both)):
        raise ValueError(f"of {asked} clips the judge scored {len(right)} successes and {len(both)} failures, too few")
    scores, truths = np.concatenate([right, both]), np.repeat([True, False], [len(right), len(both)])
    return {
        "success above failure": area_under_curve(whole[told], success[told]),
        "success above its first half": area_under_curve(
            np.concatenate([right, answered]), np.repeat([True, False], [len(right), len(answered)])
        ),
        "success above both": area_under_curve(scores, truths),
        "calibration error": calibration_error(scores, truths),
        "false positives": float((both >= 0.5).mean()),
        "false negatives": float((right < 0.5).mean()),
        "mean of successes": float(right.mean()),
        "mean of failures": float(both.mean()),
        "successes turned round": float(np.nanmean(ask(moments[::-1])[success])),
        "successes, another thing asked for": float(np.nanmean(ask(moments, others)[success & other_goals]))
        if other_goals.any()
        else math.nan,
        "unanswered": 1.0 - len(scores) / asked,
        "successes": float(success.sum()),
        "failures": float((~success).sum()),
    }


def main() -> None:
    """Measures, prints and writes."""
    logging.basicConfig(level=logging.WARNING)
    config = tyro.cli(EvaluateConfig, description=__doc__)
    torch.set_num_threads(config.threads)
    judge, clips = build_judge(config.judge), Clips.load(config.clips)
    suites = list(dict.fromkeys(map(suite_of, clips.tasks)))
    figures = {
        f"{count} frames": {suite: measure(judge, clips.of_suite(suite), count) for suite in suites}
        for count in config.num_frames
    }
    text = json.dumps(figures, indent=1)
    print(text)  # noqa: T201 - what the command is for
    if config.out is not None:
        config.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
