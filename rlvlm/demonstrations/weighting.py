"""Weights of recorded answers for imitation learning, from a judge's labels of the recording.

A frame is the moment at which an answer began: a turn or a chunk. Letters: E episodes, T frames of one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlvlm.core import metrics
from rlvlm.core.episodes import IntArray
from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.demonstrations.folder import open_folder
from rlvlm.demonstrations.recorded_labels import RecordedLabels, filled, read_labels
from rlvlm.demonstrations.recordings import Recordings, recordings_digest
from rlvlm.demonstrations.records import SOURCE_DIGEST, SOURCE_EPISODE, SOURCE_FRAMES

Curve = NDArray[np.float64]

KAPPA = 0.01
"""Gain in progress above which an answer has full weight."""
TEMPERATURE = 0.2
"""Temperature of exponentiated advantages, in units of an episode's worth, which is in [0, 1]."""
MAX_WEIGHT = 20.0
"""Maximum weight of an exponentiated advantage."""
POSITIVE = 0.4
"""Maximum share of answers that the policy is told are better than expected."""
_BINS = 10
"""Bins of progress in the value table from which advantages are computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Weights of M answers, in order of episodes."""

    values: FloatArray
    """[M] weights, >= 0, with mean 1."""
    judged: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))
    """[M] the judge's label of each answer, NaN if it has none; empty for weightings without one. condition: 1 if
    better than expected, else 0. preference: the worth of its episode."""
    episodes: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    """[M] episode number of each answer, or empty."""

    def is_good(self) -> NDArray[np.bool_]:
        """Returns [M], whether an answer's label (its weight, if there are no labels) is at least the mean."""
        told = self.judged if np.isfinite(self.judged).any() else self.values
        return told >= np.nanmean(told)

    def rows(self) -> FloatArray:
        """Returns [M, 3], all three arrays, answer by answer."""
        unknown = np.full(len(self.values), np.nan, np.float32)
        parts = (self.values, self.judged, self.episodes)
        return np.stack([part if len(part) else unknown for part in parts], 1).astype(np.float32)

    @classmethod
    def of_rows(cls, rows: FloatArray) -> Self:
        """Rebuilds weights from the `rows` [M, 3]."""
        return cls(values=rows[:, 0], judged=rows[:, 1], episodes=rows[:, 2].astype(np.int64))

    def at(self, rows: np.ndarray) -> "Weights":
        """Returns the weights of some answers, by indices or a mask [M]."""
        return Weights(**{name: part[rows] if len(part := getattr(self, name)) else part for name in self.__slots__})

    @property
    def effective(self) -> float:
        """Effective sample size (sum w)^2 / sum w^2: as many answers of equal weight have the same variance."""
        return float(self.values.sum() ** 2 / np.square(self.values).sum())

    @property
    def counted(self) -> float:
        """Share of answers with a weight above 0."""
        return float((self.values > 0).mean())

    def told(self) -> str:
        """Returns a one-line summary for users."""
        return (
            f"weights: {self.effective:,.0f} of {len(self.values):,} answers' worth, {self.counted:.0%} count, the "
            f"largest {self.values.max():.1f} times the mean"
        )

    def metrics(self) -> dict[str, float]:
        """Returns this summary as metrics, by names in `rlvlm.core.metrics`."""
        return {
            metrics.SFT_EFFECTIVE: self.effective / len(self.values),
            metrics.SFT_COUNTED: self.counted,
            metrics.SFT_MAX_WEIGHT: float(self.values.max()),
        }


def weigh(
    labels: RecordedLabels, lengths: Sequence[int], weighting: str, threshold: float, num_steps: int = 0
) -> Weights:
    """Returns the weight of each answer.

    Args:
        labels: labels by episode number and frame.
        lengths: [E] number of frames of each episode; 0 leaves an episode out.
        weighting: filter: 1 in episodes whose worth is `threshold` or more, else 0. progress: by the gain in progress
            up to the next answer, see `progress_weights`. advantage: exponentiated, see `exponentiated`. condition: 1,
            see `better_than_expected`. iql: exponentiated, of one answer and the value's upper expectile. preference: 1
            in episodes whose worth is known.
        threshold: minimum worth of an episode for `filter`.
        num_steps: see `n_step_advantages`; for advantage and condition of labels with a value.

    Raises:
        UsageError: all weights are 0, or the labels lack what the weighting needs.
    """
    curves = [_curve(labels.progress, number, np.arange(length)) for number, length in enumerate(lengths)]
    worth = np.array([_worth(labels, number, curve) for number, curve in enumerate(curves)])
    judged, episodes = np.empty(0, np.float32), np.repeat(np.arange(len(lengths)), lengths)
    if weighting == "preference":
        judged = np.repeat(worth, lengths).astype(np.float32)
        found = [np.isfinite(judged)]
    elif weighting == "condition":
        corrected = [_curve(labels.corrected, number, np.arange(length)) for number, length in enumerate(lengths)]
        judged = better_than_expected(_advantages(labels, lengths, curves, worth, num_steps), corrected)
        found = [np.ones(len(judged))]
    elif weighting == "filter":
        found = [np.full(length, float(value >= threshold)) for length, value in zip(lengths, worth, strict=True)]
    elif weighting == "progress":
        found = progress_weights(curves)
    elif weighting == "iql":
        if not labels.upper_values:
            raise UsageError("--sft.weighting iql needs a value, which these labels lack", "rlvlm score DATA --value")
        values = [_curve(labels.upper_values, number, np.arange(length)) for number, length in enumerate(lengths)]
        found = exponentiated(n_step_advantages(values, labels.outcomes, 1))
    else:
        found = exponentiated(_advantages(labels, lengths, curves, worth, num_steps))
    values = np.concatenate([np.zeros(0), *found]).astype(np.float32)
    if not values.sum() > 0:
        raise UsageError(
            f"--sft.weighting {weighting} leaves nothing to learn from: no answer of {sum(lengths)} counts",
            "look at the page of `rlvlm score`, or choose another weighting",
        )
    return Weights(values=values / values.mean(), judged=judged, episodes=episodes)


def folder_weights(  # noqa: PLR0913, PLR0917 - the settings of `weigh`
    path: Path, labels: str, lengths: Sequence[int], weighting: str, threshold: float, num_steps: int
) -> Weights:
    """Returns `weigh` for our folder at `path`, with the file `labels` of `rlvlm score`: labels of the folder, or of
    data that it was imported from.

    Raises:
        UsageError: the file is not of labels, has labels of other data, or makes all weights 0.
    """
    recordings = Recordings(path=path, form="folder", make_draw=lambda folder: _draw_nothing)
    own, records = recordings_digest(recordings), [record.arrays for record in open_folder(path).episodes()]
    origins = [str(arrays.get(SOURCE_DIGEST, "")) for arrays in records]
    read = read_labels(Path(labels).expanduser(), own, *set(filter(None, origins)))
    if read.dataset != own:
        read = _followed(
            read, [arrays if of == read.dataset else {} for arrays, of in zip(records, origins, strict=True)]
        )
    return weigh(read, lengths, weighting, threshold, num_steps)


def _followed(labels: RecordedLabels, records: Sequence[Mapping[str, Any]]) -> RecordedLabels:
    """Returns labels of imported data as those of the episodes and chunks made from them.

    Args:
        labels: by episode and frame of the imported data.
        records: arrays of each episode of our folder; empty if it was made from other data.
    """
    followed: dict[str, Any] = {
        name: {} for name in ("progress", "values", "upper_values", "corrected", "success", "outcomes")
    }  # fmt: skip
    for number, arrays in enumerate(records):
        if not arrays:
            continue
        of = int(arrays[SOURCE_EPISODE])
        for name in ("success", "outcomes"):
            if of in getattr(labels, name):
                followed[name][number] = getattr(labels, name)[of]
        for name in ("progress", "values", "upper_values", "corrected"):
            # a chunk begins between two frames that were asked about
            curve = _curve(getattr(labels, name), of, arrays[SOURCE_FRAMES])
            followed[name] |= {(number, chunk): float(value) for chunk, value in enumerate(curve) if np.isfinite(value)}
    return replace(labels, **followed)


def _draw_nothing(snapshots: FloatArray, camera: str) -> Frames:
    raise AssertionError("a digest is of numbers alone")


def progress_weights(curves: Sequence[Curve]) -> list[Curve]:
    """Returns [E] arrays [T]: 1 for a gain above `KAPPA` up to the next answer, a share for a smaller one, 0 for a
    loss.

    With the gains' mean m (at least 0) and standard deviation s, a gain g in [0, KAPPA] weighs
    clip((g - (m - 2 s)) / 4 s, 0, 1).
    Unknown gains weigh 1. Departure: an episode's last answer has no next one and takes the gain before it; the
    published rule gives the last frames little or no weight, and so does not teach to finish.

    Source: reward-aligned behaviour cloning as LeRobot 0.6.1 has it (`rewards/sarm/rabc.py`).
    """
    gains = [np.diff(curve, append=np.nan) for curve in curves]
    for gain in gains:
        if len(gain) > 1:
            gain[-1] = gain[-2]
    every = np.concatenate([np.zeros(0), *gains])
    known = every[np.isfinite(every)]
    if not len(known):
        raise UsageError("the labels have no progress of these episodes", "rlvlm score DATA --ask progress success")
    mean, std = max(known.mean(), 0.0), known.std()

    def of(gain: Curve) -> Curve:
        share = np.clip((gain - (mean - 2 * std)) / (4 * std + 1e-6), 0.0, 1.0)
        weight = np.where(gain > KAPPA, 1.0, np.where(gain < 0, 0.0, share))
        return np.where(np.isfinite(gain), weight, 1.0)

    return [of(gain) for gain in gains]


def exponentiated(advantages: Sequence[Curve]) -> list[Curve]:
    """Returns [E] arrays [T]: min(exp(A / TEMPERATURE), MAX_WEIGHT) of the advantages A; 0 where they are NaN.

    Source: Peng et al. 2019, arXiv:1910.00177 (AWR); Kostrikov et al. 2022, arXiv:2110.06169 (IQL).
    """
    return [np.where(np.isfinite(part), np.minimum(np.exp(part / TEMPERATURE), MAX_WEIGHT), 0.0) for part in advantages]


def better_than_expected(advantages: Sequence[Curve], corrected: Sequence[Curve] = ()) -> FloatArray:
    """Returns [M]: 1 for the `POSITIVE` share of answers with the largest advantages above 0, 0 for the others, NaN
    where they are; and 1 wherever a person had taken over, since a value expects little of a moment at which one had
    to.

    Args:
        advantages: [E] arrays [T].
        corrected: [E] arrays [T], 1 for a person's answer; NaN, or none at all, if it is unknown.

    Source: the threshold of RECAP (Physical Intelligence 2025, arXiv:2511.14759); `policies.advantage_prompt` lists the
    departures.

    Raises:
        UsageError: no advantage is above 0.
    """
    found = np.concatenate([np.zeros(0), *advantages])
    threshold = np.nanquantile(found, 1 - POSITIVE)
    by_hand = np.concatenate([np.zeros(0), *corrected]) >= 0.5 if len(corrected) else np.zeros(len(found), bool)
    positive = (found > 0) & (found >= threshold) | by_hand
    if not positive.any():
        raise UsageError(
            "--sft.weighting condition has nothing to tell apart: to the judge no episode is better than the others",
            "look at the page of `rlvlm score`, or choose another weighting",
        )
    return np.where(np.isfinite(found) | by_hand, positive, np.nan).astype(np.float32)


def n_step_advantages(values: Sequence[Curve], outcomes: Mapping[int, float], num_steps: int) -> list[Curve]:
    """Returns [E] arrays [T]: what an episode was worth after `num_steps` more answers, minus what it was worth before.

    Args:
        values: E arrays [T] of V before each answer, the probability of success.
        outcomes: outcome in [0, 1] by episode number, which counts where the episode was over by then; NaN without one.
        num_steps: N, answers; 0: to the episode's end.

    Source: RECAP (Physical Intelligence 2025, arXiv:2511.14759), eq. 1, with the outcome as the only reward.
    """
    found = []
    for number, value in enumerate(values):
        steps = num_steps or len(value)
        # A_t = V(s_t+N) - V(s_t), and the outcome in place of V(s_t+N) at the end
        later = np.append(value[steps:], np.full(min(steps, len(value)), outcomes.get(number, np.nan)))
        found.append(later - value)
    return found


def _advantages(
    labels: RecordedLabels, lengths: Sequence[int], curves: Sequence[Curve], worth: Curve, num_steps: int
) -> list[Curve]:
    """Returns [E] arrays [T], `n_step_advantages` of labels with a value, else `table_advantages`."""
    if not labels.values:
        return table_advantages(curves, worth)
    values = [_curve(labels.values, number, np.arange(length)) for number, length in enumerate(lengths)]
    return n_step_advantages(values, labels.outcomes, num_steps)


def table_advantages(curves: Sequence[Curve], worth: Curve) -> list[Curve]:
    """Returns [E] arrays [T]: an episode's worth minus the mean worth of all episodes from frames of similar progress;
    NaN if the worth is unknown. Frames of unknown progress are compared with the overall mean.
    """
    known = np.isfinite(worth)
    if not known.any():
        raise UsageError("the labels say of no episode what it is worth", "rlvlm score DATA --ask progress success")
    sums, counts = np.zeros(_BINS + 1), np.zeros(_BINS + 1)
    bins = [np.where(np.isfinite(curve), np.clip(curve * _BINS, 0, _BINS - 1), _BINS).astype(int) for curve in curves]
    for rows, value in zip(bins, worth, strict=True):
        if np.isfinite(value):
            np.add.at(sums, rows, value)
            np.add.at(counts, rows, 1)
    table = np.where(counts > 0, sums / np.maximum(counts, 1), worth[known].mean())
    table[_BINS] = worth[known].mean()
    return [value - table[rows] for rows, value in zip(bins, worth.tolist(), strict=True)]


def _curve(labels: Mapping[tuple[int, int], float], number: int, frames: IntArray) -> Curve:
    """Returns labels of an episode at `frames`: linearly interpolated between those there are, elsewhere NaN."""
    known = sorted((frame, value) for (episode, frame), value in labels.items() if episode == number)
    return filled(frames, [frame for frame, _ in known], [value for _, value in known])


def _worth(labels: RecordedLabels, number: int, curve: Curve) -> float:
    """Returns the judge's score of a whole episode, else its last known progress; NaN if it has neither."""
    if number in labels.success:
        return labels.success[number]
    known = curve[np.isfinite(curve)]
    return float(known[-1]) if len(known) else float("nan")
