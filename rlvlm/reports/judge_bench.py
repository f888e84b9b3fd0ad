"""`rlvlm judge-bench`: a row, a table on the terminal, and a page that shows the worst answers."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure

from rlvlm.core.console.signals import StopRequest
from rlvlm.core.console.tables import plain_console, plain_table
from rlvlm.core.disk import make_output_folder, write_json, write_whole
from rlvlm.core.errors import EXIT_DONE, EXIT_PREEMPTED, UsageError
from rlvlm.core.steps import Frames, spread
from rlvlm.demonstrations.trajectory import SuccessRule
from rlvlm.envs.registry import find_task, task_goal
from rlvlm.judge_bench.asking import Answer, Reference
from rlvlm.judge_bench.bench import measure, require_goals, summarise
from rlvlm.judge_bench.changes import changed
from rlvlm.judge_bench.figures import outcome_of
from rlvlm.judge_bench.items import CASES, Item, TaskItems
from rlvlm.judge_bench.prediction import CURVE_FILE, ExpectedSuccess, predict_row, read_curve
from rlvlm.judge_bench.rows import PAIR_NAMES, ROW_FILE, SCORE_NAMES, number_cell, read_row, share_cell
from rlvlm.judge_bench.suites import Suite, find_suite, for_person, is_recording
from rlvlm.judges.build import build_judge, check_goal_image, check_reachable
from rlvlm.judges.cache import CachedJudge
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.goal_image import read_goal_image, with_goal_image
from rlvlm.judges.judge import Judge
from rlvlm.labels.images import image_digest
from rlvlm.labels.store import LabelStore
from rlvlm.reports.bench_figures import ASKED_FOR, draw_bench
from rlvlm.runs.folder import find_folder
from rlvlm.runs.in_python import StepPolicy, load_policy
from rlvlm.runs.plots import to_svg
from rlvlm.runs.records import encode_png
from rlvlm.serving.config import PageConfig
from rlvlm.serving.label_page import person_judge
from rlvlm.templates import inline, render

TASK_HEADS = ("pairs right", "undecided", "order kept", "AUC of success", "VOC")
"""Columns of the tables with a line per task."""
GRADE_HEADS = ("task", "asked for", "for training", "worth", "expected success")
"""Columns of the table that says whether to train; the grade stands where a phone shows it."""
_TAKEN = {"assumed": "all are taken for successes", "none": "none is taken for a success"}
MAX_WORST = 8
"""Wrong answers shown of each kind."""
_CARD_PX = 160
_SHOWN = 4
"""Images of an episode on the page."""
_TOLERANCE = 3.0
"""Grey levels by which fields of two machines' images may differ: renderers round and smooth differently."""


def bench_judge(  # noqa: PLR0913 - the command's options
    suite: str,
    config: JudgeConfig,
    out: Path,
    *,
    reference: Literal["none", "oracle", "random", "left"] = "none",
    num_frames: int | None = None,
    num_pairs: int | None = None,
    num_episodes: int | None = None,
    seed: int = 0,
    curve: Path | None = None,
    success: SuccessRule | None = None,
    goal: str = "",
    goal_image: Path | None = None,
    player: Path | None = None,
) -> int:
    """Measures a judge, prints its figures, writes row, answers and page into `out`, and returns the exit code.

    Args:
        suite: name of a suite, or of tasks with commas between them.
        config: the judge; with a `store` its answers are kept there and looked up. A person is asked about forty
            questions unless `num_pairs` and `num_episodes` say more, on a page that this process serves; their answers
            are always kept, in `out`/answers without a `store`.
        out: folder.
        reference: answers in the judge's place, see `JudgeBenchArguments`; `none`: the judge itself.
        num_frames: images shown of an episode; None: what the judge was trained on.
        num_pairs: of each task; None: the suite's.
        num_episodes: played of each task, a third as many are shown of each case; None: the suite's.
        seed: of the items.
        success: what recorded episodes are taken for that do not say whether they succeeded; None: they are refused.
        curve: table of runs that the success of training is predicted from; None: the one that ships.
        goal: what the judge is asked about in place of the task's own goal phrase; empty: that one, or the player's.
        goal_image: file with an image of the goal, which the judge is shown with every question; None shows none.
        player: a trusted run's folder, or a checkpoint in it, whose policy plays in the script's place.

    Raises:
        UsageError: no such suite, nothing of it can be asked, or nothing can be written to `out`.
        JudgeUnavailable: the judge cannot be loaded, or answers nothing.
    """
    wanted = replace(_with_player(find_suite(suite), player, goal), success=success)
    if success and not any(map(is_recording, wanted.tasks)):
        raise UsageError("--success is for recorded data, and has no effect on tasks that are played", "leave it out")
    if reference == "none":  # a goal that cannot be asked about is found before anything is loaded or played
        for task in (task for task in wanted.tasks if not is_recording(task)):
            require_goals(task, [wanted.goal or task_goal(task)])
    image = _goal_image(wanted, config, goal_image, reference)
    make_output_folder(out)
    curve_runs = read_curve(curve or CURVE_FILE)
    if config.is_human and reference == "none":
        wanted = for_person(wanted)
    if num_pairs is not None:
        wanted = replace(wanted, pairs=num_pairs)
    if num_episodes is not None:
        wanted = replace(wanted, episodes=num_episodes, videos=num_episodes // 3)
    if reference == "none":
        check_reachable(config)  # before minutes are spent on playing episodes
    # the shipped judge was trained on single images
    frames = num_frames or (1 if config.knows_few_tasks and reference == "none" else 8)
    worst = WorstAnswers(frames)
    console = plain_console(soft_wrap=True)
    stop = StopRequest()
    with ExitStack() as stack:
        judge = _open_judge(stack, config, reference, image, out, stop)
        began = time.perf_counter()
        stack.enter_context(stop)
        stop.log = lambda line: console.print(line)
        found = measure(
            wanted,
            judge,
            config,
            num_frames=frames,
            seed=seed,
            log=lambda line: console.print(line),
            is_stopped=lambda: bool(stop),
            on_task=worst.add,
        )
    row = summarise(found)
    row["bench"]["goal_image"] = "" if image is None else image_digest(image[0])
    # tasks that were not asked about are left to reports of runs: an answer about drawers says little about blocks
    predictions = [prediction for prediction in predict_row(row, curve_runs) if prediction.is_asked]
    row["prediction"] = [asdict(prediction) for prediction in predictions]
    row["bench"]["wall_s"] = round(time.perf_counter() - began, 1)
    write_json(out / ROW_FILE, row)
    lines = [json.dumps(_plain(asdict(answer))) for answer in found.rows()[1]]
    write_whole(out / "answers.jsonl", "".join(f"{line}\n" for line in lines))
    pictures = draw_bench(row, predictions, curve_runs, *found.rows())
    write_whole(out / "bench.html", bench_page(row, worst, *pictures))
    print_row(row)
    console.print(f"\nrow, answers and page: {out / 'bench.html'}")
    return EXIT_PREEMPTED if stop else EXIT_DONE


def _open_judge(
    stack: ExitStack,
    config: JudgeConfig,
    reference: Literal["none", "oracle", "random", "left"],
    image: Frames | None,
    out: Path,
    stop: StopRequest,
) -> Judge | Reference:
    """The judge that is measured, ready while `stack` is open; errors as of `bench_judge`."""
    if reference != "none":
        return Reference(reference)
    store = LabelStore(Path(config.store).expanduser() if config.store else out / "answers")
    if config.is_human:  # each order by itself, so that the bench sees how often a person agrees with themselves
        person = person_judge(config, store, PageConfig(), lambda: bool(stop), _say, each_order=True)
        return with_goal_image(stack.enter_context(person), image)
    judge = build_judge(config)
    return with_goal_image(CachedJudge(judge, store) if config.store else judge, image)


def _say(line: str) -> None:
    plain_console(soft_wrap=True).print(line, markup=False, highlight=False)


def _goal_image(suite: Suite, config: JudgeConfig, file: Path | None, reference: str) -> Frames | None:
    """[1, H, W, 3] what the judge is shown beside every question; None where there is no file."""
    if file is None:
        return None
    if reference != "none" or len(suite.tasks) > 1:
        who = f"--reference {reference} sees no image" if reference != "none" else f"{suite.name} has several tasks"
        raise UsageError(f"--goal-image is shown to a judge of one task, and {who}", "leave it out, or name one task")
    check_goal_image(config.backend, config.model, config.score)
    return read_goal_image(file, config.image_px)


def _with_player(suite: Suite, player: Path | None, goal: str) -> Suite:
    """The suite with the goal that was given, played by the policy of the run at `player`."""
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
    policy = load_policy(player, trust=True)
    assert isinstance(policy, StepPolicy), "a run in steps has no other"
    return replace(suite, goal=goal or run.goal, player=policy.act)


def print_row(row: Mapping[str, Any]) -> None:
    """Prints a row: figures of all tasks, one line per task, and what is wrong."""
    console = plain_console(soft_wrap=True)
    console.print(f"\n{_name(row)} on {row['bench']['suite']}", style="bold")
    if not row["bench"]["is_whole"]:
        console.print("stopped before the end: the figures below cover the answers given until then")
    facts = [fact for table in cells(row).values() for fact in table.items() if fact[1] != "-"]
    console.print(plain_table(("", ""), facts, words=("",)))
    console.print(plain_table(("task", *TASK_HEADS), task_lines(row), words=("task",)))
    for fault in row["faults"]:
        console.print(f"fault: {fault['name']} ({fault['evidence']})", style="bold")
    if not row["faults"]:
        console.print("no known fault was found")
    for place, way in enumerate(row["remedies"]):
        # they come best first, and only the best is worth its settings
        advice = f" ({way['settings']})" if way["settings"] and not place else ""
        console.print(f"{way_of_asking(way)}{advice}")
    console.print("\nGood enough to train with?", style="bold")
    if row["prediction"]:
        console.print(plain_table(GRADE_HEADS, grade_lines(row), words=GRADE_HEADS))
    for line in grade_notes(row):
        console.print(line)


def grade_lines(row: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Cells under `GRADE_HEADS` of what was predicted, one line per task and kind of question."""
    found = []
    for expected in (ExpectedSuccess(**prediction) for prediction in row["prediction"]):
        success = "-"
        if expected.success is not None:
            interval = f"({expected.low:.2f} to {expected.high:.2f})"
            success = f"{expected.success:.2f} {interval}, from {expected.before:.2f}, {expected.count} runs"
        worth = f"{100 * expected.worth:.0f} % ({100 * expected.worth_low:.0f} to {100 * expected.worth_high:.0f})"
        found.append((expected.task, ASKED_FOR[expected.kind], expected.grade, worth, success))
    return found


def grade_notes(row: Mapping[str, Any]) -> list[str]:
    """What the columns of `grade_lines` mean, and what the grades of tasks without runs rest on."""
    rule = row["bench"].get("success")  # rows of older benches have none
    notes = [f"The data do not say which episodes succeeded: with --success {rule}, {_TAKEN[rule]}."] if rule else []
    if not row["prediction"]:
        return [*notes, "Nothing can be said: neither pairs nor successes beside failures were asked about."]
    notes += [
        "Worth, with its 90 % interval: how often a judge is right that always decides and says as much; 50 % is "
        "chance, below it misleads."
    ]
    if any(prediction["grade"] == "can be fooled" for prediction in row["prediction"]):
        notes.append("Can be fooled: it pays for what a policy can do without reaching the goal, see its faults.")
    for fault in (fault for fault in row["faults"] if fault.get("is_limiting")):  # rows of older benches have none
        where = f" on {', '.join(fault['tasks'])}" if fault["tasks"] else ""
        notes.append(
            f"Uncertain at best{where}: it {fault['name']}, and no run is known with a judge that errs like this."
        )
    for kind, name in ASKED_FOR.items():
        grades = ("probably good enough", "uncertain", "probably too weak")  # the others do not rest on other tasks
        unproven = [
            prediction
            for prediction in row["prediction"]
            if prediction["kind"] == kind and prediction["success"] is None
        ]
        unproven = [prediction for prediction in unproven if prediction["grade"] in grades]
        if not unproven:
            continue
        never, always = unproven[0]["never"], unproven[0]["always"]
        limits = [] if never is None else [f"none learned up to a worth of {100 * never:.0f} %"]
        limits += [] if always is None else [f"all learned from {100 * always:.0f} % on"]
        of_all = f"of all runs known {', '.join(limits)}" if limits else "nor of another task"
        what = f"{name.capitalize()} without an expected success"
        notes.append(f"{what}: no training runs of the task are known with such a judge; {of_all}.")
    return notes


def way_of_asking(way: Mapping[str, Any]) -> str:
    """What a label costs and says where pairs are asked in one way (`judge_bench.remedies`)."""
    says = (
        f"labels worth those of a judge that is right in {100 * way['worth']:.0f} %, {way['undecided']:.0%} undecided"
    )
    if way["calls"] is None:
        return f"asking {way['name']}: {says}: no number of questions teaches"
    return f"asking {way['name']}: {says}: {way['calls']:.1f} questions say as much as a label that is certain"


def _name(row: Mapping[str, Any]) -> str:
    judge = row["judge"]
    return " ".join(filter(None, (judge["judge"], judge["prompt"])))


def cells(row: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """A row's figures as text by what they are, table by table; `-` where nothing was asked."""
    pairs, scores, cost = (row["figures"][name] for name in ("pairs", "scores", "cost"))
    # [10, 3] right, wrong and the rest of the pairs whose gap lies in each tenth, the hardest first
    bins = np.array(pairs.get("by_difficulty", np.zeros((10, 3))))
    hard, easy = bins[:3].sum(0), bins[7:].sum(0)
    false = scores.get("false_positives", {})
    compared = {
        PAIR_NAMES["accuracy"]: share_cell(pairs.get("accuracy")),
        "  the hardest, gaps below 0.3": _plain_share(hard[0], hard[0] + hard[1]),
        "  the easiest, from 0.7 on": _plain_share(easy[0], easy[0] + easy[1]),
        PAIR_NAMES["undecided"]: share_cell(pairs.get("undecided")),
        PAIR_NAMES["unread"]: share_cell(pairs.get("unread")),
        PAIR_NAMES["said_left"]: share_cell(pairs.get("said_left")),
        PAIR_NAMES["consistent"]: share_cell(pairs.get("consistent")),
        "chooses between equal images": share_cell(pairs.get("same_image")),
        "same label for another task": share_cell(pairs.get("other_task")),
        **{f"same label: {case}": share_cell(value) for case, value in pairs.get("steady", {}).items()},
        PAIR_NAMES["ece"]: number_cell(pairs.get("ece")),
    }
    scored = {
        SCORE_NAMES["auc"]: number_cell(scores.get("auc")),
        "AUC against hacked episodes": number_cell(scores.get("hacked_auc")),
        "best threshold": number_cell(scores.get("threshold")),
        SCORE_NAMES["ece"]: number_cell(scores.get("ece")),
        "unread scores": share_cell(scores.get("unread")),
        **{f"called success: {case}": share_cell(value) for case, value in false.items()},
        **{f"still a success: {case}": share_cell(value) for case, value in scores.get("kept", {}).items()},
        **{f"same verdict: {case}": share_cell(value) for case, value in scores.get("steady", {}).items()},
        "VOC, order along an episode": number_cell(scores.get("voc")),
        "rank correlation with progress": number_cell(scores.get("progress")),
    }
    spent = {
        "answers per second": number_cell(cost["answers_per_s"], 3),
        "tokens per answer": number_cell(cost["tokens"], 0),
        "USD per 1,000 answers": number_cell(cost["usd_per_1000"]),
        "memory": f"{cost['memory_bytes'] / 2**30:.1f} GiB",
        "memory of the GPU": "-" if not cost["gpu_bytes"] else f"{cost['gpu_bytes'] / 2**30:.1f} GiB",
    }
    return {"comparisons": compared, "scores": scored, "cost": spent}


def task_lines(row: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One line of cells per task."""
    return [
        (
            task,
            share_cell(figures["pairs"].get("accuracy")),
            share_cell(figures["pairs"].get("undecided")),
            share_cell(figures["pairs"].get("consistent")),
            number_cell(figures["scores"].get("auc")),
            number_cell(figures["scores"].get("voc")),
        )
        for task, figures in row["tasks"].items()
    ]


def _plain_share(hits: float, count: float) -> str:
    return f"{100 * hits / count:.1f} %" if count else "-"


def _plain(value: Any) -> Any:
    """Without the numbers that JSON does not know."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class WorstAnswers:
    """Collects the worst answers with their images, task by task, since an env is only there while it is asked about.

    Args:
        num_frames: most images of an episode that the judge was shown.
    """

    def __init__(self, num_frames: int) -> None:
        self._num_frames = num_frames
        self._pairs: list[tuple[float, dict[str, Any]]] = []
        self._scores: list[tuple[float, dict[str, Any]]] = []

    def add(self, made: TaskItems, answers: Sequence[Answer]) -> None:
        """Looks at the answers to a task."""
        judged = [(made.items[answer.item], answer) for answer in answers]
        # of wrong labels the widest gaps, of each pair one order
        wrong = {
            answer.item: (item, answer)
            for item, answer in judged
            if item.case == "pair" and outcome_of(item, answer) == "wrong"
        }
        widest = sorted(wrong.values(), key=lambda pair: -abs(pair[0].gap))[:MAX_WORST]
        # drawn now, a few more than are shown in the end: the task's env is closed when the next one begins
        self._pairs += [(abs(item.gap), _pair_card(made, item, answer)) for item, answer in widest]
        # of scores of episodes, turns and controls those that are farthest from the truth, 0 or 1
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
        (frames,) = changed(item, [made.draw(shown, item.camera)])
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
    """The page's HTML: the figures and faults of `summarise`, the images of `draw_bench` by what they show, and the
    worst answers with theirs.
    """
    bins = row["figures"]["pairs"].get("by_difficulty", [])
    difficulty = [
        (f"{place / 10:.1f} to {(place + 1) / 10:.1f}", _plain_share(right, right + wrong), right, wrong, rest)
        for place, (right, wrong, rest) in enumerate(bins)
    ]
    means = row["figures"]["scores"].get("means", {})
    return render(
        "judge_bench.html.j2",
        title=f"{_name(row)} on {row['bench']['suite']}",
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
        worst_pairs=worst.pairs,
        worst_scores=worst.scores,
    )


def _pair_card(made: TaskItems, item: Item, answer: Answer) -> dict[str, Any]:
    order = (1, 0) if answer.swapped else (0, 1)
    sides = []
    for name, place in zip(("left", "right"), order, strict=True):
        (image,) = _small(made.draw(item.sides[place][-1:], ""))
        sides.append({"name": name, "picture": image, "truth": item.truth[place], "is_said": answer.label == name})
    sure = "" if answer.p is None else f", {100 * max(answer.p[:2]):.0f} % sure"
    return {
        "title": f"{answer.task}: {item.goal}",
        "said": f"said {answer.label}{sure}",
        "sides": sides,
        "text": answer.text,
    }


def _small(frames: Frames) -> list[str]:
    """Encoded images of at most `_CARD_PX` or a little more."""
    step = max(1, max(frames.shape[1:3]) // _CARD_PX)
    return [f"data:image/png;base64,{encode_png(np.ascontiguousarray(frame[::step, ::step]))}" for frame in frames]


def compare_benches(paths: Sequence[Path]) -> int:
    """Prints the rows of several judges side by side, and returns the exit code.

    Figures of all tasks together only where all judges were asked about the same tasks; then those of each task that
    they have in common. `paths` are rows, or folders with one.

    Raises:
        UsageError: a file is no row, or two rows are about other items.
    """
    rows = list(map(_printable, paths))
    if len(rows) < 2:
        raise UsageError("name at least two rows", "rlvlm judge-bench compare A/bench.json B/bench.json")
    console = plain_console(soft_wrap=True)
    for path, row in zip(paths[1:], rows[1:], strict=True):
        for line in differences(rows[0], row):
            console.print(f"{path} against {paths[0]}: {line}")
    # a figure of all tasks together says nothing where one judge was asked about easier ones
    common = [task for task in rows[0]["tasks"] if all(task in row["tasks"] for row in rows)]
    if all(row["tasks"].keys() == rows[0]["tasks"].keys() for row in rows):
        tables = [{name: cell for table in cells(row).values() for name, cell in table.items()} for row in rows]
        names = dict.fromkeys(name for table in tables for name in table)
        heads = ("", *(f"{_name(row)[:40]} [{number}]" for number, row in enumerate(rows, start=1)))
        lines = [(name, *(table.get(name, "-") for table in tables)) for name in names]
        console.print(plain_table(heads, [line for line in lines if set(line[1:]) != {"-"}], words=("",)))
    elif not common:
        console.print("they have no task in common")
    by_task = [{task: figures for task, *figures in task_lines(row)} for row in rows]
    lines = [(task, f"[{number}]", *of[task]) for task in common for number, of in enumerate(by_task, start=1)]
    if lines:
        console.print(plain_table(("task", "judge", *TASK_HEADS), lines, words=("task", "judge")))
    for number, row in enumerate(rows, start=1):
        said = "; ".join(fault["name"] for fault in row["faults"]) or "no fault found"
        console.print(f"[{number}] {_name(row)}, {row['bench']['suite']}: {said}")
    return EXIT_DONE


def _printable(path: Path) -> Mapping[str, Any]:
    """The row in a file or folder.

    Raises:
        UsageError: it cannot be read, or lacks what is printed.
    """
    row = read_row(path)
    try:
        shown = cells(row), task_lines(row), _name(row), differences(row, row), f"{row['bench']['suite']}"
        assert shown and all(isinstance(fault["name"], str) for fault in row["faults"])
    except (AssertionError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise UsageError(
            f"{path} is not a row of judge-bench: {error!r}", "make one with `rlvlm judge-bench`"
        ) from error
    return row


def differences(row: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Why two rows are not about the same items, in words; empty where they are, images equal within a tolerance."""
    found = []
    ours, theirs = row["manifest"], other["manifest"]
    if ours.keys() != theirs.keys():
        found.append(f"other tasks ({', '.join(sorted(ours.keys() ^ theirs.keys()))})")
    changed = [task for task in ours if task in theirs and ours[task]["digest"] != theirs[task]["digest"]]
    if changed:
        found.append(f"other items of {', '.join(changed)}: another number, form of score, seed, version or machine")
    for task in ours:
        if task in theirs and task not in changed:
            # items agree to the bit; images only about so, as each machine draws them anew
            looks = np.array(ours[task]["looks"], float), np.array(theirs[task]["looks"], float)
            if looks[0].shape != looks[1].shape or (looks[0].size and np.abs(looks[0] - looks[1]).max() > _TOLERANCE):
                found.append(f"other images of {task}: another size, look or renderer")
    for name in ("frames", "score"):
        if row["bench"][name] != other["bench"][name]:
            found.append(f"{name} {other['bench'][name]} and not {row['bench'][name]}")
    return found
