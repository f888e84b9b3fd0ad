"""Tables, advice and page about a judge's labels of recorded data."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rlvlm.core.judging import Stamp
from rlvlm.demonstrations.recorded_labels import EpisodeProgress, RecordedLabels
from rlvlm.demonstrations.trajectory import RobotTrajectory
from rlvlm.judge_bench.faults import Fault, grade
from rlvlm.judge_bench.figures import Figures, cost_figures, rank_correlation
from rlvlm.judge_bench.scoring import Asked, ScoredEpisode, find_threshold, known_rows, suspicions
from rlvlm.judge_bench.table import answer_rows
from rlvlm.pages.answers import Answers
from rlvlm.pages.judge import answer_sections
from rlvlm.pages.judge_charts import draw_scores
from rlvlm.pages.page import Card, Picture, Section, Table

MAX_CARDS = 200
"""Maximum number of episodes on the page: suspicious ones first, then those of the lowest worth."""
_CUTS = (0.2, 0.4, 0.6, 0.8)
"""Minimum worths of kept episodes, in the table of what remains."""
_MARKS = {True: "success", False: "failure", None: "unknown"}


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
    faults: Sequence[Fault] = ()
    """Faults that the preflight found."""

    def labels(self) -> Iterator[dict[str, Any]]:
        """Yields the rows of `COLUMNS`."""
        by = asdict(self.stamp)
        for episode in self.episodes:
            about = {"episode": episode.number, "name": episode.name, "goal": episode.goal} | by
            statuses = episode.statuses or ("",) * len(episode.frames)
            values = episode.values.tolist() or [(None, None)] * len(episode.frames)
            corrected = episode.corrected.astype(float).tolist() or [None] * len(episode.frames)
            columns = zip(episode.frames.tolist(), episode.progress.tolist(), statuses, values, corrected, strict=True)
            for frame, progress, status, (value, upper), by_hand in columns:
                if status or value is not None:
                    told = {"progress": _or_none(progress), "value": value, "upper_value": upper, "status": status}
                    yield about | {"frame": frame, "corrected": by_hand} | told
            status = episode.success_status or ("" if len(episode.frames) else "unreadable")
            if status or math.isfinite(episode.outcome):
                told = {"success": _or_none(episode.success), "value": _or_none(episode.outcome), "status": status}
                yield about | told

    def pairs(self) -> Iterator[dict[str, Any]]:
        """Yields the comparisons as rows of `rlvlm.labels.export.SCHEMA`."""
        rows = [row for episode in self.episodes for row in episode.rows if row[1].is_pair]
        items, answers = [item for _, item, _ in rows], [answer for *_, answer in rows]
        yield from answer_rows(items, answers, self.stamp, self.name, has_frames=True)

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
        # of a fault that both found, the labels say more than the preflight
        faults = list({fault.name: fault for fault in (*self.faults, *graded.faults)}.values())
        given = [answer for episode in self.episodes for *_, answer in episode.rows]
        counts = Counter(answer.status for answer in given)
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
        if not kept["episodes"]:
            advice, dropped = f"Drop nothing by these labels: no episode is worth {threshold:.2f} or more ({how})", []
        if fatal := [fault.name for fault in faults if fault.is_fatal]:
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
            "figures": {"pairs": graded.pairs, "scores": graded.scores, "cost": cost_figures(given)},
            "faults": [asdict(fault) for fault in faults],
            "summary": self._summary(counts, num_short),
        }

    def _summary(self, counts: Counter[str], num_short: int) -> dict[str, str]:
        """Returns what only scored data have, in words; the unknown is left out."""
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
            "shorter than the clip": f"{num_short:,}" if num_short else "-",
            "rank correlation with true returns": _correlation(returns),
            "rank correlation with the other judge": _correlation(both),
        }
        return {name: cell for name, cell in cells.items() if cell != "-"}

    def sections(self, row: Figures) -> list[Section]:
        """Returns the sections of the page, from what `row` returns."""
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
        heads = ("worth from", "episodes left", "frames left", "successes among them")
        left = [
            (
                f"{option['worth']:.2f}{' (threshold)' if option['worth'] == row['threshold'] else ''}",
                f"{option['episodes']:,}",
                f"{option['frames']:,}",
                "-" if option["successes"] is None else f"{option['successes']:.0%}",
            )
            for option in row["left"]
        ]
        tiles = {
            "episodes": f"{row['episodes']:,}",
            "frames asked about": f"{row['frames']:,}",
            "suspicious": f"{len(suspicious):,}",
            "to drop": f"{len(row['drop']):,}",
        }
        stopped = [] if row["is_whole"] else ["Stopped before the end: this is about what was answered until then."]
        judged = Answers(name=self.stamp.judge, num_frames=self.asked.num_frames)
        judged.items, judged.answers = known_rows(self.episodes)
        groups = {
            name: np.array([e.worth for e in self.episodes if e.truth is truth and math.isfinite(e.worth)])
            for truth, name in _MARKS.items()
        }
        groups = {name: values for name, values in groups.items() if len(values)}
        worths = draw_scores(groups, row["threshold"], "Worth of the episodes", "threshold") if groups else None
        tables = [Table(heads=heads, rows=left), Table(heads=("", "all episodes"), rows=list(row["summary"].items()))]
        hidden = [] if len(cards) == len(self.episodes) else [
            f"{len(self.episodes) - len(cards)} more episodes, none of less worth among those that do not look wrong, "
            "are in the table of labels alone."
        ]  # fmt: skip
        faults, *answered = answer_sections({self.stamp.judge: row}, [judged])
        return [
            Section(finding=row["advice"], alerts=stopped, tiles=tiles),
            faults,
            Section(
                heading="What to drop, and what that leaves",
                charts={} if worths is None else {"how much episodes are worth": worths},
                tables=tables,
            ),
            Section(
                heading="Episodes, suspicious ones first",
                cards=cards,
                colours={"suspicious": "#e76f51", "plain": "#2a9d8f"},
                is_wide=True,
            ),
            Section(notes_below=hidden),
            *answered,
        ]

    def _card(self, episode: ScoredEpisode, words: Sequence[str]) -> Card:
        other, known = self.other_worth(episode.number), np.isfinite(episode.progress)
        ends = max(episode.num_frames - 1, 1)
        facts = f"{episode.number}: {episode.name}, {episode.num_frames} frames"
        facts += "" if episode.truth is None else f", in the data a {_MARKS[episode.truth]}"
        facts += f", {other:.2f} of the other judge" if math.isfinite(other) else ""
        strip = self.strips[episode.number]
        return Card(
            title=episode.goal or "no goal",
            outcome="suspicious" if words else "plain",
            badge=f"worth {episode.worth:.2f}" if math.isfinite(episode.worth) else "worth -",
            facts=[facts, *([episode.reason[:300]] if episode.reason else [])],
            alerts=words,
            pictures=[
                Picture(src=src, alt=f"image {number} of {len(strip)}") for number, src in enumerate(strip, start=1)
            ],
            curve=list(zip((episode.frames[known] / ends).tolist(), episode.progress[known].tolist(), strict=True)),
        )


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
