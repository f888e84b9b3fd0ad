"""Episodes that a judge called a success and the simulator did not: kept by runs, and made into suites for judges.

A run's `Recorder` keeps its own in `fooled.jsonl`; `rlvlm judge-bench harvest` merges those of several runs into one
file, which `rlvlm judge-bench FILE` takes. Episodes are states, so they can be drawn by any camera at any size.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlvlm.core.disk import write_whole
from rlvlm.core.errors import UsageError
from rlvlm.core.foreign import read_json
from rlvlm.core.steps import FloatArray, Frames

VERSION = 1
SUFFIX = ".hacked.json"
SHIPPED = Path(__file__).with_name("hacked")
"""Folder of the suites that ship, one file each."""
MAX_KEPT, MAX_PER_UPDATE = 2_000, 8
"""Episodes that a run keeps in all, and per update: tricks that a policy learns late must find room."""
MAX_IN_SUITE = 150
_DUPLICATE = 0.25
"""Mean distance between two final states, in standard deviations of those kept, below which one is a duplicate."""
_MAX_MOMENTS = 64
_MAX_NUMBERS = 4_096
_SEEN = 30
"""Grey levels by which a pixel differs from the first image where something has changed."""
_ALIKE, _LITTLE = 0.002, 0.02
"""Shares of the image that change: below the first hardly anything moves, below the second something small."""
_HIDDEN = 0.5
"""Share of the first image's contrast below which something hides the scene."""
_HALF_WAY = 0.5
_NO_PROGRESS = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class HackedEpisode:
    """Episode or turn that is no success and was called one."""

    goal: str
    snapshots: FloatArray
    """[L, S] moments in order of time, as the judge was shown them; one if it scores single images."""
    action: str = ""
    """Action of a turn; empty for episodes."""
    progress: float
    """Simulator's progress at the end, in [0, 1]."""
    score: float
    """Score from the judge that was fooled."""
    judge: str
    """Name of the judge that was fooled."""
    trick: str = ""
    """Description from measurements, see `trick_of`."""

    def row(self) -> dict[str, Any]:
        """Returns the episode for a line of JSON; six digits of each number are kept."""
        rows = [[float(f"{value:.6g}") for value in row] for row in self.snapshots]
        # integers without `.0`: most numbers of a grid's state are integers
        return asdict(self) | {"snapshots": [[int(x) if x.is_integer() else x for x in row] for row in rows]}


def parse_episode(row: Mapping[str, Any]) -> HackedEpisode:
    """Parses the result of `HackedEpisode.row`.

    Raises:
        ValueError: a part is missing, no number, or out of range.
    """
    try:
        snapshots = np.array(row["snapshots"], np.float32)
        numbers = float(row["progress"]), float(row["score"])
        texts = {name: row[name] for name in ("goal", "action", "judge", "trick")}
    except (KeyError, TypeError) as error:
        raise ValueError(f"it lacks a part of an episode: {error}") from error
    if snapshots.ndim != 2 or not 0 < len(snapshots) <= _MAX_MOMENTS or not 0 < snapshots.shape[1] <= _MAX_NUMBERS:
        bounds = f"[1 to {_MAX_MOMENTS}, 1 to {_MAX_NUMBERS}]"
        raise ValueError(f"snapshots have the shape {list(snapshots.shape)}, and not {bounds}")
    if not (np.isfinite(snapshots).all() and all(0 <= number <= 1 for number in numbers)):
        raise ValueError("a number is not finite, or progress or score not in [0, 1]")
    if not all(isinstance(text, str) and len(text) <= 1_000 and text.isprintable() for text in texts.values()):
        raise ValueError("goal, action, judge or trick is no line of text")
    return HackedEpisode(snapshots=snapshots, progress=numbers[0], score=numbers[1], **texts)


class Distinct:
    """Keeps up to `max_kept` episodes whose final states all differ."""

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self.episodes: list[HackedEpisode] = []

    def add(self, episode: HackedEpisode) -> bool:
        """Adds an episode unless it is a duplicate or there is no room; returns whether it was added."""
        if len(self.episodes) >= self._max_kept:
            return False
        alike = [
            other.snapshots[-1]
            for other in self.episodes
            if (other.goal, other.action) == (episode.goal, episode.action)
            and other.snapshots.shape[1] == episode.snapshots.shape[1]
        ]
        if alike:
            ends = np.stack([*alike, episode.snapshots[-1]])
            spread = ends.std(0)
            moving = spread > 0  # parts that never change, e.g. the table, carry no information
            gaps = np.abs(ends[:-1] - ends[-1])[:, moving] / spread[moving]
            if not moving.any() or (len(alike) > 1 and gaps.mean(1).min() < _DUPLICATE):
                return False
        self.episodes.append(episode)
        return True


def trick_of(episode: HackedEpisode, frames: Frames) -> str:
    """Describes an episode in a few words from measurements: its progress, and its first and last image.

    Args:
        episode: the episode.
        frames: [L, H, W, 3] its images, L >= 2; an episode of one image is preceded by that of a start.
    """
    first, last = frames[0].astype(np.float32), frames[-1].astype(np.float32)
    changes = (np.abs(frames.astype(np.float32) - first).max(-1) > _SEEN).mean((1, 2))  # [L]
    if changes.max() < _ALIKE:
        return "hardly anything moves"
    if last.std() < _HIDDEN * first.std():
        return "hides the scene"
    if changes[-1] < _ALIKE:
        return "ends as it began"
    if changes.max() < _LITTLE:
        return "only something small moves"
    if episode.progress <= _NO_PROGRESS:
        return "makes no progress"
    if episode.progress >= _HALF_WAY:
        return "ends past half of the way"
    return "ends before half of the way"


def write_suite(path: Path, task: str, episodes: Iterable[HackedEpisode]) -> str:
    """Writes a suite file and returns its digest, the SHA-256 of its content."""
    rows = [episode.row() for episode in episodes]
    content = {"version": VERSION, "task": task, "episodes": rows}
    digest = _digest(content)
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)  # one episode a line: diffs are readable
    head = json.dumps({"version": VERSION, "task": task, "digest": digest})[:-1]
    write_whole(path, f'{head}, "episodes": [\n{lines}\n]}}\n')
    return digest


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_suite(path: Path) -> tuple[str, list[HackedEpisode]]:
    """Returns task and episodes of a suite file.

    Raises:
        UsageError: the file is no suite, is damaged, or was altered after it was written.
    """
    try:
        content = read_json(path)
        if not isinstance(content, dict) or content.get("version") != VERSION:
            raise ValueError(f"it is not of version {VERSION}")
        digest = content.pop("digest", "")
        if digest != _digest(content):
            raise ValueError("its content does not have the digest that it names")
        task, rows = content["task"], content["episodes"]
        if not isinstance(task, str) or not isinstance(rows, list) or not 0 < len(rows) <= MAX_IN_SUITE:
            raise ValueError(f"it names no task, or not 1 to {MAX_IN_SUITE} episodes")
        return task, [parse_episode(row) for row in rows]
    except (OSError, ValueError, TypeError, KeyError) as error:
        what = f"{path} is no suite of hacked episodes: {error}"
        raise UsageError(what, "make one with `rlvlm judge-bench harvest RUN`") from error


def shipped_suites() -> dict[str, Path]:
    """Returns the files of the suites that ship, by their short names."""
    return {file.name.removesuffix(SUFFIX): file for file in sorted(SHIPPED.glob(f"*{SUFFIX}"))}


def shipped_episodes(task: str, count: int) -> tuple[HackedEpisode, ...]:
    """Returns up to `count` episodes, evenly spread over the suite that ships for a task; none if there is no suite."""
    suites = (read_suite(file) for file in shipped_suites().values())
    episodes = next((episodes for own, episodes in suites if own == task), [])
    indices = np.unique(np.linspace(0, len(episodes) - 1, min(count, len(episodes))).round().astype(int))
    return tuple(episodes[index] for index in indices)
