"""`rlvlm score`: labels recorded episodes with a judge, and writes tables beside the data and a page."""

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from PIL import Image
from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table

from rlvlm.core.console.arguments import print_progress
from rlvlm.core.console.screen import Screen, clock
from rlvlm.core.console.signals import StopRequest
from rlvlm.core.console.tables import plain_console
from rlvlm.core.disk import make_output_folder, write_json, write_whole
from rlvlm.core.errors import EXIT_DONE, EXIT_PREEMPTED, JudgeUnavailable, UsageError
from rlvlm.core.foreign import read_json
from rlvlm.core.guests import load
from rlvlm.core.install import check_train
from rlvlm.core.judging import Stamp
from rlvlm.core.steps import Frames
from rlvlm.demonstrations.recorded_labels import read_labels, write_frame_signals, write_labels, write_lerobot_progress
from rlvlm.demonstrations.recordings import Recordings, find_form, recordings_digest
from rlvlm.demonstrations.trajectory import CorruptEpisode, RobotTrajectory
from rlvlm.judge_bench.asking import Answer
from rlvlm.judge_bench.faults import Fault
from rlvlm.judge_bench.preflight import known_recordings, measure_known, refuse_faulty
from rlvlm.judge_bench.price import Price
from rlvlm.judge_bench.scoring import Asked, ScoredEpisode, score_episodes
from rlvlm.judge_bench.suites import Suite
from rlvlm.judges.build import build_judge, check_reachable
from rlvlm.judges.cache import CachedJudge
from rlvlm.judges.judge import Judge
from rlvlm.labels.export import SCHEMA
from rlvlm.labels.store import LabelStore
from rlvlm.pages.page import page, print_sections
from rlvlm.pages.score import DataSummary, ScoredData
from rlvlm.reports.contact_sheet import folder_env
from rlvlm.reports.options import ScoreOptions, pin_judge
from rlvlm.reports.prices import print_prices
from rlvlm.runs.start.preflight import cluster_address
from rlvlm.serving.config import PlacementConfig
from rlvlm.templates import inline

LABELS_FILE, PAIRS_FILE, LEROBOT_FILE = "labels.parquet", "pairs.parquet", "rlvlm_progress.parquet"
SIGNALS_FILE = "frame_signals.parquet"
PAGE_FILE, ROW_FILE = "score.html", "score.json"
_CONTROLS = 8
_ASSUMED = ", as if all episodes were successes, which the data do not say"
_LINE_EVERY_S = 30.0


def score_data(options: ScoreOptions, open_people: Callable[..., AbstractContextManager[Judge]] | None = None) -> int:
    """Labels recorded episodes, writes tables and page into `options.out`, and returns the exit code.

    Answers are kept in `out`/answers as they come, unless the judge's `store` names another: a second call asks only
    the missing ones. People are asked through `open_people`, a
    `JudgeBackend.session`, by default their backend's, and never any known item first.

    Raises:
        UsageError: none of the data can be read, or `out` cannot be written or holds another judge's labels.
        JudgeUnavailable: the judge cannot be loaded or does not answer, or its budget is spent; earlier answers are
            kept and written.
        JudgeRefused: the preflight finds that its answers mean nothing.
    """
    config, path = options.judge, options.data.absolute()
    # people's answers lie beside a judge's, not over them
    out = options.out or path.with_name(f"{path.name}.{'people' if config.is_human else 'labels'}")

    def make_draw(folder: Any) -> Any:
        env = folder_env(folder, trust=options.trust)
        size = config.image_px if folder.has_chunks else None  # turns are drawn as their policies see them
        return lambda snapshots, camera: env.draw_sized(snapshots, size, camera)

    form = find_form(path)
    if options.form and (form != "lerobot" or "progress" not in options.ask):
        raise UsageError(
            f"--form {options.form} is for progress of a LeRobot data set's frames; {path} is of form {form}",
            "leave it out, or ask for progress of a LeRobot data set",
        )
    recordings = Recordings(path=path, form=form, camera=options.camera, goal=options.goal, make_draw=make_draw)
    asked = Asked(
        questions=frozenset(options.ask),
        every=options.every,
        grows=options.clips == "growing",
        pairs=options.pairs,
        # the shipped judge was trained on single images
        num_frames=options.frames or (1 if config.knows_few_tasks else 8),
        size_px=config.image_px,
        success=options.success,
        seed=options.seed,
    )
    if recordings.path.is_dir() and out.resolve().is_relative_to(recordings.path.resolve()):
        raise UsageError(f"{out} lies inside of the data, which are not written to", "name another folder with --out")
    if options.value:
        check_train("--value, a network,")
    if options.app:
        check_train("--app, a Serve app,")
    else:
        check_reachable(config)  # before anything is written
        options = pin_judge(options, print_progress)
    make_output_folder(out)
    console = plain_console(soft_wrap=True)
    data = _look_through(recordings, asked)
    other = None if options.against is None else read_labels(options.against, data.digest)
    stop = StopRequest()
    store = LabelStore(Path(config.store).expanduser() if config.store else out / "answers")
    with ExitStack() as stack:
        judge = _open_judge(stack, options, store, out, open_people, stop)
        if options.dry_run:
            print_prices(price_of_data(judge, data, asked))
            return EXIT_DONE
        _check_judge_of(out, judge.stamp)
        kept = CachedJudge(judge, store)
        faults: Sequence[Fault] = ()
        if options.preflight and not config.is_human:
            faults = _preflight(kept, data, recordings, asked, options)
        with (
            stop,
            _ScoreScreen(sys.stderr, f"{kept.stamp.judge} on {recordings.path}", data) as screen,
        ):
            stop.log = screen.line
            scored = _scored(kept, recordings, asked, data.num_episodes, options.readers, screen)
            episodes, strips, error = _score_all(scored, screen, stop)
            screen.finish()
    wall_s = screen.wall_s
    episodes.sort(key=lambda episode: episode.number)
    told: dict[str, str] = {}
    if options.value:
        from rlvlm.reports.score_value import learn_values  # torch, which labels do not need

        episodes, told = learn_values(episodes, recordings, options.seed)
    is_whole = error is None and len(episodes) == data.num_episodes
    found = ScoredData(recordings.path.name, data, asked, kept.stamp, tuple(episodes), strips, is_whole, other, faults)
    row = found.row() | {"asked": kept.misses, "from_store": kept.hits, "wall_s": round(wall_s, 1)}
    row["summary"] |= told
    _write_tables(out, found, is_lerobot=recordings.form == "lerobot", with_signals=bool(options.form))
    write_json(out / ROW_FILE, row)
    sections = found.sections(row)
    write_whole(out / PAGE_FILE, page(f"{kept.stamp.judge} on {found.name}", sections))
    print_sections(sections)
    rate = row["frames"] / wall_s * 60 if wall_s else 0.0
    console.print(
        f"\n{kept.misses:,} questions asked, {kept.hits:,} answered from {store.folder}; {rate:,.0f} frames a minute"
    )
    console.print(f"labels and page: {out / PAGE_FILE}")
    if error is not None and not stop:
        fix = (
            "the same command asks what is missing; a larger budget: --judge.api.max-cost-usd, --judge.api.max-requests"
        )
        raise JudgeUnavailable(f"{error}; what was answered before is kept", fix) from error
    return EXIT_PREEMPTED if stop else EXIT_DONE


def price_of_data(judge: Judge, data: DataSummary, asked: Asked) -> list[Price]:
    """Returns the price of each kind of question about all episodes, as far as the judge answers that kind.

    It is asked about the first and the last frame of the first episode that can be shown, which is a price too.

    Raises:
        JudgeUnavailable: the judge does not answer.
    """
    few = replace(asked, every=sys.maxsize, pairs=1)
    shown = next((each for each in score_episodes(judge, data.sample, few) if each.rows), None)
    answers: dict[str, list[Answer]] = {}
    for _, item, answer in () if shown is None else shown.rows:
        kind = {"pair": "pairs", "image": "progress", "video": "success"}[item.kind]
        answers.setdefault(kind, []).append(answer)
    # of episodes of the mean length; a clip that grows has one image more at each question
    grown = [min(length, asked.num_frames) for length in range(1, round(data.num_frames / data.num_episodes) + 1)]
    # in both orders, of one episode and of the ends of two in a row
    num_pairs = 2 * (data.num_episodes * asked.pairs + data.num_episodes - 1)
    counts = {
        "progress": (data.num_frames, data.num_episodes * sum(grown) if asked.grows else data.num_frames),
        "success": (data.num_episodes, data.num_episodes * grown[-1]),
        "pairs": (num_pairs, 2 * num_pairs),
    }
    found = []
    for kind, given in answers.items():
        (questions, most), costs = counts[kind], [answer.cost_usd for answer in given]
        found.append(
            Price(
                what=kind,
                questions=questions,
                images=most,
                seconds=questions * float(np.mean([answer.latency_s for answer in given])),
                usd=questions * float(np.mean(costs)),
            )
        )
    return found


def _write_tables(out: Path, found: ScoredData, *, is_lerobot: bool, with_signals: bool) -> None:
    """Writes the tables of what was asked; those of what was asked before, and not this time, stay as they are."""
    digest, questions = found.data.digest, found.asked.questions
    if questions != {"pairs"} or not (out / LABELS_FILE).exists():  # of pairs alone it has what cannot be shown
        write_labels(out / LABELS_FILE, digest, found.labels())
    if "pairs" in questions:
        write_labels(out / PAIRS_FILE, digest, found.pairs(), SCHEMA)
    if is_lerobot and "progress" in questions:
        write_lerobot_progress(out / LEROBOT_FILE, found.lerobot_progress(), digest, found.stamp.judge)
        if with_signals:
            provenance = {"tool": "rlvlm", "dataset": digest, **asdict(found.stamp)}
            write_frame_signals(out / SIGNALS_FILE, list(found.lerobot_progress()), provenance)


def _check_judge_of(out: Path, stamp: Stamp) -> None:
    """Raises UsageError if `out` holds another judge's labels, which would be replaced."""
    try:
        row = read_json(out / ROW_FILE)
        judge, prompt = str(row["judge"]), str(row["prompt"])
    except (OSError, ValueError, KeyError, TypeError):
        return  # no labels yet
    if (judge, prompt) != (stamp.judge, stamp.prompt):
        raise UsageError(
            f"{out} has the labels of {judge} ({prompt}), which those of {stamp.judge} ({stamp.prompt}) would replace",
            "name another folder with --out, or remove that one",
        )


def _open_judge(
    stack: ExitStack,
    options: ScoreOptions,
    store: LabelStore,
    out: Path,
    open_people: Callable[..., AbstractContextManager[Judge]] | None,
    stop: StopRequest,
) -> Judge:
    """Returns the judge to ask, ready while `stack` is open; raises as `score_data` does."""
    config = options.judge
    if options.app:
        if not cluster_address():
            raise UsageError(
                "--app is a Serve app of a running cluster",
                "name its address in RAY_ADDRESS, as `rlvlm serve` prints it",
            )
        from rlvlm.runs.start.ray_session import ray_session  # Ray, which a judge behind an API does not need
        from rlvlm.serving.apps import start_judge

        stack.enter_context(ray_session())
        return stack.enter_context(start_judge(config, PlacementConfig(app=options.app), name="score"))
    if config.is_human:
        session = open_people or load(config.declared.session)
        return stack.enter_context(session(config, store, lambda: bool(stop), _log))
    return build_judge(replace(config, api=config.api.with_paths(out / "api_spending.json")))


def _look_through(recordings: Recordings, asked: Asked) -> DataSummary:
    """Reads all episodes once, without their images; raises UsageError if there is none."""
    sample: list[RobotTrajectory] = []
    torn: list[CorruptEpisode] = []
    counts: Counter[str] = Counter()

    def looked() -> Iterator[RobotTrajectory | CorruptEpisode]:
        for film in recordings:
            counts["episodes"] += 1
            if isinstance(film, CorruptEpisode):
                torn.append(film)
            else:
                counts["frames"] += -(-len(film.actions) // asked.every)
                if len(sample) < 3 * _CONTROLS:
                    sample.append(film)
            yield film

    digest = recordings_digest(looked())
    if not sample:
        what = (
            "; ".join(f"{episode.file}: {episode.reason}" for episode in torn[:3])
            or f"{recordings.path} holds no episode"
        )
        raise UsageError(what, "fetch the data anew, or name others")
    return DataSummary(
        digest=digest, num_episodes=counts["episodes"], num_frames=counts["frames"], sample=tuple(sample)
    )


def _preflight(
    judge: CachedJudge, data: DataSummary, recordings: Recordings, asked: Asked, options: ScoreOptions
) -> Sequence[Fault]:
    """Runs the bench's preflight on the data's own episodes, and returns the faults that it finds.

    Raises:
        JudgeRefused: the judge has a fault that is refused, and the data state which episodes succeeded; else all were
            taken for successes, and the caller goes on.
    """
    count = options.preflight
    is_known = asked.success is not None or all(film.success is not None for film in data.sample)
    is_scored = asked.questions != {"pairs"}
    suite = Suite(
        name=recordings.path.name,
        tasks=(recordings.path.name,),
        pairs=0 if is_scored else count,
        videos=max(1, count // 2) if is_scored else 0,
        controls=_CONTROLS,
        tracks=0,
        success=asked.success or "assumed",
    )
    made = known_recordings(suite, data.sample, asked.size_px, asked.seed)
    if not made.items:
        _log("no preflight: none of the first episodes is a success whose images can be read")
        return ()
    found = measure_known(judge, made, asked.num_frames, asked.seed).faults
    if is_known and options.judge.refuses_faulty:
        refuse_faulty(found)
    where = f", in the preflight{'' if is_known else _ASSUMED}"
    return [replace(fault, evidence=fault.evidence + where) for fault in found]


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _scored(
    judge: CachedJudge, films: Recordings, asked: Asked, num_episodes: int, readers: int, screen: "_ScoreScreen"
) -> Iterator[ScoredEpisode]:
    if not readers:
        return score_episodes(judge, films, asked, cache(screen.line))  # groups of episodes repeat the same line
    from rlvlm.reports.score_readers import score_on_nodes  # Ray, which this process may do without

    return score_on_nodes(judge, films, asked, films.path, num_episodes, readers, screen.line)


def _score_all(
    scored: Iterable[ScoredEpisode], screen: "_ScoreScreen", stop: StopRequest
) -> tuple[list[ScoredEpisode], dict[int, list[str]], JudgeUnavailable | None]:
    """Returns the episodes scored until the judge fails or the user stops, their images by number, and the judge's
    error, if any.
    """
    episodes: list[ScoredEpisode] = []
    strips: dict[int, list[str]] = {}
    try:
        for episode in scored:
            # encoded at once: the raw images of thousands of episodes would not fit into memory
            strips[episode.number] = [_webp(image) for image in episode.strip]
            episodes.append(replace(episode, strip=episode.strip[:0]))
            screen.add(episode)
            if episode.reason:
                screen.line(repr(f"{episode.name}: {episode.reason}")[1:-1])  # file names may hold escape sequences
            if stop:
                break
    except JudgeUnavailable as error:
        if not any(episode.rows for episode in episodes):
            raise
        return episodes, strips, error
    return episodes, strips, None


class _ScoreScreen(Screen):
    """Shows progress and remaining time, as a context manager."""

    def __init__(self, stream: TextIO, title: str, data: DataSummary) -> None:
        super().__init__(stream, title)
        self._data = data
        self._counts: Counter[str] = Counter()
        self._cost_usd = 0.0
        self._began = self._last_line = time.monotonic()
        self.wall_s = 0.0

    def add(self, episode: ScoredEpisode) -> None:
        """Counts an episode."""
        self._counts.update(episodes=1, frames=len(episode.frames))
        self._cost_usd += sum(answer.cost_usd for *_, answer in episode.rows if math.isfinite(answer.cost_usd))
        now = time.monotonic()
        if self._live is None and now - self._last_line > _LINE_EVERY_S:
            self._last_line = now
            self.line(self._text())

    def finish(self) -> None:
        """Logs the final progress."""
        self.wall_s = time.monotonic() - self._began
        self.line(self._text())

    def _text(self) -> str:
        rate = self._counts["frames"] / max(time.monotonic() - self._began, 1e-9)
        left = clock(self._data.num_frames - self._counts["frames"], rate)
        cost = f", {self._cost_usd:.4f} USD" if self._cost_usd else ""
        done = (
            f"{self._counts['episodes']:,} of {self._data.num_episodes:,} episodes, {self._counts['frames']:,} frames"
        )
        return f"{done}, {60 * rate:,.0f} a minute{cost}, {left or 'unknown'} left"

    def render(self) -> RenderableType:
        """Returns a progress bar with the text beside it."""
        row = Table.grid(padding=(0, 1))
        row.add_row(
            ProgressBar(total=self._data.num_episodes, completed=self._counts["episodes"], width=30), self._text()
        )
        return row


def _webp(image: Frames) -> str:
    data = BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(data, format="webp", quality=75)
    return inline(data.getvalue(), "webp")
