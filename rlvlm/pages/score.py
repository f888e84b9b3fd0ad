"""Tables, advice and page about a judge's labels of recorded data."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from rlvlm.core.judging import Stamp
from rlvlm.demonstrations.recorded_labels import EpisodeProgress, RecordedLabels
from rlvlm.demonstrations.trajectory import RobotTrajectory
from rlvlm.judge_bench.faults import Graded, grade
from rlvlm.judge_bench.figures import Figures, cost_figures, rank_correlation
from rlvlm.judge_bench.rows import PAIR_NAMES, SCORE_NAMES, number_cell, share_cell
from rlvlm.judge_bench.scoring import Asked, ScoredEpisode, find_threshold, known_rows, suspicions
from rlvlm.pages.charts import INK, STYLE, to_svg
from rlvlm.pages.judge_charts import WIDTH
from rlvlm.templates import inline, render

MAX_CARDS = 200
"""Maximum number of episodes on the page: suspicious ones first, then those of the lowest worth."""
_CUTS = (0.2, 0.4, 0.6, 0.8)
"""Minimum worths of kept episodes, in the table of what remains."""
_MARKS = {True: "success", False: "failure", None: "unknown"}
_COLOURS = {"success": "#2a9d8f", "failure": "#e76f51", "unknown": "#457b9d"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSummary:
    """Findings of a first pass over the data."""

    digest: str
    num_episodes: int
    num_frames: int
    """Number of frames that are asked about."""
    sample: tuple[RobotTrajectory, ...]
    """First episodes, for the preflight."""


@dataclass(frozen=True, slots=True)
class ScoredData:
    """Scored episodes, and the tables and page made from them."""

    name: str
    data: DataSummary
    asked: Asked
    stamp: Stamp
    episodes: tuple[ScoredEpisode, ...]
    strips: Mapping[int, list[str]]
    """Encoded images of each episode, by its number."""
    is_whole: bool
    """Whether all of the data were asked about."""
    other: RecordedLabels | None

    def labels(self) -> Iterator[dict[str, Any]]:
        """Yields the rows of `COLUMNS`."""
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
        """Yields the rows of `PAIR_COLUMNS`."""
        by = asdict(self.stamp)
        for _, item, answer in (row for episode in self.episodes for row in episode.rows):
            if item.kind == "pair":
                left, right = ([int(n) for n in side[-1]] for side in item.sides[:: -1 if answer.swapped else 1])
                where = {"left_episode": left[0], "left_frame": left[1]}
                where |= {"right_episode": right[0], "right_frame": right[1]}
                yield where | {"goal": item.goal, "label": answer.label or None, "status": answer.status} | by

    def lerobot_progress(self) -> Iterator[EpisodeProgress]:
        """Yields a row for each episode of the data set that has frame indices, asked about or not."""
        for episode in self.episodes:
            if len(episode.indices):
                yield EpisodeProgress(
                    episode=int(episode.name),
                    indices=episode.indices,
                    frames=episode.frames,
                    progress=episode.progress,
                )

    def other_worth(self, number: int) -> float:
        """Returns the other judge's worth of an episode; NaN without an answer."""
        if self.other is None:
            return math.nan
        if number in self.other.success:
            return self.other.success[number]
        frames = [frame for episode, frame in self.other.progress if episode == number]
        return self.other.progress[number, max(frames)] if frames else math.nan

    def row(self) -> dict[str, Any]:
        """Returns everything but the images, as JSON."""
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
        """Returns figures in words; unknown ones are left out."""
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
        """Returns the HTML of the page."""
        suspicious: Mapping[str, list[str]] = row["suspicious"]
        # suspicious ones first, then by rising worth; those without any worth are suspicious
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
            # x is time, y is progress, upwards
            "curve": " ".join(f"{x:.1f},{30 - 28 * y:.1f}" for x, y in points),
            "label": f"progress from {points[0][1]:.2f} to {points[-1][1]:.2f}" if points else "no progress",
            "strip": self.strips[episode.number],
        }


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _share_of_successes(episodes: Sequence[ScoredEpisode]) -> float | None:
    known = [episode.truth for episode in episodes if episode.truth is not None]
    return sum(known) / len(known) if known else None


def _left(episodes: Sequence[ScoredEpisode], worth: float) -> dict[str, Any]:
    """Returns counts of the episodes of at least this worth, and their share of successes if known."""
    kept = [episode for episode in episodes if episode.worth >= worth]
    frames = sum(episode.num_frames for episode in kept)
    return {"worth": worth, "episodes": len(kept), "frames": frames, "successes": _share_of_successes(kept)}


def _correlation(rows: Sequence[tuple[float, float]]) -> str:
    return f"{rank_correlation(*np.transpose(rows)):.2f} (of {len(rows)})" if len(rows) > 2 else "-"


def draw_worths(episodes: Sequence[ScoredEpisode], threshold: float) -> Figure:
    """Draws a histogram of the episodes' worth by success; the threshold is dashed."""
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
