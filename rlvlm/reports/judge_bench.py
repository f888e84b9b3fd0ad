"""`rlvlm judge-bench`: opens the judge, measures it, and writes row, answers and page."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from rlvlm.core.console.signals import StopRequest
from rlvlm.core.console.tables import plain_console
from rlvlm.core.disk import make_output_folder, write_json, write_whole
from rlvlm.core.errors import EXIT_DONE, EXIT_PREEMPTED, UsageError
from rlvlm.core.guests import guests, load
from rlvlm.core.judging import Clip
from rlvlm.core.steps import Frames
from rlvlm.envs.registry import find_task, make_env, task_env, task_goal
from rlvlm.judge_bench.archive import SUFFIX, Archive
from rlvlm.judge_bench.asking import Reference
from rlvlm.judge_bench.attempts import ATTEMPTS_ASKED, LINE_ASKED
from rlvlm.judge_bench.bench import Measured, freeze, make_task, measure, require_goals, summarise
from rlvlm.judge_bench.hacked import SUFFIX as HACKED_SUFFIX
from rlvlm.judge_bench.hacked import shipped_suites, write_suite
from rlvlm.judge_bench.prediction import CURVE_FILE, predict_row, read_curve
from rlvlm.judge_bench.price import price_of
from rlvlm.judge_bench.rows import ROW_FILE
from rlvlm.judge_bench.suites import Suite, find_suite, for_person, is_recording
from rlvlm.judge_bench.table import answer_rows
from rlvlm.judges.build import PERSON, build_judge, check_goal_image, check_reachable, open_person
from rlvlm.judges.cache import CachedJudge, without_memory
from rlvlm.judges.config import JudgeConfig, backends
from rlvlm.judges.goal_image import read_goal_image, with_goal_image
from rlvlm.judges.judge import Judge
from rlvlm.labels.export import SCHEMA, write_parquet
from rlvlm.labels.images import MAX_PIXELS, image_digest
from rlvlm.labels.store import LabelStore
from rlvlm.pages.answers import ANSWERS_FILE
from rlvlm.pages.bench import WorstAnswers, bench_sections, judge_name
from rlvlm.pages.page import page, print_sections
from rlvlm.reports.options import BenchOptions, FreezeOptions, pin_judge
from rlvlm.reports.prices import print_prices
from rlvlm.runs.files.folder import find_folder

_DONE = 0.75
"""Score by a person, a rating of 4 of 5, from which on an episode counts as done."""


def bench_judge(options: BenchOptions) -> int:
    """Measures a judge, prints its figures, writes row, answers and page into `options.out`, and returns the exit code.

    A judge's answers are kept in its `store`, or else in `out`/answers, and looked up, so that the same command goes on
    where it was killed; those of the user's own function only in a `store`, since its code may change. A person is
    asked about forty questions, unless the options set more, on a page that this process serves. A player's folder must
    be trusted.

    Raises:
        UsageError: there is no such suite, nothing of it can be asked, or `out` cannot be written.
        JudgeUnavailable: the judge cannot be loaded, or does not answer.
    """
    config, out, reference = options.judge, options.out, options.reference
    wanted = _with_player(find_suite(options.suite), options.player, options.goal)
    wanted = replace(wanted, success=options.success, draw_path=options.draw_path)
    if options.draw_path:
        _check_paths(wanted, reference)
    if options.success and not any(map(is_recording, wanted.tasks)):
        raise UsageError("--success is for recorded data, and has no effect on tasks that are played", "leave it out")
    if wanted.frozen is not None:
        _check_frozen(wanted.frozen, options)
    # a goal that cannot be asked about is reported before anything is loaded or played
    elif reference == "none":
        for task in (task for task in wanted.tasks if not is_recording(task)):
            require_goals(task, [wanted.goal or task_goal(task)])
    image = _goal_image(wanted, options)
    _check_packages(wanted)
    if reference == "none":
        check_reachable(config)  # before minutes are spent on playing episodes
        config = pin_judge(options, _say).judge
        options = replace(options, judge=config)
    make_output_folder(out)
    curve_runs = read_curve(options.curve or CURVE_FILE)
    if config.is_human and reference == "none" and wanted.frozen is None:
        wanted = for_person(wanted)
    wanted = _sized(wanted, options)
    # the shipped judge was trained on single images
    frames = options.frames or (1 if config.knows_few_tasks and reference == "none" else 8)
    frames = frames if wanted.frozen is None else min(frames, wanted.frozen.frames)
    worst = WorstAnswers(frames)
    console = plain_console(soft_wrap=True)
    stop = StopRequest()
    with ExitStack() as stack:
        judge = _open_judge(stack, options, image, stop)
        if options.dry_run:
            return _print_price(wanted, judge, options, frames)
        began = time.perf_counter()
        stack.enter_context(stop)
        stop.log = lambda line: console.print(line)
        found = measure(
            wanted,
            judge,
            config,
            num_frames=frames,
            seed=options.seed,
            log=lambda line: console.print(line),
            is_stopped=lambda: bool(stop),
            on_task=worst.add,
        )
    _ask_people(found, out, console.print)
    row = summarise(found)
    row["bench"]["goal_image"] = "" if image is None else image_digest(image[0])
    # other tasks are left to reports of runs: an answer about drawers says little about blocks
    predictions = [prediction for prediction in predict_row(row, curve_runs) if prediction.is_asked]
    row["prediction"] = [asdict(prediction) for prediction in predictions]
    row["bench"]["wall_s"] = round(time.perf_counter() - began, 1)
    write_json(out / ROW_FILE, row)
    write_parquet(out / ANSWERS_FILE, SCHEMA, answer_rows(*found.rows(), found.stamp, wanted.name))
    for write in (guest.bench_files for guest in guests().values() if guest.bench_files):
        load(write)(found, options.name, out)
    _write_failures(found, out)
    title, sections = f"{judge_name(row)} on {row['bench']['suite']}", bench_sections(row, found, curve_runs, worst)
    write_whole(out / "bench.html", page(title, sections))
    console.print(f"\n{title}", style="bold")
    print_sections(sections)
    console.print(f"\nrow, answers and page: {out / 'bench.html'}")
    return EXIT_PREEMPTED if stop else EXIT_DONE


def bench_published(options: BenchOptions) -> int:
    """Measures a judge on `tiny`, frozen into `out`/tiny.zip, for which its folder gets an entry for a table of judges,
    and on the hacked suites that ship, each in a folder of `out`. Returns the exit code; raises as `bench_judge` does.
    """
    if options.reference == "none":
        check_reachable(options.judge)
    make_output_folder(options.out)
    frozen = options.out / f"tiny{SUFFIX}"
    if not frozen.exists():
        freeze_bench(FreezeOptions(suite="tiny", out=frozen))
    for suite in (str(frozen), *(f"hacked_{name}" for name in shipped_suites())):
        folder, name = options.out / Path(suite).stem, options.name or options.preset
        if code := bench_judge(replace(options, suite=suite, out=folder, name=name)):
            return code
    return EXIT_DONE


def _print_price(suite: Suite, judge: Judge | Reference, options: BenchOptions, frames: int) -> int:
    """Prints what the bench would take, and returns the exit code."""
    config = options.judge
    tasks = (
        make_task(
            suite,
            task,
            size_px=config.image_px,
            seed=options.seed,
            asks_turns=config.score == "utility",
            is_pocket=config.ships_weights,
        )
        for task in suite.tasks
    )
    # kept answers take no time, and these are to say what the others will
    judge = judge if isinstance(judge, Reference) else without_memory(judge)
    print_prices(price_of(judge, tasks, frames, suite.rehearse, options.seed))
    return EXIT_DONE


def _ask_people(found: Measured, out: Path, log: Callable[[str], None]) -> None:
    """Lets people say which of the ends that a judge likes best are done, where a rehearsal met no success: posts the
    questions in a label store of `out`, and grades by the answers once all are there.
    """
    for task, rehearsals in found.rehearsals.items() if PERSON in backends() else ():
        for index, each in enumerate(rehearsals):
            if each.verdict != "no success was met" or not each.failures:
                continue
            store = out / "people" / f"{task.replace('/', '-').replace(':', '-')}-{each.kind}"
            people = open_person(JudgeConfig(), store)
            clips = [Clip(goal=episode.goal, frames=frames) for episode, frames in each.failures]
            people.ask(clips)
            said = people.said(clips)
            if None in said:
                log(
                    f"{task}: no success is known, so people say which of the {len(said)} ends that the judge likes "
                    f"best are done ({said.count(None)} wait): rlvlm labels ask {store}; then this command again"
                )
            elif done := [score.value >= _DONE for score in said if score and score.value is not None]:
                rehearsals[index] = each.as_said(done)


def _write_failures(found: Measured, out: Path) -> None:
    """Writes the failures that a judge liked best in the rehearsals of each task, as suites for other judges."""
    for task, rehearsals in found.rehearsals.items():
        if episodes := [episode for each in rehearsals if each.draws_past for episode, _ in each.failures]:
            write_suite(out / f"{task.replace('/', '-')}{HACKED_SUFFIX}", task, episodes)


def _check_frozen(archive: Archive, options: BenchOptions) -> None:
    """Raises UsageError if the frozen suite does not fit the options."""
    if options.goal or any(change is not None for change in (options.pairs, options.episodes, options.player)):
        what = "--pairs, --episodes, --goal and --player make new items, and a frozen suite has its own"
        raise UsageError(what, "leave them out, or freeze another suite with them")
    if options.frames is not None and options.frames > archive.frames:
        what = f"--frames {options.frames}, and {archive.path} holds at most {archive.frames} images of an episode"
        raise UsageError(what, "leave it out, or freeze the suite with more")
    if options.reference == "none" and archive.turns != (options.judge.score == "utility"):
        held = "single turns, which --judge.score utility scores" if archive.turns else "episodes and no single turns"
        raise UsageError(f"{archive.path} holds {held}", "another --judge.score, or freeze with or without --turns")


def _check_packages(suite: Suite) -> None:
    """Imports the envs of the tasks that are played: what this install lacks is reported before anything is asked."""
    for task in suite.tasks:
        if suite.frozen is None and not suite.is_table and not is_recording(task):
            find_task(task).load_maker()


def freeze_bench(options: FreezeOptions) -> int:
    """Freezes a suite into one file, prints its hash, and returns the exit code.

    Raises:
        UsageError: there is no such suite, nothing of it can be asked, or `out` cannot be written.
    """
    out = options.out
    if out.suffix != SUFFIX:
        raise UsageError(f"a frozen suite is a file whose name ends in {SUFFIX}, got {out}", f"--out {out}{SUFFIX}")
    wanted = _sized(_with_player(find_suite(options.suite), None, options.goal), options)
    wanted = replace(wanted, success=options.success)
    if wanted.frozen is not None and not options.questions_only:
        raise UsageError(
            f"{options.suite} is frozen already", "name a suite, or write its questions with --questions-only"
        )
    _check_packages(wanted)
    make_output_folder(out.parent)
    archive = freeze(
        wanted,
        out,
        num_frames=options.frames if wanted.frozen is None else wanted.frozen.frames,
        size_px=options.image_px if wanted.frozen is None else MAX_PIXELS,
        asks_turns=options.turns if wanted.frozen is None else wanted.frozen.turns,
        seed=options.seed,
        has_pixels=not options.questions_only,
        log=_say,
    )
    _say(f"{archive.suite}: SHA-256 {archive.digest}\n{out}: {out.stat().st_size / 1e6:.1f} MB")
    return EXIT_DONE


def _sized(suite: Suite, options: BenchOptions | FreezeOptions) -> Suite:
    """Returns the suite with the wanted numbers of pairs and of played episodes per task; None keeps its own."""
    if options.pairs is not None:
        suite = replace(suite, pairs=options.pairs)
    if options.episodes is not None:
        suite = replace(suite, episodes=options.episodes, videos=options.episodes // 3)
    if isinstance(options, BenchOptions) and options.rehearse:
        suite = replace(suite, attempts=ATTEMPTS_ASKED, line=LINE_ASKED, rehearse=options.rehearse)
    return suite


def _open_judge(stack: ExitStack, options: BenchOptions, image: Frames | None, stop: StopRequest) -> Judge | Reference:
    """Returns the judge to measure, ready while `stack` is open; raises as `bench_judge` does."""
    if options.reference != "none":
        return Reference(options.reference)
    config = options.judge
    store = LabelStore(Path(config.store).expanduser() if config.store else options.out / "answers")
    if config.is_human:  # each order separately, so that the bench measures how consistent a person is
        person = load(config.declared.session)(config, store, lambda: bool(stop), _say, each_order=True)
        return with_goal_image(stack.enter_context(person), image)
    judge = build_judge(config)
    return with_goal_image(CachedJudge(judge, store) if config.store or not config.is_own else judge, image)


def _say(line: str) -> None:
    plain_console(soft_wrap=True).print(line)


def _goal_image(suite: Suite, options: BenchOptions) -> Frames | None:
    """Returns the [1, H, W, 3] image shown with every question; None if there is no file."""
    config, reference = options.judge, options.reference
    if options.goal_image is None:
        return None
    if reference != "none" or len(suite.tasks) > 1:
        who = f"--reference {reference} sees no image" if reference != "none" else f"{suite.name} has several tasks"
        raise UsageError(f"--goal-image is shown to a judge of one task, and {who}", "leave it out, or name one task")
    check_goal_image(config.backend, config.model, config.score)
    return read_goal_image(options.goal_image, config.image_px)


def _check_paths(suite: Suite, reference: str) -> None:
    """Raises UsageError unless a suite's images can all be drawn with the hand's path, for a judge that sees them."""
    if reference != "none":
        raise UsageError(f"--draw-path is for a judge, and --reference {reference} sees no image", "leave it out")
    for task in suite.tasks:
        if suite.frozen or suite.is_table or is_recording(task):
            what = f"--draw-path: {task} is recorded, and its images do not say where the hand is"
            raise UsageError(what, "leave it out; it is for tasks that are played")
        try:
            make_env(task, replace(task_env(task), draw_path=True), 0).close()
        except ValueError as error:
            raise UsageError(f"--draw-path: {task}: {error}", "leave it out, or name other tasks") from error


def _with_player(suite: Suite, player: Path | None, goal: str) -> Suite:
    """Returns the suite with the given goal, played by the policy of the run at `player`."""
    if goal and len(suite.tasks) > 1:
        raise UsageError(f"--goal is of one task, and {suite.name} has {len(suite.tasks)}", "name one task")
    if player is None:
        return replace(suite, goal=goal)
    run = find_folder(player).config()
    if suite.tasks != (run.task,) or find_task(run.task).kind != "steps":
        what = f"--player {player} plays {run.task}, and the bench is of {suite.name}"
        if find_task(run.task).kind != "steps":
            what = f"--player takes runs of envs in steps, and {run.task} has another kind, with a script of its own"
        raise UsageError(what, f"rlvlm judge-bench {run.task} --player {player}, or leave --player out")
    from rlvlm.runs.in_python import StepPolicy, load_policy  # torch, which a judge behind an API does not need

    policy = load_policy(player)
    assert isinstance(policy, StepPolicy), "a run in steps has no other"
    return replace(
        suite, goal=goal or run.goal, player=policy.act, start=lambda *_: lambda observation, _: policy.act(observation)
    )
