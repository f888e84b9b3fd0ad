"""Runs a small bench on one task before a run starts: its items, questions, figures and faults.

Called by the algorithms once the judge is up; `rlvlm judge-bench TASK` asks the same in full.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from rlvlm.core.errors import JudgeUnavailable, UnsupportedQuestion
from rlvlm.demonstrations.trajectory import RobotTrajectory
from rlvlm.envs.config import EnvConfig
from rlvlm.judge_bench.asking import Answer, KnowsItems, ask
from rlvlm.judge_bench.attempts import ATTEMPTS_ASKED, LINE_ASKED
from rlvlm.judge_bench.faults import Fault, Graded, grade
from rlvlm.judge_bench.figures import Figures
from rlvlm.judge_bench.hacked import shipped_episodes
from rlvlm.judge_bench.items import TaskItems
from rlvlm.judge_bench.rehearsal.outcome import Kind, Rehearsal
from rlvlm.judge_bench.rehearsal.rehearse import rehearse, staged
from rlvlm.judge_bench.suites import Suite
from rlvlm.judge_bench.task_items import make_items, recorded_items
from rlvlm.judges.judge import Judge

_CONTROLS = 8
"""Successes that are shown again: fewer would give no useful interval."""
_SHOWN = ("reversed", "still", "other goal")
"""Controls that a policy can play; the others would cost as many questions and end no run."""


class JudgeRefused(JudgeUnavailable):
    """The judge answers, but its answers say nothing about the goal, or a policy can exploit them."""


def scored_suite(task: str, count: int) -> Suite:
    """Returns a suite of episodes or turns of `task` that a judge scores.

    It has `count` turns of each kind; or half as many successes, and three times that of near misses, failures and
    successes cut short. A few successes are shown again as controls, and a few episodes that have fooled judges are
    added if some ship for the task.
    """
    # of six styles of play one always succeeds and one sometimes, see `task_items`
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


def compared_suite(task: str, count: int, *, line: bool = False) -> Suite:
    """Returns a suite of `count` pairs of images of `task`, each asked in both orders; with `line` also those along the
    way to the goal.
    """
    asked = LINE_ASKED if line else 0
    return Suite(name=task, tasks=(task,), episodes=12, pairs=count, videos=0, controls=0, tracks=0, line=asked)


def with_rehearsal(suite: Suite) -> Suite:
    """Returns a suite with the attempts and states along a line that belong to a rehearsal."""
    return replace(suite, attempts=ATTEMPTS_ASKED, line=LINE_ASKED)


def known_items(suite: Suite, config: EnvConfig, size_px: int, seed: int, per_turn: bool, goal: str = "") -> TaskItems:
    """Returns the items of a suite of one task; empty if no player can play it.

    Args:
        suite: see `scored_suite`.
        config: config of the env, as the judge sees it.
        size_px: as for `make_items`.
        seed: seed of play.
        per_turn: whether single turns are scored.
        goal: goal in the questions; empty for the env's own.
    """
    # episodes that fooled judges under the task's own goals may be successes under the user's goal
    suite = replace(suite, goal=goal, hacked=() if goal else suite.hacked)
    made = make_items(suite, suite.tasks[0], config, size_px, seed, per_turn)
    if not suite.videos:  # of the states along a line only the pairs: the judge compares
        made = replace(made, items=tuple(item for item in made.items if item.is_pair))
    # no other goal of this scene is known for the user's own goal
    return _with_controls(made, [case for case in _SHOWN if not goal or case != "other goal"])


def known_recordings(suite: Suite, films: Iterable[RobotTrajectory], size_px: int, seed: int) -> TaskItems:
    """Returns the items of recorded episodes, as made by `recorded_items`, with the controls of `known_items`.

    If all episodes have one goal, that of another task replaces another episode's.

    Raises:
        UsageError: it is unknown which episodes succeeded.
    """
    made = recorded_items(suite, suite.tasks[0], films, size_px, seed)
    has_others = any(item.case == "other goal" for item in made.items)
    return _with_controls(made, _SHOWN if has_others else (*_SHOWN, "other task"))


def _with_controls(made: TaskItems, cases: Collection[str]) -> TaskItems:
    """Returns the items with controls of these cases alone."""
    # controls come last, so that the indices of their originals stay the same
    return replace(made, items=tuple(item for item in made.items if item.source < 0 or item.case in cases))


def measure_known(
    judge: Judge | KnowsItems,
    made: TaskItems,
    num_frames: int,
    seed: int,
    *,
    min_auc: float | None = None,
) -> Graded:
    """Asks about `made`, and returns the figures and faults.

    Args:
        judge: judge of the run.
        made: the items, with the truth about them.
        num_frames: maximum number of images shown per episode.
        seed: seed of the order of asking.
        min_auc: see `grade`.

    Raises:
        JudgeUnavailable: the judge does not answer, or cannot be asked this form of question.
    """
    unasked: list[str] = []
    answers: Sequence[Answer] = [
        answer for block in ask(judge, made, num_frames, seed, unasked.append) for answer in block
    ]
    if unasked:  # a bench leaves this out; a run would meet it at its first label
        raise UnsupportedQuestion(
            "; ".join(unasked),
            "ask in a form that the judge answers: --judge.prompt for pairs, --judge.score for scores",
        )
    return grade([made.items[answer.item] for answer in answers], answers, num_frames, min_auc)


def refuse_faulty(faults: Sequence[Fault]) -> None:
    """Raises JudgeRefused if a fault is fatal or can be exploited; all are named, as others may be the reason."""
    if any(fault.is_fatal or fault.is_exploitable for fault in faults):
        raise JudgeRefused(
            f"the judge {'; it '.join(f'{fault.name} ({fault.evidence})' for fault in faults)}",
            "use a judge that knows this task, or ask in another form; --judge.faulty ok starts all the same",
        )


def preflight(
    judge: Judge | KnowsItems,
    made: TaskItems,
    num_frames: int,
    seed: int,
    *,
    min_auc: float | None = None,
    refuses_faulty: bool = True,
    log: Callable[[str], None] = lambda _: None,
) -> Figures:
    """Asks about `made`, and returns `pair_figures` and `score_figures` together; faults are logged.

    Args:
        judge: as for `measure_known`, with `made`, `num_frames`, `seed` and `min_auc`.
        made: see there.
        num_frames: see there.
        seed: see there.
        min_auc: see there.
        refuses_faulty: whether a fault that is fatal, or that a policy can exploit, is an error; see `JudgeConfig`.
        log: called with a line of text.

    Raises:
        JudgeRefused: the judge has such a fault.
        JudgeUnavailable: the judge does not answer, or cannot be asked this form of question.
    """
    graded = measure_known(judge, made, num_frames, seed, min_auc=min_auc)
    if refuses_faulty:
        refuse_faulty(graded.faults)
    for fault in graded.faults:
        log(f"the judge {fault.name} ({fault.evidence})")
    return graded.pairs | graded.scores


def rehearse_before(  # noqa: PLR0913 - what a rehearsal is made of
    judge: Judge | KnowsItems,
    task: str,
    config: EnvConfig,
    questions: int,
    *,
    kind: Kind,
    size_px: int,
    num_frames: int,
    seed: int,
    goal: str = "",
    refuses_faulty: bool = True,
    log: Callable[[str], None] = lambda _: None,
) -> Rehearsal | None:
    """Rehearses before a run what its judge would teach, see `rehearse`; None, which is logged, where it cannot.

    Raises:
        JudgeRefused: it surely leads a search away from the goal, and `refuses_faulty`.
        JudgeUnavailable: the judge does not answer.
    """
    log(f"rehearsing what the judge would teach, with {questions} questions")
    try:
        with staged(task, config, seed) as stage:
            found = rehearse(
                judge, stage, questions, kind=kind, name="judge", size_px=size_px, num_frames=num_frames, goal=goal
            )
    except UnsupportedQuestion as error:
        log(f"no rehearsal: {error}")
        return None
    log(found.sentence)
    if found.fault and refuses_faulty:
        refuse_faulty([found.fault])
    return found
