"""Measures a scorer on held-out turns and clips: `python -m rlvlm.pocket.scorer.evaluate` prints and writes JSON.

The judge is asked exactly as in a run, through `judges.build`; with `--judge` options any other can be measured.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import tyro

from rlvlm.core.judging import Clip
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.envs.push_block import table
from rlvlm.envs.registry import task_goal
from rlvlm.judges.agreement import area_under_curve
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.judge import Judge
from rlvlm.judges.prompts import OTHER_GOAL
from rlvlm.pocket.scenes.clips import Push, collect_pushes
from rlvlm.pocket.scenes.turns import AWAY, NEARER, REACHED, SAME, PlayedTurn, collect_turns
from rlvlm.pocket.scorer.dataset import TURN_TASKS, TurnTask

RATINGS = (AWAY, SAME, NEARER, REACHED)
Figures = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """What is measured."""

    turns: int = 400
    """Held-out turns of each task."""
    clips: int = 400
    """Held-out episodes of push_block; 0 measures none."""
    frame_px: int = 144
    """Side of their images."""
    seed: int = 0
    """Of play."""
    judge: JudgeConfig = field(default_factory=lambda: JudgeConfig(model="scorer", score="utility"))
    """Who is measured; it is asked in the forms utility and success."""
    out: Path | None = None
    """JSON file of the figures."""
    threads: int = 1
    """CPU threads."""


def measure_turns(judge: Judge, task: TurnTask, config: EvaluateConfig) -> Figures:
    """How a judge rates held-out turns of a task, as they were, turned round, and for a goal that is not the task's.

    Returns:
        Share of turns whose rating is the true one (the nearest of 0, 1/4, 3/4 and 1); mean score of each true rating;
        mean scores of turned-round and off-goal turns that truly came nearer; and the number of different questions.
    """
    env, turns = collect_turns(task.name, config.turns, "held_out", config.seed, splits_starts=task.splits_starts)

    def ask(chosen: Sequence[PlayedTurn], goal: str, order: tuple[int, int]) -> FloatArray:
        clips = []
        for turn in chosen:
            pair = np.stack([turn.before, turn.after])[list(order)]
            clips.append(Clip(goal=goal, frames=env.draw(pair), action=turn.action))
        return _values(judge, clips)

    goal = task_goal(task.name)
    scores = ask(turns, goal, (0, 1))
    truths = np.array([turn.rating for turn in turns])
    nearest = np.array(RATINGS)[np.abs(scores[:, None] - (np.array(RATINGS) - 1) / 4).argmin(1)]
    better = [turn for turn in turns if turn.rating in (NEARER, REACHED)]
    means = {f"mean of rating {rating}": float(scores[truths == rating].mean()) for rating in RATINGS}
    figures = {
        "right": float((nearest == truths).mean()),
        "better above worse": area_under_curve(scores, truths >= NEARER),
        **means,
        "turned round": float(ask(better, goal, (1, 0)).mean()),
        "another goal": float(ask(better, OTHER_GOAL, (0, 1)).mean()),
        "unanswered": float(np.isnan(scores).mean()),
        "different questions": float(len({(turn.keys, turn.action) for turn in turns})),
    }
    env.close()
    return figures


def measure_clips(judge: Judge, config: EvaluateConfig, num_frames: int) -> Figures:
    """How a judge tells held-out successes of push_block from failures, at `num_frames` images of each."""
    pushes = collect_pushes(config.clips, "held_out", config.seed)

    def ask(goal_of: Callable[[Push], str], step: int) -> FloatArray:
        clips = [
            Clip(goal=goal_of(push), frames=_drawn(push.thinned(num_frames).snapshots[::step], config.frame_px))
            for push in pushes
        ]
        return _values(judge, clips)

    scores = ask(lambda push: push.instruction, 1)
    truths = np.array([push.is_success for push in pushes])
    others = ask(lambda push: push.other_instructions[0], 1)
    return {
        "success above failure": area_under_curve(scores, truths),
        "false positives": float((scores[~truths] >= 0.5).mean()),
        "false negatives": float((scores[truths] < 0.5).mean()),
        "mean of successes": float(scores[truths].mean()),
        "successes turned round": float(ask(lambda push: push.instruction, -1)[truths].mean()),
        "successes, another colour asked for": float(others[truths].mean()),
        "unanswered": float(np.isnan(scores).mean()),
        "successes": float(truths.sum()),
        "failures": float((~truths).sum()),
    }


def _drawn(snapshots: FloatArray, size_px: int) -> Frames:
    return table.draw(snapshots, size_px)


def _values(judge: Judge, clips: Sequence[Clip]) -> FloatArray:
    return np.array([np.nan if one.value is None else one.value for one in judge.score(clips)], np.float32)


def main() -> None:
    """Measures, prints and writes."""
    logging.basicConfig(level=logging.WARNING)
    config = tyro.cli(EvaluateConfig, description=__doc__)
    torch.set_num_threads(config.threads)
    judge = build_judge(replace(config.judge, score="utility"))
    figures = {task.name: measure_turns(judge, task, config) for task in TURN_TASKS}
    if config.clips:
        judge = build_judge(replace(config.judge, score="success"))
        figures |= {f"push_block, {count} images": measure_clips(judge, config, count) for count in (2, 8)}
    text = json.dumps(figures, indent=1)
    print(text)  # noqa: T201 - what the command is for
    if config.out is not None:
        config.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
