"""`rlvlm score`: a judge's labels of recorded episodes, as tables beside the data and as a page."""

import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, TextIO

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table

from rlvlm.core.console.screen import Screen, clock
from rlvlm.core.console.signals import StopRequest
from rlvlm.core.console.tables import plain_console
from rlvlm.core.disk import make_output_folder, write_json, write_whole
from rlvlm.core.errors import EXIT_DONE, EXIT_PREEMPTED, JudgeUnavailable, UsageError
from rlvlm.core.judging import Stamp
from rlvlm.demonstrations.recorded_labels import (
    PAIR_COLUMNS,
    EpisodeProgress,
    RecordedLabels,
    read_labels,
    write_labels,
    write_lerobot_progress,
)
from rlvlm.demonstrations.recordings import Recordings, recordings_digest
from rlvlm.demonstrations.trajectory import CorruptEpisode, RobotTrajectory
from rlvlm.judge_bench.faults import Graded, grade
from rlvlm.judge_bench.figures import Figures, cost_figures, rank_correlation
from rlvlm.judge_bench.preflight import JudgeRefused, known_recordings, preflight
from rlvlm.judge_bench.rows import PAIR_NAMES, SCORE_NAMES, number_cell, share_cell
from rlvlm.judge_bench.scoring import (
    Asked,
    ScoredEpisode,
    find_threshold,
    known_rows,
    score_episodes,
    suspicions,
)
from rlvlm.judge_bench.suites import Suite
from rlvlm.judges.build import build_judge, check_reachable
from rlvlm.judges.cache import CachedJudge
from rlvlm.judges.config import JudgeConfig
from rlvlm.judges.judge import Judge
from rlvlm.labels.store import LabelStore
from rlvlm.reports.bench_figures import WIDTH
from rlvlm.runs.plots import INK, STYLE, to_svg
from rlvlm.runs.preflight import cluster_address
from rlvlm.runs.ray_session import ray_session
from rlvlm.runs.train import reachable
from rlvlm.serving.apps import start_judge
from rlvlm.serving.config import PageConfig, PlacementConfig
from rlvlm.serving.label_page import person_judge
from rlvlm.templates import inline, render

LABELS_FILE, PAIRS_FILE, LEROBOT_FILE = "labels.parquet", "pairs.parquet", "rlvlm_progress.parquet"
PAGE_FILE, ROW_FILE = "score.html", "score.json"
MAX_CARDS = 200
"""Episodes on the page: all suspicious ones up to so many, then those of the least worth."""
_CONTROLS = 8
_CUTS = (0.2, 0.4, 0.6, 0.8)
"""Least worth of the episodes that are kept, in the table of what is left."""
_LINE_EVERY_S = 30.0
_MARKS = {True: "success", False: "failure", None: "unknown"}
_COLOURS = {"success": "#2a9d8f", "failure": "#e76f51", "unknown": "#457b9d"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Data:
    """Findings of a first pass over the data."""

    digest: str
    num_episodes: int
    num_frames: int
    """That are asked about."""
    sample: tuple[RobotTrajectory, ...]
    """The first episodes, for the preflight."""


def score_data(  # noqa: PLR0913 - the command's options
    recordings: Recordings,
    config: JudgeConfig,
    asked: Asked,
    out: Path,
    *,
    app: str = "",
    against: Path | None = None,
    num_preflight: int = 20,
    page: PageConfig = PageConfig(),  # noqa: B008 - frozen
) -> int:
    """Labels recorded episodes, writes tables and page into `out`, and returns the exit code.

    Answers are kept in `out`/answers as they come, unless `config.store` names another store: a second call asks what
    is missing.

    Args:
        recordings: the data, which are only read.
        config: the judge.
        asked: the questions.
        out: folder; not inside of the data.
        app: a running Serve app that judges in place of `config`; empty builds the judge here.
        against: labels of another judge on the same data, to compare with; None compares with nothing.
        num_preflight: known items of each kind that are asked first, see `judge_bench.preflight`; 0 asks none, and
            people are asked none.
        page: where people answer, where they judge.

    Raises:
        UsageError: nothing of the data can be read, or nothing can be written to `out`.
        JudgeUnavailable: the judge cannot be loaded or answers nothing, or its budget is spent; what it answered
            before is kept, and written.
        JudgeRefused: the preflight says that its answers mean nothing.
    """
    if recordings.path.is_dir() and out.resolve().is_relative_to(recordings.path.resolve()):
        raise UsageError(f"{out} lies inside of the data, which are not written to", "name another folder with --out")
    make_output_folder(out)
    console = plain_console(soft_wrap=True)
    data = _look_through(recordings, asked)
    other = None if against is None else read_labels(against, data.digest)
    stop = StopRequest()
    store = LabelStore(Path(config.store).expanduser() if config.store else out / "answers")
    with ExitStack() as stack:
        judge = _open_judge(stack, config, app, store, out, page, stop)
        kept = CachedJudge(judge, store)
        if num_preflight and not config.is_human:
            _try_judge(kept, data, recordings, asked, num_preflight)
        with (
            stop,
            _ScoreScreen(sys.stderr, f"{kept.stamp.judge} on {recordings.path}", data) as screen,
        ):
            stop.log = screen.line
            episodes, strips, error = _score_all(kept, recordings, asked, screen, stop)
            screen.finish()
    wall_s = screen.wall_s
    episodes.sort(key=lambda episode: episode.number)
    is_whole = error is None and len(episodes) == data.num_episodes
    found = _Found(recordings.path.name, data, asked, kept.stamp, tuple(episodes), strips, is_whole, other)
    row = found.row() | {"asked": kept.misses, "from_store": kept.hits, "wall_s": round(wall_s, 1)}
    write_labels(out / LABELS_FILE, data.digest, found.labels())
    if "pairs" in asked.questions:
        write_labels(out / PAIRS_FILE, data.digest, found.pairs(), PAIR_COLUMNS)
    if recordings.form == "lerobot" and "progress" in asked.questions:
        name = kept.stamp.judge
        write_lerobot_progress(out / LEROBOT_FILE, found.lerobot_progress(), data.digest, name)
    write_json(out / ROW_FILE, row)
    write_whole(out / PAGE_FILE, found.page(row))
    for what, cell in row["summary"].items():
        console.print(f"{what:40} {cell}")
    for fault in row["faults"]:
        console.print(f"fault: {fault}", style="bold")
    console.print(f"\n{row['advice']}")
    rate = row["frames"] / wall_s * 60 if wall_s else 0.0
    console.print(
        f"{kept.misses:,} questions asked, {kept.hits:,} answered from {store.folder}; {rate:,.0f} frames a minute"
    )
    console.print(f"labels and page: {out / PAGE_FILE}")
    if error is not None and not stop:
        fix = (
            "the same command asks what is missing; a larger budget: --judge.api.max-cost-usd, --judge.api.max-requests"
        )
        raise JudgeUnavailable(f"{error}; what was answered before is kept", fix) from error
    return EXIT_PREEMPTED if stop else EXIT_DONE


def _open_judge(
    stack: ExitStack, config: JudgeConfig, app: str, store: LabelStore, out: Path, page: PageConfig, stop: StopRequest
) -> Judge:
    """The judge that is asked, ready while `stack` is open; errors as of `score_data`."""
    if app:
        if not cluster_address():
            raise UsageError(
                "--app is a Serve app of a running cluster",
                "name its address in RAY_ADDRESS, as `rlvlm serve` prints it",
            )
        stack.enter_context(ray_session())
        return stack.enter_context(start_judge(config, PlacementConfig(app=app), name="score"))
    if config.is_human:
        return stack.enter_context(person_judge(config, store, page, lambda: bool(stop), _log))
    check_reachable(config)
    return build_judge(replace(config, api=reachable(config.api, out / "api_spending.json")))


def _look_through(recordings: Recordings, asked: Asked) -> _Data:
    """Reads all episodes once, without their images.

    Raises:
        UsageError: there is none.
    """
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
    return _Data(digest=digest, num_episodes=counts["episodes"], num_frames=counts["frames"], sample=tuple(sample))


def _try_judge(judge: CachedJudge, data: _Data, recordings: Recordings, asked: Asked, count: int) -> None:
    """The bench's preflight on the data's own episodes.

    Raises:
        JudgeRefused: as `preflight`; where the data do not say which episodes succeeded, its words are only a warning.
    """
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
        return
    try:
        preflight(judge, made, asked.num_frames, asked.seed, setting="preflight", log=_log)
    except JudgeRefused as error:
        if is_known:
            raise
        _log(f"{error}; the data do not say which episodes succeeded, so all were taken for successes, and it goes on")


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _score_all(
    judge: CachedJudge, recordings: Recordings, asked: Asked, screen: "_ScoreScreen", stop: StopRequest
) -> tuple[list[ScoredEpisode], dict[int, list[str]], JudgeUnavailable | None]:
    """The episodes that were scored until the judge failed, which comes last, or the user stopped it; and their images,
    by number.
    """
    episodes: list[ScoredEpisode] = []
    strips: dict[int, list[str]] = {}
    said: set[str] = set()

    def log(line: str) -> None:
        if line not in said:  # of each group of episodes the same
            said.add(line)
            screen.line(line)

    try:
        for episode in score_episodes(judge, recordings, asked, log):
            # encoded at once: thousands of episodes would not fit into memory as they are
            strips[episode.number] = [_webp(image) for image in episode.strip]
            episodes.append(replace(episode, strip=episode.strip[:0]))
            screen.add(episode)
            if episode.reason:
                screen.line(repr(f"{episode.name}: {episode.reason}")[1:-1])  # names of files may hold escape sequences
            if stop:
                break
    except JudgeUnavailable as error:
        if not any(episode.rows for episode in episodes):
            raise
        return episodes, strips, error
    return episodes, strips, None


class _ScoreScreen(Screen):
    """How far it is, and how long it still takes. A context."""

    def __init__(self, stream: TextIO, title: str, data: _Data) -> None:
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
        """Says how far it came."""
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
        """A bar with the text beside it."""
        row = Table.grid(padding=(0, 1))
        row.add_row(
            ProgressBar(total=self._data.num_episodes, completed=self._counts["episodes"], width=30), self._text()
        )
        return row


@dataclass(frozen=True, slots=True)
class _Found:
    """The results, and all that is written about them."""

    name: str
    data: _Data
    asked: Asked
    stamp: Stamp
    episodes: tuple[ScoredEpisode, ...]
    strips: Mapping[int, list[str]]
    """Encoded images of each episode, by its number."""
    is_whole: bool
    """Whether all of the data were asked about."""
    other: RecordedLabels | None

    def labels(self) -> Iterator[dict[str, Any]]:
        """The rows of `COLUMNS`."""
        by = asdict(self.stamp)
        for episode in self.episodes:
            about = {"episode": episode.number, "name": episode.name, "goal": episode.goal} | by
            progress = zip(episode.frames.tolist(), episode.progress.tolist(), episode.statuses, strict=False)
            for frame, value, status in progress:
                if status:
                    yield about | {"frame": frame, "progress": _or_none(value), "status": status}
            status = episode.success_status or ("" if len(episode.frames) else "unreadable")
            if status:
                yield about | {"success": _or_none(episode.success), "status": status}

    def pairs(self) -> Iterator[dict[str, Any]]:
        """The rows of `PAIR_COLUMNS`."""
        by = asdict(self.stamp)
        for _, item, answer in (row for episode in self.episodes for row in episode.rows):
            if item.kind == "pair":
                left, right = ([int(n) for n in side[-1]] for side in item.sides[:: -1 if answer.swapped else 1])
                where = {"left_episode": left[0], "left_frame": left[1]}
                where |= {"right_episode": right[0], "right_frame": right[1]}
                yield where | {"goal": item.goal, "label": answer.label or None, "status": answer.status} | by

    def lerobot_progress(self) -> Iterator[EpisodeProgress]:
        """A row for each frame of the data set, also of episodes that were not asked about."""
        for episode in self.episodes:
            if len(episode.indices):
                yield EpisodeProgress(
                    episode=int(episode.name),
                    indices=episode.indices,
                    frames=episode.frames,
                    progress=episode.progress,
                )

    def other_worth(self, number: int) -> float:
        """What the other judge thinks an episode is worth; NaN where there is no answer of it."""
        if self.other is None:
            return math.nan
        if number in self.other.success:
            return self.other.success[number]
        frames = [frame for episode, frame in self.other.progress if episode == number]
        return self.other.progress[number, max(frames)] if frames else math.nan

    def row(self) -> dict[str, Any]:
        """Everything but the images, as JSON."""
        threshold, is_known = find_threshold(self.episodes)
        suspicious = {
            episode.number: words
            for episode in self.episodes
            if (words := suspicions(episode, threshold, self.other_worth(episode.number)))
        }
        dropped = [episode.name for episode in self.episodes if not episode.worth >= threshold]
        items, answers = known_rows(self.episodes)
        graded = grade(items, answers, self.asked.num_frames)
        counts = Counter(answer.status for episode in self.episodes for *_, answer in episode.rows)
        counts["unreadable"] += sum(
            episode.statuses.count("unreadable") + (not len(episode.frames)) for episode in self.episodes
        )
        num_short = sum(0 < episode.num_frames < self.asked.num_frames for episode in self.episodes)
        how = "the best for the data's own successes" if is_known else "since the data do not know a better one"
        kept = _left(self.episodes, threshold)
        advice = (
            f"Keep the {kept['episodes']:,} of {len(self.episodes):,} episodes that are worth {threshold:.2f} or more "
            f"({how}): {kept['frames']:,} of {sum(episode.num_frames for episode in self.episodes):,} frames"
        )
        if kept["successes"] is not None:
            advice += (
                f"; {kept['successes']:.0%} of them are successes, of all {_share_of_successes(self.episodes):.0%}"
            )
        if fatal := [fault.name for fault in graded.faults if fault.is_fatal]:
            advice, dropped = f"Drop nothing by these labels: the judge {', and '.join(fatal)}", []
        return {
            "data": self.name,
            "dataset": self.data.digest,
            "judge": self.stamp.judge,
            "prompt": self.stamp.prompt,
            "is_whole": self.is_whole,
            "episodes": len(self.episodes),
            "frames": sum(len(episode.frames) for episode in self.episodes),
            "statuses": dict(+counts),
            "shorter_than_clip": num_short,
            "threshold": threshold,
            "threshold_from_data": is_known,
            "advice": f"{advice}.",
            "left": [_left(self.episodes, cut) for cut in sorted({*_CUTS, threshold})],
            "drop": dropped,
            "suspicious": {str(number): words for number, words in suspicious.items()},
            "figures": {"pairs": graded.pairs, "scores": graded.scores, "cost": cost_figures(answers)},
            "faults": [f"{fault.name} ({fault.evidence})" for fault in graded.faults],
            "summary": self._summary(graded, counts, suspicious, num_short),
        }

    def _summary(
        self, graded: Graded, counts: Counter[str], suspicious: Mapping[int, Sequence[str]], num_short: int
    ) -> dict[str, str]:
        """Figures in words; those that are not known are left out."""
        scores, pairs = graded.scores, graded.pairs
        both = [(episode.worth, self.other_worth(episode.number)) for episode in self.episodes]
        both = [row for row in both if np.isfinite(row).all()]
        returns = [
            (episode.worth, episode.env_return)
            for episode in self.episodes
            if np.isfinite([episode.worth, episode.env_return]).all()
        ]
        cells = {
            "episodes": f"{len(self.episodes):,} of {self.data.num_episodes:,}",
            "answers": ", ".join(f"{count:,} {status}" for status, count in (+counts).most_common()) or "none",
            "suspicious": f"{len(suspicious):,}",
            "shorter than the clip": f"{num_short:,}" if num_short else "-",
            SCORE_NAMES["auc"]: number_cell(scores.get("auc")),
            SCORE_NAMES["ece"]: number_cell(scores.get("ece")),
            SCORE_NAMES["false_positives"]: share_cell(scores.get("false_positives", {}).get("all cases")),
            "VOC, order along an episode": number_cell(scores.get("voc")),
            "rank correlation with progress": number_cell(scores.get("progress")),
            "rank correlation with true returns": _correlation(returns),
            PAIR_NAMES["accuracy"]: share_cell(pairs.get("accuracy")),
            PAIR_NAMES["undecided"]: share_cell(pairs.get("undecided")),
            PAIR_NAMES["consistent"]: share_cell(pairs.get("consistent")),
            "rank correlation with the other judge": _correlation(both),
        }
        return {name: cell for name, cell in cells.items() if cell != "-"}

    def page(self, row: Figures) -> str:
        """The HTML of the page."""
        suspicious: Mapping[str, list[str]] = row["suspicious"]
        # suspicious ones first, then the least worth; those without any worth are suspicious
        order = sorted(
            self.episodes,
            key=lambda episode: (
                str(episode.number) not in suspicious,
                episode.worth if math.isfinite(episode.worth) else -1,
            ),
        )
        cards = [self._card(episode, suspicious.get(str(episode.number), [])) for episode in order[:MAX_CARDS]]
        outcomes = Counter(card["outcome"] for card in cards)
        pictures = {"how much episodes are worth": draw_worths(self.episodes, row["threshold"])}
        heads = ("worth from", "episodes left", "frames left", "successes among them")
        left = [
            (
                f"{option['worth']:.2f}{' (advised)' if option['worth'] == row['threshold'] else ''}",
                f"{option['episodes']:,}",
                f"{option['frames']:,}",
                "-" if option["successes"] is None else f"{option['successes']:.0%}",
            )
            for option in row["left"]
        ]
        return render(
            "score.html.j2",
            title=f"{self.stamp.judge} on {self.name}",
            advice=row["advice"],
            is_whole=row["is_whole"],
            tiles={
                "episodes": f"{row['episodes']:,}",
                "frames asked about": f"{row['frames']:,}",
                "suspicious": f"{len(suspicious):,}",
                "to drop": f"{len(row['drop']):,}",
            },
            counts={name: outcomes[name] for name in ("suspicious", "plain")},
            left_heads=heads,
            left=left,
            pictures=[(name, inline(to_svg(figure), "svg+xml")) for name, figure in pictures.items()],
            summary=list(row["summary"].items()),
            faults=row["faults"],
            cards=cards,
            num_hidden=len(self.episodes) - len(cards),
            colours={"suspicious": "#e76f51", "plain": "#2a9d8f"},
        )

    def _card(self, episode: ScoredEpisode, words: Sequence[str]) -> dict[str, Any]:
        other = self.other_worth(episode.number)
        known = np.isfinite(episode.progress)
        ends = max(episode.num_frames - 1, 1)
        points = list(zip((100 * episode.frames[known] / ends).tolist(), episode.progress[known].tolist(), strict=True))
        return {
            "outcome": "suspicious" if words else "plain",
            "title": episode.goal or "no goal",
            "name": episode.name,
            "number": episode.number,
            "num_frames": episode.num_frames,
            "truth": "" if episode.truth is None else _MARKS[episode.truth],
            "worth": "-" if not math.isfinite(episode.worth) else f"{episode.worth:.2f}",
            "other": f"{other:.2f}" if math.isfinite(other) else "",
            "words": words,
            "reason": episode.reason[:300],
            # left to right as time goes, up as progress does
            "curve": " ".join(f"{x:.1f},{30 - 28 * y:.1f}" for x, y in points),
            "label": f"progress from {points[0][1]:.2f} to {points[-1][1]:.2f}" if points else "no progress",
            "strip": self.strips[episode.number],
        }


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _webp(image: Any) -> str:
    data = BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(data, format="webp", quality=75)
    return inline(data.getvalue(), "webp")


def _share_of_successes(episodes: Sequence[ScoredEpisode]) -> float | None:
    known = [episode.truth for episode in episodes if episode.truth is not None]
    return sum(known) / len(known) if known else None


def _left(episodes: Sequence[ScoredEpisode], worth: float) -> dict[str, Any]:
    """Episodes of at least this worth: counts, and the share of successes where it is known."""
    kept = [episode for episode in episodes if episode.worth >= worth]
    frames = sum(episode.num_frames for episode in kept)
    return {"worth": worth, "episodes": len(kept), "frames": frames, "successes": _share_of_successes(kept)}


def _correlation(rows: Sequence[tuple[float, float]]) -> str:
    return f"{rank_correlation(*np.transpose(rows)):.2f} (of {len(rows)})" if len(rows) > 2 else "-"


def draw_worths(episodes: Sequence[ScoredEpisode], threshold: float) -> Figure:
    """How many episodes are worth how much, by what the data say of them; the threshold is dashed."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
        axes = figure.add_subplot()
        worths = {
            name: [episode.worth for episode in episodes if episode.truth is truth and math.isfinite(episode.worth)]
            for truth, name in _MARKS.items()
        }
        worths = {name: values for name, values in worths.items() if values}
        if worths:
            colours = [_COLOURS[name] for name in worths]
            labels = [f"{name} ({len(values)})" for name, values in worths.items()]
            axes.hist(list(worths.values()), bins=20, range=(0, 1), stacked=True, color=colours, label=labels)
            axes.legend(fontsize=8, frameon=False)
        axes.axvline(threshold, color=INK, linewidth=1, linestyle="--")
        axes.set(xlim=(0, 1), xlabel="worth; dashed: kept from here on", ylabel="episodes")
        axes.set_title("Worth of the episodes")
    return figure
