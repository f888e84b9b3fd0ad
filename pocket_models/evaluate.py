"""Measures a pocket model on held-out data: `python -m pocket_models.evaluate judge|scorer|video|policy`.

A judge is asked exactly as in a run, through `judges.build`; with `--judge` options any other can be measured. Prints
JSON: what stands in the models' `evaluation.json` and on their cards.
"""

import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from numpy.typing import NDArray

from pocket_models.policy import POLICY_TASKS, PolicyTask, Replies, collect_moments
from pocket_models.scenes import Scenes, collect_scenes, draw_uniform_pairs
from pocket_models.scorer import (
    NEARER,
    RATINGS,
    REACHED,
    TURN_TASKS,
    PlayedTurn,
    Push,
    TurnTask,
    collect_pushes,
    collect_turns,
)
from pocket_models.video import MOMENTS, Clips, suite_of
from rlvlm.core.episodes import Observations, SampledReply
from rlvlm.core.judging import Clip, Label, Query, Status, Verdict
from rlvlm.core.steps import FloatArray
from rlvlm.envs import push_block as table
from rlvlm.envs.registry import task_goal
from rlvlm.judge_bench.items import draw_gap_pairs
from rlvlm.judges.agreement import area_under_curve, calibration_error
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.judge import Judge
from rlvlm.judges.prompts import OTHER_GOAL
from rlvlm.pocket.models import weights_folder
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.policies.vlm.loading import load_policy

NUM_BINS = 10
"""Difficulty bins: equal parts of the gap in progress, 0 to 1; the last ones are the easiest."""
_FRAME_PX = 144

Figures = dict[str, float]


def judge(
    judge: JudgeConfig = JudgeConfig(),  # noqa: B008 - frozen
    scenes: str = "all",
    prompts: tuple[str, ...] = ("direct", "single_stage", "two_stage"),
    num_pairs: int = 400,
    num_setups: int = 4,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """How a judge compares held-out scenes: one row of figures per set-up, draw and prompt.

    Args:
        judge: who is measured.
        scenes: a task, all, or module:function.
        prompts: ways of asking.
        num_pairs: per set-up and draw. balanced: as many in each difficulty bin; uniform: as the preference loop draws.
        num_setups: set-ups measured of each task, the first ones.
        seed: of scenes and pairs.
    """
    rng = np.random.default_rng(seed)
    judges = [build_judge(replace(judge, prompt=prompt)) for prompt in prompts]  # pyright: ignore[reportArgumentType]
    seen: Counter[str] = Counter()
    rows = []
    for each in collect_scenes(scenes, "held_out", seed):
        seen[each.task] += 1
        if seen[each.task] > num_setups:
            continue
        draws = {
            "balanced": draw_balanced_pairs(each, num_pairs, rng),
            "uniform": draw_uniform_pairs(each, num_pairs, rng),
        }
        for asked in judges:
            for draw, pairs in draws.items():
                figures = compare_figures(asked, each, pairs)
                about = {"task": each.task, "setup": each.name, "draw": draw, "prompt": asked.stamp.prompt}
                rows.append(about | figures)
    return rows


def scorer(
    judge: JudgeConfig = JudgeConfig(model="scorer"),  # noqa: B008 - frozen
    turns: int = 400,
    clips: int = 400,
    seed: int = 0,
) -> dict[str, Figures]:
    """How a judge rates held-out turns of each task, and tells held-out successes of push_block from failures.

    Args:
        judge: who is measured, in the forms utility and success.
        turns: of each task.
        clips: episodes of push_block; 0 measures none.
        seed: of play.
    """
    rater = build_judge(replace(judge, score="utility"))
    figures = {task.name: turn_figures(rater, task, turns, seed) for task in TURN_TASKS}
    if clips:
        teller = build_judge(replace(judge, score="success"))
        pushes = collect_pushes(clips, "held_out", seed)
        figures |= {f"push_block, {count} images": push_figures(teller, pushes, count) for count in (2, 8)}
    return figures


def video(
    clips: Path,
    judge: JudgeConfig = JudgeConfig(model="video", score="success"),  # noqa: B008 - frozen
    num_frames: tuple[int, ...] = (2, 8),
) -> dict[str, dict[str, Figures]]:
    """How a judge tells held-out successes of LIBERO from failures, suite by suite.

    Args:
        clips: file that `python -m pocket_models.video --held-out` wrote.
        judge: who is measured.
        num_frames: frames shown of each clip.
    """
    asked, played = build_judge(judge), Clips.load(clips)
    suites = list(dict.fromkeys(map(suite_of, played.tasks)))
    return {
        f"{count} frames": {suite: video_figures(asked, played.of_suite(suite), count) for suite in suites}
        for count in num_frames
    }


def policy(
    model: Path = weights_folder("policy"),  # noqa: B008 - a constant
    tasks: tuple[str, ...] = (),
    moments: int = 400,
    seed: int = 2_000_000,
    max_new_tokens: int = 80,
) -> dict[str, Figures]:
    """What the pocket policy reads rightly and how evenly it acts.

    Args:
        model: folder of the weights.
        tasks: none means all.
        moments: per task, of episodes that training never saw.
        seed: of the episodes.
        max_new_tokens: a longer reply counts as invalid.
    """
    engine = PolicyEngine(load_policy(PolicyConfig(model=str(model), learns="all", device="cpu")))
    chosen = [task for task in POLICY_TASKS if not tasks or task.name in tasks]
    return {task.name: reply_figures(engine, task, moments, seed, max_new_tokens) for task in chosen}


def draw_balanced_pairs(scenes: Scenes, num_pairs: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """[num_pairs, 2] images, as many in each difficulty bin, in random order."""
    sizes = (np.arange(num_pairs) % NUM_BINS + rng.random(num_pairs)) / NUM_BINS  # anywhere within each bin
    signs = rng.choice([-1, 1], size=num_pairs)
    return draw_gap_pairs(scenes.progress, (sizes * signs).astype(np.float32), rng)


def compare_figures(judge: Judge, scenes: Scenes, pairs: NDArray[np.int64]) -> dict[str, Any]:
    """How `judge` does on `pairs` [N, 2] of `scenes`, each asked in both orders."""

    def ask(order: NDArray[np.int64]) -> list[Verdict]:
        images = scenes.images
        return judge.compare(
            [Query(goal=scenes.goal, left=images[[left]], right=images[[right]]) for left, right in order]
        )

    start = time.perf_counter()
    # both orders: a judge that prefers a side is right about half of the pairs, and is found out by their exchange
    verdicts, swapped = ask(pairs), ask(pairs[:, ::-1])
    elapsed_s = time.perf_counter() - start
    gaps = scenes.progress[pairs[:, 1]] - scenes.progress[pairs[:, 0]]
    return verdict_figures(gaps, verdicts, swapped) | {"pairs_per_s": 2 * len(pairs) / elapsed_s}


def verdict_figures(gaps: FloatArray, verdicts: Sequence[Verdict], swapped: Sequence[Verdict]) -> dict[str, Any]:
    """Shares, overall and by difficulty bin; None where nothing was decided.

    Args:
        gaps: [N] progress of the right image minus that of the left.
        verdicts: [N] answers.
        swapped: [N] answers to the same pairs with the images swapped.

    Returns:
        `right`: of decided labels, those that name the image with more progress. `undecided`: of all answers, those
        that saw no difference. `unread`: those that were invalid or failed. `swapped`: pairs whose label swaps with the
        images, where no difference must stay so.
    """
    is_decided = np.array([verdict.status is Status.OK for verdict in verdicts])
    is_tie = np.array([verdict.status is Status.NO_PREFERENCE for verdict in verdicts])
    truths = [Label.RIGHT if gap > 0 else Label.LEFT for gap in gaps]
    is_right = np.array([verdict.label is truth for verdict, truth in zip(verdicts, truths, strict=True)])
    mirrored = [(one.label and one.label.swapped) is other.label for one, other in zip(verdicts, swapped, strict=True)]
    bins = np.minimum((np.abs(gaps) * NUM_BINS).astype(int), NUM_BINS - 1)
    in_bin = [bins == number for number in range(NUM_BINS)]

    def share(is_hit: NDArray[np.bool_], among: NDArray[np.bool_]) -> float | None:
        return float(is_hit[among].mean()) if among.any() else None

    return {
        "right": share(is_right, is_decided),
        "undecided": float(is_tie.mean()),
        "unread": float((~is_decided & ~is_tie).mean()),
        "swapped": float(np.mean(mirrored)),
        "right_by_bin": [share(is_right, is_decided & mask) for mask in in_bin],
        "undecided_by_bin": [share(is_tie, mask) for mask in in_bin],
        "pairs_by_bin": [int(mask.sum()) for mask in in_bin],
    }


def turn_figures(judge: Judge, task: TurnTask, num_turns: int, seed: int) -> Figures:
    """How a judge rates held-out turns of a task, as they were, backwards, and for a goal that is not the task's.

    Returns:
        Share of turns whose rating is the true one (the nearest of 0, 1/4, 3/4 and 1); mean score of each true rating;
        mean scores of backwards and off-goal turns that truly came nearer; and the number of different questions.
    """
    env, turns = collect_turns(task, num_turns, "held_out", seed)

    def ask(chosen: Sequence[PlayedTurn], goal: str, step: int) -> FloatArray:
        frames = [env.draw(turn.snapshots[::step]) for turn in chosen]
        clips = [Clip(goal=goal, frames=shown, action=turn.action) for turn, shown in zip(chosen, frames, strict=True)]
        return scores_of(judge, clips)

    goal = task_goal(task.name)
    scores = ask(turns, goal, 1)  # in [0, 1]: ratings 1 to 5 are 0, 1/4, ... 1
    truths = np.array([turn.rating for turn in turns])
    nearest = np.array(RATINGS)[np.abs(scores[:, None] - (np.array(RATINGS) - 1) / 4).argmin(1)]
    better = [turn for turn in turns if turn.rating in (NEARER, REACHED)]
    figures = {
        "right": float((nearest == truths).mean()),
        "better above worse": area_under_curve(scores, truths >= NEARER),
        **{f"mean of rating {rating}": float(scores[truths == rating].mean()) for rating in RATINGS},
        "turned round": float(ask(better, goal, -1).mean()),
        "another goal": float(ask(better, OTHER_GOAL, 1).mean()),
        "unanswered": float(np.isnan(scores).mean()),
        "different questions": float(len({(turn.keys.tobytes(), turn.action) for turn in turns})),
    }
    env.close()
    return figures


def push_figures(judge: Judge, pushes: Sequence[Push], num_frames: int) -> Figures:
    """How a judge tells successes of push_block from failures, at `num_frames` images of each."""

    def ask(goal_of: Callable[[Push], str], step: int) -> FloatArray:
        shown = [table.draw_tables(push.thinned(num_frames).snapshots[::step], _FRAME_PX) for push in pushes]
        clips = [Clip(goal=goal_of(push), frames=frames) for push, frames in zip(pushes, shown, strict=True)]
        return scores_of(judge, clips)

    success = np.array([push.is_success for push in pushes])
    whole = ask(lambda push: push.instruction, 1)
    return success_figures(whole, success, np.empty(0, np.float32)) | {
        "successes turned round": _mean(ask(lambda push: push.instruction, -1)[success]),
        "successes, another thing asked for": _mean(ask(lambda push: push.other_instructions[0], 1)[success]),
    }


def video_figures(judge: Judge, clips: Clips, num_frames: int) -> Figures:
    """How a judge tells successes of LIBERO from failures, at `num_frames` frames of each.

    Failures are of three kinds: as they were played, the first halves of successes, and both together.
    """
    moments = np.linspace(0, MOMENTS - 1, num_frames).round().astype(int)
    halves = np.linspace(0, MOMENTS // 2, num_frames).round().astype(int)
    goals = sorted(set(clips.instructions))
    # another task's instruction; of a suite with one task alone there is no other, and those count in no figure
    others = [goals[(goals.index(own) + 1) % len(goals)] for own in clips.instructions]
    is_other = np.array([one != own for one, own in zip(others, clips.instructions, strict=True)])

    def ask(order: NDArray[np.int64], asked_for: Sequence[str] = clips.instructions) -> FloatArray:
        return scores_of(
            judge, [Clip(goal=goal, frames=clips.frames[row][order]) for row, goal in enumerate(asked_for)]
        )

    return success_figures(ask(moments), clips.success, ask(halves)[clips.success]) | {
        "successes turned round": _mean(ask(moments[::-1])[clips.success]),
        "successes, another thing asked for": _mean(ask(moments, others)[clips.success & is_other]),
    }


def success_figures(whole: FloatArray, success: NDArray[np.bool_], halves: FloatArray) -> Figures:
    """What scores of clips say about success. Clips without a score are counted, and in no other figure.

    Args:
        whole: [N] scores, NaN where the judge gave none.
        success: [N] the truth.
        halves: [H] scores of the first halves of successes, as further failures; may be empty.

    Raises:
        ValueError: no success or no failure has a score.
    """
    scored = np.isfinite(whole)
    right, wrong = whole[scored & success], whole[scored & ~success]
    answered = halves[np.isfinite(halves)]
    both = np.concatenate([wrong, answered])
    num_asked = len(whole) + len(halves)
    if not (len(right) and len(both)):
        raise ValueError(
            f"of {num_asked} clips the judge scored {len(right)} successes and {len(both)} failures, too few"
        )

    def above(failures: FloatArray) -> float:
        truths = np.repeat([True, False], [len(right), len(failures)])
        return area_under_curve(np.concatenate([right, failures]), truths)

    scores, truths = np.concatenate([right, both]), np.repeat([True, False], [len(right), len(both)])
    return {
        "success above failure": above(wrong),
        **({"success above its first half": above(answered), "success above both": above(both)} if len(halves) else {}),
        "calibration error": calibration_error(scores, truths),
        "false positives": float((both >= 0.5).mean()),
        "false negatives": float((right < 0.5).mean()),
        "mean of successes": float(right.mean()),
        "mean of failures": float(both.mean()),
        "unanswered": 1.0 - len(scores) / num_asked,
        "successes": float(success.sum()),
        "failures": float((~success).sum()),
    }


def scores_of(judge: Judge, clips: Sequence[Clip]) -> FloatArray:
    """[N] what a judge gives, NaN where it gives none."""
    return np.array([np.nan if score.value is None else score.value for score in judge.score(clips)], np.float32)


def reply_figures(engine: PolicyEngine, task: PolicyTask, count: int, seed: int, max_new_tokens: int) -> Figures:
    """Figures of one task, sampled at temperature 1 unless said otherwise.

    `valid`: replies with a legal action. `reads`: replies that begin as every right one does, up to the plan; `reads
    greedy` likewise for greedy replies. `plays`: share that does what the expert does; `chance` is what even play would
    give. `most chosen`: share of the action taken most often, where even play gives about 1 / actions.
    """
    env, moments = collect_moments(task, count, seed)
    replies = Replies([task], moments)
    images = [moment.image for moment in moments]
    missing = engine.missing(images)  # each different image is encoded once, however many moments share it
    for begin in range(0, len(missing), engine.max_batch):
        rows = missing[begin : begin + engine.max_batch]
        engine.show([images[row] for row in rows], env.draw(np.stack([moments[row].snapshot for row in rows])))
    obs, seeds = (
        Observations(texts=tuple(moment.prompt for moment in moments), images=tuple(images)),
        range(len(moments)),
    )
    sampled = engine.reply(obs, seeds, ReplySampling(max_new_tokens=max_new_tokens))
    greedy = engine.reply(obs, seeds, ReplySampling(max_new_tokens=max_new_tokens, greedy=True))
    actions = []
    for reply, moment in zip(sampled, moments, strict=True):
        # stricter than the env's own reading: the action has to be the reply's last member, as it was taught
        found = re.search(r'"action": "([^"]*)"\}$', reply.text)
        index = env.action_names.index(found[1]) if found and found[1] in env.action_names else None
        actions.append(index if index in moment.legal else None)
    chosen = [action for action in actions if action is not None]

    def reads(answers: Sequence[SampledReply]) -> float:
        starts = ["{" + replies.reading(moment) for moment in moments]
        return float(np.mean([one.text.startswith(start) for one, start in zip(answers, starts, strict=True)]))

    return {
        "valid": len(chosen) / len(moments),
        "reads": reads(sampled),
        "reads greedy": reads(greedy),
        "plays": float(np.mean([a == m.action for a, m in zip(actions, moments, strict=True)])),
        "chance": float(np.mean([1 / len(moment.legal) for moment in moments])),
        "most chosen": max(Counter(chosen).values()) / max(len(chosen), 1),
        "tokens": float(np.mean([len(reply.ids) for reply in sampled])),
        "pictures": len(set(images)),
    }


def _mean(values: FloatArray) -> float:
    """Mean of the values that are numbers; NaN where there are none."""
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def main() -> None:
    """Reads the command line, measures and prints."""
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    measures: dict[str, Callable[..., Any]] = {
        "judge": judge,
        "scorer": scorer,
        "video": video,
        "policy": policy,
    }
    figures = tyro.extras.subcommand_cli_from_dict(measures, description=__doc__)
    print(json.dumps(figures, indent=1))  # noqa: T201 - what the command is for


if __name__ == "__main__":
    main()
