"""How often the range of the expected success holds judges that were left out: `python benchmarks/expected_success.py`.

Each run of the curve (`rlvlm/judge_bench/quality.csv`), whose judges err at random, with its judge left out of the
curve; then each judge that was trained with beside it (`trained.csv`), pocket judges of few training steps and judges
that a policy can fool, with its own error left out of the range. `--more FILE` adds rows that are in neither.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from rlvlm.judge_bench.prediction import TRAINED_FILE, fit_curves, read_curve


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is counted."""

    more: Path | None = None
    """CSV with the columns of `trained.csv`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A run, and what was expected without its judge."""

    name: str
    success: float
    expected: float
    low: float
    high: float

    @property
    def is_held(self) -> bool:
        """Whether the range holds the run."""
        return self.low <= self.success <= self.high


def of_curve(runs: Sequence[Mapping[str, str]], trained: Sequence[Mapping[str, str]]) -> list[LeftOut]:
    """Returns each run of the curve, predicted from those with other judges."""
    found = []
    for run in runs:
        key, worth = (run["task"], run["kind"]), float(run["worth"])
        others = [each for each in runs if ((each["task"], each["kind"]), each["worth"]) != (key, run["worth"])]
        own = [row for row in trained if (row["task"], row["kind"]) == key]
        expected, low, high = fit_curves(others)[key].expected(worth, worth, worth, own)
        name = f"{run['task']}, worth {worth:.2f}, seed {run['seed']}"
        found.append(LeftOut(name=name, success=float(run["success"]), expected=expected, low=low, high=high))
    return found


def of_trained(
    rows: Sequence[Mapping[str, str]], runs: Sequence[Mapping[str, str]], trained: Sequence[Mapping[str, str]]
) -> list[LeftOut]:
    """Returns each run with a judge that is no part of the curve, predicted from it and from all other judges."""
    curves, found = fit_curves(runs), []
    for row in rows:
        key = row["task"], row["kind"]
        others = [each for each in trained if (each["task"], each["kind"]) == key and each["judge"] != row["judge"]]
        worth, *ends = (float(row[name]) for name in ("worth", "low", "high"))
        expected, low, high = curves[key].expected(worth, ends[0], ends[1], others)
        low = 0.0 if row["fooled"] == "1" else low  # as `predict_row` says
        name = f"{row['task']}, {row['judge']}, seed {row['seed']}"
        found.append(LeftOut(name=name, success=float(row["success"]), expected=expected, low=low, high=high))
    return found


def coverage(found: Sequence[LeftOut]) -> float:
    """Returns the share of runs that their ranges hold."""
    return float(np.mean([run.is_held for run in found]))


def main(settings: Settings) -> None:
    """Prints both counts, and the runs beside them."""
    runs, trained = read_curve(), read_curve(TRAINED_FILE)
    parts = {"runs of the curve": of_curve(runs, trained), "judges beside it": of_trained(trained, runs, trained)}
    if settings.more is not None:
        parts["more judges"] = of_trained(read_curve(settings.more), runs, trained)
    for name, found in parts.items():
        widths = [run.high - run.low for run in found]
        error = np.mean([abs(run.expected - run.success) for run in found])
        held = sum(run.is_held for run in found)
        sys.stdout.write(
            f"{name}: {held} of {len(found)} ({coverage(found):.0%}) held; "
            f"width {np.mean(widths):.2f}, at least {min(widths):.2f}; mean error {error:.2f}\n"
        )
        for run in found:
            if not run.is_held or name != "runs of the curve":
                mark = "" if run.is_held else "  MISSED"
                reach = f"{run.expected:.2f} ({run.low:.2f} to {run.high:.2f})"
                sys.stdout.write(f"  {run.name}: {run.success:.2f}, expected {reach}{mark}\n")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
