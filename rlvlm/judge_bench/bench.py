"""Runs one judge on one suite: makes the items task by task, asks, and summarises the answers in figures."""

import logging
import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlvlm.core.errors import JudgeUnavailable, UnsupportedQuestion, UsageError, first_line
from rlvlm.core.guests import load
from rlvlm.core.judging import Stamp
from rlvlm.demonstrations.recordings import Recordings
from rlvlm.envs.registry import task_env
from rlvlm.judge_bench.archive import Archive, ArchiveWriter
from rlvlm.judge_bench.asking import Answer, Reference, ask
from rlvlm.judge_bench.faults import Fault, Graded, grade
from rlvlm.judge_bench.figures import cost_figures, pooled, teacher_table
from rlvlm.judge_bench.frozen import frozen_items, frozen_rows
from rlvlm.judge_bench.items import Item, TaskItems
from rlvlm.judge_bench.published import published_figures
from rlvlm.judge_bench.rehearsal.outcome import Kind, Rehearsal
from rlvlm.judge_bench.rehearsal.rehearse import rehearse, staged
from rlvlm.judge_bench.remedies import remedies
from rlvlm.judge_bench.suites import VERSION, Suite, bench_form, is_recording, questions_of_person
from rlvlm.judge_bench.task_items import make_items, recorded_items
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.judge import Judge
from rlvlm.judges.prompts import check_goal

logger = logging.getLogger(__name__)

Log = Callable[[str], None]


@dataclass(kw_only=True)
class Measured:
    """Answers of one judge, task by task."""

    suite: Suite
    stamp: Stamp
    """Identity of the judge."""
    config: JudgeConfig
    num_frames: int
    seed: int
    made: dict[str, TaskItems] = field(default_factory=dict)
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    rehearsals: dict[str, list[Rehearsal]] = field(default_factory=dict)
    """Rehearsals of each task, one for each kind of question."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Tasks without answers, and the reason."""
    items_s: float = 0.0
    """Seconds spent on making the items."""
    is_whole: bool = True
    """Whether the whole suite was asked; False if the bench was stopped."""

    def rows(self, tasks: Sequence[str] | None = None) -> tuple[list[Item], list[Answer]]:
        """Returns items and answers, in the order of asking, of some tasks or of all."""
        answers = [answer for task in (self.answers if tasks is None else tasks) for answer in self.answers[task]]
        return [self.made[answer.task].items[answer.item] for answer in answers], answers


def measure(  # noqa: PLR0913, C901 - what a bench is made of
    suite: Suite,
    judge: Judge | Reference,
    config: JudgeConfig,
    *,
    num_frames: int,
    seed: int = 0,
    log: Log = lambda _: None,
    is_stopped: Callable[[], bool] = lambda: False,
    on_task: Callable[[TaskItems, Sequence[Answer]], None] = lambda made, answers: None,
) -> Measured:
    """Asks a judge about a suite; answers so far are kept if it fails or is stopped half way.

    Args:
        suite: the items to ask.
        judge: the judge to ask.
        config: config of the judge, for image size, drawing style of the envs and form of the score.
        num_frames: maximum number of images shown per episode.
        seed: seed of items and order.
        log: called with a line per task.
        is_stopped: polled between blocks.
        on_task: called with each task and its answers while its images can still be drawn.

    Raises:
        JudgeUnavailable: no question at all was answered.
        UsageError: no task of the suite can be played.
    """
    found = Measured(suite=suite, stamp=judge.stamp, config=config, num_frames=num_frames, seed=seed)
    for place, name in enumerate(suite.tasks, start=1):
        task, began = name, time.perf_counter()
        made = make_task(
            suite,
            task,
            size_px=config.image_px,
            seed=seed,
            asks_turns=config.score == "utility",
            is_pocket=config.ships_weights,
        )
        task = made.task  # for a recording, the name of its folder
        found.items_s += time.perf_counter() - began
        if made.note:
            log(f"{task}: {made.note}")
        # the suite goes on without tasks that have no known answers
        if not made.items:
            found.left_out[task] = _why_empty(made, is_recording(name))
            log(f"{place} of {len(suite.tasks)}  {task}: left out, {found.left_out[task]}")
            made.close()
            continue
        if not isinstance(judge, Reference):  # else each question would fail by itself, and look like the judge's fault
            require_goals(task, (item.goal for item in made.items))
        found.made[task] = made
        answers = found.answers[task] = []
        try:
            # what is frozen cannot be made smaller for a person, who is asked the first questions of it
            most = questions_of_person(suite) if config.is_human and suite.frozen is not None else None
            for block in ask(judge, made, num_frames, seed, log, is_person=config.is_human, most=most):
                answers += block  # at once, so that paid answers are kept if a later block fails
                if is_stopped():
                    found.is_whole = False
                    break
        except JudgeUnavailable as error:
            if not sum(map(len, found.answers.values())):  # nothing to keep: a wrong key, or no such model
                raise
            found.left_out[task], found.is_whole = first_line(error), False
            logger.warning("%s: %s", task, found.left_out[task])
        on_task(made, answers)
        if suite.rehearse and found.is_whole and suite.frozen is None and not is_recording(name):
            found.rehearsals[task] = rehearse_task(found, task, judge, answers, log, is_stopped)
        found.made[task] = made.closed()  # fifty open envs would fill the memory
        log(f"{place} of {len(suite.tasks)}  {task}: {len(answers)} answers in {time.perf_counter() - began:.1f} s")
        if is_stopped():
            break
    if not found.made:
        raise UsageError(
            f"nothing of {suite.name} can be asked: {'; '.join(f'{t}: {why}' for t, why in found.left_out.items())}",
            "give the env progress or a method scripted_action (docs/tasks.md), or play by a policy: --player RUN",
        )
    return found


def rehearse_task(
    found: Measured,
    task: str,
    judge: Judge | Reference,
    answers: Sequence[Answer],
    log: Log,
    is_stopped: Callable[[], bool],
) -> list[Rehearsal]:
    """Returns the rehearsals of a task, of each kind of question to which a judge gave `answers`; empty where the env
    gives no states, which is logged.
    """
    suite, config, rehearsals = found.suite, found.config, []
    env = replace(task_env(task).for_model(config.ships_weights), draw_path=suite.draw_path)
    kinds: list[Kind] = []
    if any(math.isfinite(answer.value) for answer in answers) and config.score != "utility":
        kinds.append("scores")
    if any(answer.label for answer in answers):
        kinds.append("pairs")
    if not kinds:
        return []
    try:
        with staged(task, env, found.seed, suite.player) as stage:
            for kind in kinds:
                if is_stopped():
                    break
                rehearsal = rehearse(
                    judge, stage, suite.rehearse, kind=kind, name=judge.stamp.judge, size_px=config.image_px,
                    num_frames=found.num_frames, goal=suite.goal, is_stopped=is_stopped,
                )  # fmt: skip
                log(f"{task}: {rehearsal.sentence}")
                rehearsals.append(rehearsal)
    except (UnsupportedQuestion, JudgeUnavailable) as error:  # a judge that is gone answers no other kind either
        log(f"{task}: no{' further' if rehearsals else ''} rehearsal: {first_line(error)}")
    return rehearsals


def make_task(
    suite: Suite, task: str, *, size_px: int, seed: int, asks_turns: bool, is_pocket: bool = False
) -> TaskItems:
    """Returns the items of a task, of a recording, or of a frozen file.

    Args:
        suite: sets the number of items.
        task: one of the suite's tasks.
        size_px: side length of the images.
        seed: seed of play and draws.
        asks_turns: whether single turns are scored instead of episodes.
        is_pocket: whether envs are drawn in the style that pocket models were trained on.

    Raises:
        UsageError: there is no such task, a file is damaged, or it is unknown which recorded episodes succeeded.
        MachineError: the machine cannot draw the task.
    """
    if suite.frozen is not None:
        return frozen_items(suite.frozen, task, size_px).made
    if suite.is_table:
        return recorded_items(suite, Path(task).name, Recordings(path=Path(task), form="videos"), size_px, seed)
    if form := bench_form(task):
        return recorded_items(suite, Path(task).name, load(form.bench)(Path(task)), size_px, seed)
    env = replace(task_env(task).for_model(is_pocket), draw_path=suite.draw_path)
    return make_items(suite, task, env, size_px, seed, asks_turns)


def freeze(  # noqa: PLR0913 - what is frozen, and how it is shown
    suite: Suite,
    path: Path,
    *,
    num_frames: int,
    size_px: int,
    asks_turns: bool,
    seed: int,
    has_pixels: bool = True,
    log: Log = lambda _: None,
) -> Archive:
    """Writes a suite's items and their images into one file, and returns its facts.

    Args:
        suite: suite to freeze; tasks without items are left out.
        path: path of the file.
        num_frames: maximum number of images per episode, 1 to 64.
        size_px: side length of the images; envs in turns have their own.
        asks_turns: whether single turns are scored instead of episodes.
        seed: seed of play and draws.
        has_pixels: False writes the questions alone, with the hash of everything.
        log: called with a line per task.

    Raises:
        UsageError: no task has items, or the file would exceed the limits on reading.
        MachineError: the machine cannot draw a task.
    """
    writer = ArchiveWriter(path, suite.name, frames=num_frames, turns=asks_turns, has_pixels=has_pixels)
    with writer.writing():
        for task in suite.tasks:
            made = make_task(suite, task, size_px=size_px, seed=seed, asks_turns=asks_turns)
            if made.items:
                rows, groups = frozen_rows(made, num_frames)
                writer.add(made.task, made.note, rows, groups)
                log(f"{made.task}: {len(rows)} questions, {sum(map(len, groups))} images")
            else:
                log(f"{made.task}: left out, {_why_empty(made, is_recording(task))}")
            made.close()
        if not writer.archive.tasks:
            raise UsageError(f"nothing of {suite.name} can be asked", "name another suite")
    return writer.archive


def _why_empty(made: TaskItems, is_recorded: bool) -> str:
    if is_recorded:
        return "no recorded episode is a success"
    return f"play met no two images whose true {'reward' if made.note else 'progress'} differs"


def require_goals(task: str, goals: Iterable[str]) -> None:
    """Checks that a judge can be asked about all of `goals`.

    Raises:
        UsageError: a goal is empty, too long, or has characters that no prompt takes, so that nothing would be sent.
    """
    try:
        for goal in set(goals):
            check_goal(goal)
    except ValueError as error:
        fix = f'say the goal: rlvlm judge-bench {task} --goal "push the puck into the ring"'
        raise UsageError(f"the judge cannot be asked about {task}: {error}", fix) from error


def summarise(found: Measured) -> dict[str, Any]:
    """Returns the bench's row: the content of `bench.json`.

    Returns:
        `bench`: version, suite, seed, frames. `judge`: the stamp. `figures`: over all tasks: `pairs`, `scores`,
        `published` (definitions of other benches), `cost`. `tasks`: pairs, scores and faults of each. `faults`: over
        all tasks. `remedies`: ways of asking for labels, the cheapest first. `rehearsals`: of each task. `teacher`:
        tables by task, and over all.
        `manifest`: digests and small images by task.
    """
    tables = {task: teacher_table(*found.rows([task])) for task in found.answers}
    for task, rehearsals in found.rehearsals.items():
        # where a search that follows the judge ends, a policy may end too
        tables[task] = pooled({"asked": tables[task]} | {each.kind: each.ends for each in rehearsals})
    graded = {task: grade(*found.rows([task]), found.num_frames) for task in found.answers}
    for task, rehearsals in found.rehearsals.items():
        graded[task].faults.extend(rehearsal.fault for rehearsal in rehearsals if rehearsal.fault)
    # in KiB on Linux, in bytes on macOS
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1_024)
    items, answers = found.rows()
    together = grade(items, answers, found.num_frames)
    return {
        "bench": {
            "version": VERSION,
            "suite": found.suite.name,
            "seed": found.seed,
            "frames": found.num_frames,
            "score": found.config.score,
            "success": found.suite.success,
            "frozen": "" if found.suite.frozen is None else found.suite.frozen.digest,
            "draw_path": found.suite.draw_path,
            "is_whole": found.is_whole,
            "left_out": found.left_out,
            "truth": {task: made.note for task, made in found.made.items() if made.note},
            "items_s": round(found.items_s, 1),
        },
        "judge": asdict(found.stamp),
        "figures": {
            "pairs": together.pairs,
            "scores": together.scores,
            "published": published_figures(items, answers),
            "cost": cost_figures(answers) | {"memory_bytes": peak, "gpu_bytes": _gpu_bytes()},
        },
        "tasks": {task: asdict(own) for task, own in graded.items()},
        "faults": [asdict(fault) for fault in _all_faults(together, graded)],
        "remedies": [asdict(way) for way in remedies(items, answers)],
        "rehearsals": {task: [each.row() for each in own] for task, own in found.rehearsals.items()},
        "teacher": {"all": pooled(tables)} | tables,
        "manifest": {task: {"digest": made.digest, "looks": made.looks} for task, made in found.made.items()},
    }


def _all_faults(together: Graded, by_task: Mapping[str, Graded]) -> list[Fault]:
    """Returns the faults over all tasks together, then faults of single tasks that the whole does not show."""
    found, names = list(together.faults), {fault.name for fault in together.faults}
    alone: dict[str, dict[str, Fault]] = {}
    for task, own in by_task.items():
        for fault in own.faults:
            alone.setdefault(fault.name, {})[task] = fault
    for shown in (shown for name, shown in alone.items() if name not in names):
        evidence = "; ".join(f"on {task} {fault.evidence}" for task, fault in shown.items())
        found.append(replace(next(iter(shown.values())), evidence=evidence, tasks=tuple(shown)))
    return found


def _gpu_bytes() -> int | None:
    """Returns the peak GPU memory of this process in bytes; None without a GPU."""
    torch = sys.modules.get("torch")  # a judge behind an API never imported it
    if torch is None or not torch.cuda.is_available():
        return None
    return int(torch.cuda.max_memory_allocated())
