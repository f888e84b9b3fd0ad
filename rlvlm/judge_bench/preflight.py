"""A small draw of the bench before a run starts: its items, its questions, its figures and its faults, of one task.

Called by the algorithms once the judge is up; `rlvlm judge-bench TASK` asks the same at length.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from rlvlm.core.errors import JudgeUnavailable, UnsupportedQuestion
from rlvlm.demonstrations.trajectory import RobotTrajectory
from rlvlm.envs.config import EnvConfig
from rlvlm.judge_bench.asking import Answer, KnowsItems, ask
from rlvlm.judge_bench.faults import grade
from rlvlm.judge_bench.figures import Figures
from rlvlm.judge_bench.hacked import shipped_episodes
from rlvlm.judge_bench.items import TaskItems
from rlvlm.judge_bench.suites import Suite
from rlvlm.judge_bench.task_items import make_items, recorded_items
from rlvlm.judges.judge import Judge

_CONTROLS = 8
"""Successes that are shown again: of fewer no interval says much."""
_SHOWN = ("reversed", "still", "other goal")
"""Controls that a policy can play; the others would cost as many questions and end no run."""


class JudgeRefused(JudgeUnavailable):
    """The judge answers, and its answers say nothing about the goal."""


def scored_suite(task: str, count: int) -> Suite:
    """Episodes or turns of `task` that a judge scores: `count` turns of each kind; or half as many successes, and three
    times that of near misses, failures and successes cut short. A few successes are shown again as controls, and a few
    episodes that have fooled judges where some ship for the task.
    """
    # of six styles of play one always succeeds and one sometimes, see `items`
    return Suite(
        name=task,
        tasks=(task,),
        episodes=max(6, 2 * count),
        pairs=0,
        videos=max(1, count // 2),
        controls=_CONTROLS,
        tracks=0,
        hacked=shipped_episodes(task, _CONTROLS),
    )


def compared_suite(task: str, count: int) -> Suite:
    """`count` pairs of images of `task`, each of which is asked in both orders."""
    return Suite(name=task, tasks=(task,), episodes=12, pairs=count, videos=0, controls=0, tracks=0)


def known_items(suite: Suite, config: EnvConfig, size_px: int, seed: int, per_turn: bool, goal: str = "") -> TaskItems:
    """The items of a suite of one task; without any where no player can play it.

    Args:
        suite: see `scored_suite`.
        config: of the env, as the judge sees it.
        size_px: as of `make_items`.
        seed: of play.
        per_turn: whether single turns are scored.
        goal: that the judge is asked about; empty for the env's own.
    """
    # what fooled judges under the task's own goals may be a success in the user's words
    suite = replace(suite, goal=goal, hacked=() if goal else suite.hacked)
    made = make_items(suite, suite.tasks[0], config, size_px, seed, per_turn)
    # the user's words have no other goal in this scene
    return _with_controls(made, [case for case in _SHOWN if not goal or case != "other goal"])


def known_recordings(suite: Suite, films: Iterable[RobotTrajectory], size_px: int, seed: int) -> TaskItems:
    """The items of recorded episodes, as `recorded_items` makes them, with the controls of `known_items`. Where all
    episodes have one sentence, that of another task stands for another episode's.

    Raises:
        UsageError: nothing says which episodes succeeded.
    """
    made = recorded_items(suite, suite.tasks[0], films, size_px, seed)
    has_others = any(item.case == "other goal" for item in made.items)
    return _with_controls(made, _SHOWN if has_others else (*_SHOWN, "other task"))


def _with_controls(made: TaskItems, cases: Collection[str]) -> TaskItems:
    """The same with controls of these cases alone."""
    # controls come last, so that the places of the items that they were made of stay the same
    return replace(made, items=tuple(item for item in made.items if item.source < 0 or item.case in cases))


def preflight(
    judge: Judge | KnowsItems,
    made: TaskItems,
    num_frames: int,
    seed: int,
    *,
    min_auc: float | None = None,
    setting: str = "reward.monitor.preflight",
    log: Callable[[str], None] = lambda _: None,
) -> Figures:
    """Asks about `made`, and returns `pair_figures` and `score_figures` together; faults that are not fatal are logged.

    Args:
        judge: of the run.
        made: the items, with the truth about them.
        num_frames: most images of an episode that are shown.
        seed: of the order of asking.
        min_auc: see `grade`.
        setting: the option that asks nothing at 0.
        log: takes a line.

    Raises:
        JudgeRefused: a fault is fatal.
        JudgeUnavailable: it answers nothing, or cannot be asked this.
    """
    unasked: list[str] = []
    answers: Sequence[Answer] = [
        answer for block in ask(judge, made, num_frames, seed, unasked.append) for answer in block
    ]
    if unasked:  # a bench leaves this out; a run would meet it at its first label
        raise UnsupportedQuestion("; ".join(unasked), f"ask in another form; --{setting} 0 starts without asking")
    items = [made.items[answer.item] for answer in answers]
    graded = grade(items, answers, num_frames, min_auc)
    # all of them are said: the others may be the reason
    if any(fault.is_fatal for fault in graded.faults):
        raise JudgeRefused(
            f"the judge {'; it '.join(f'{fault.name} ({fault.evidence})' for fault in graded.faults)}",
            f"use a judge that knows this task, or ask in another form; --{setting} 0 starts all the same",
        )
    for fault in graded.faults:
        log(f"the judge {fault.name} ({fault.evidence})")
    return graded.pairs | graded.scores
