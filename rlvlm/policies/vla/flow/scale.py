"""Normalisation of a flow policy's numbers: by mean and standard deviation, or by two quantiles."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from rlvlm.core.steps import FloatArray
from rlvlm.policies.vla.used_range import used_range

MODES = ("mean_std", "quantiles")
_CONSTANT = 1e-6
"""Spread below which a number counts as constant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Scale of a feature in the env's units. Nothing is clipped: normalised numbers may exceed 1.

    All four arrays have an entry per dimension. Where a checkpoint counts in the opposite direction, `std` is negative
    and `q99` is below `q01`.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    q01: tuple[float, ...]
    """1st percentile of each dimension."""
    q99: tuple[float, ...]
    """99th percentile of each dimension."""
    mode: str
    """mean_std: to mean 0 and standard deviation 1; quantiles: the percentiles to -1 and 1."""
    constant: float = 0.0
    """Normalised value of a dimension that never changes. LeRobot's quantiles make it -1, as the smallest value."""

    def __post_init__(self) -> None:
        columns = {"mean": self.mean, "std": self.std, "q01": self.q01, "q99": self.q99}
        if len({len(column) for column in columns.values()}) != 1:
            raise ValueError(f"mean, std, q01 and q99 need one entry each per dimension, got {columns}")
        if not all(np.isfinite(column).all() for column in columns.values()):
            raise ValueError(f"mean, std, q01 and q99 must be finite, got {columns}")
        if any(std * (high - low) < 0 for std, low, high in zip(self.std, self.q01, self.q99, strict=True)):
            raise ValueError(f"std and q99 - q01 must have the same sign in each dimension, got {columns}")
        if not np.isfinite(self.constant):
            raise ValueError(f"constant must be finite, got {self.constant}")
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")

    @property
    def centre(self) -> FloatArray:
        """[A] value that becomes 0."""
        centre = self.mean if self.mode == "mean_std" else np.add(self.q01, self.q99) / 2
        return np.asarray(centre, np.float32)

    @property
    def spread(self) -> FloatArray:
        """[A] distance from the centre that becomes 1: below 0 if the direction is opposite, 0 if it is constant."""
        spread = np.array(self.std if self.mode == "mean_std" else np.subtract(self.q99, self.q01) / 2, np.float32)
        spread[np.abs(spread) < _CONSTANT] = 0
        return spread

    def normalised(self, values: FloatArray) -> FloatArray:
        """Returns `values` [..., A], in the env's units, normalised for the network."""
        # (x - c) / s; a dimension that was constant is not scaled up
        spread = self.spread
        shift = np.where(spread == 0, np.float32(self.constant), np.float32(0))
        return ((values - self.centre) / np.where(spread == 0, 1, spread) + shift).astype(np.float32)

    def restored(self, values: FloatArray) -> FloatArray:
        """Returns the network's `values` [..., A] in the env's units; constant dimensions stay normalised."""
        return (values * self.spread + self.centre).astype(np.float32)

    @property
    def range(self) -> FloatArray:
        """[A] distance between the percentiles."""
        return np.abs(np.asarray(self.q99, np.float32) - np.asarray(self.q01, np.float32))

    def converted(self, factor: FloatArray, offset: FloatArray) -> "Scale":
        """Returns the scale of the same normalised values for `factor` * x + `offset`, both [A], in place of x."""
        moved = {name: np.multiply(getattr(self, name), factor) + offset for name in ("mean", "q01", "q99")}
        columns = {**moved, "std": np.multiply(self.std, factor)}
        return replace(self, **{name: tuple(column.tolist()) for name, column in columns.items()})

    @classmethod
    def measure(cls, values: FloatArray, mode: str) -> "Scale":
        """Measures the scale of `values` [N, A]."""
        exact = values.astype(np.float64)
        q01, q99 = used_range(values)
        columns = {"mean": exact.mean(axis=0), "std": exact.std(axis=0), "q01": q01, "q99": q99}
        found: dict[str, Any] = {name: tuple(column.tolist()) for name, column in columns.items()}
        return cls(**found, mode=mode)


def write_scales(scales: Mapping[str, Scale]) -> str:
    """Returns the JSON text of `scales` by feature name."""
    return json.dumps({name: asdict(scale) for name, scale in scales.items()})


def read_scales(text: str) -> dict[str, Scale]:
    """Reads the scales written by `write_scales`.

    Raises:
        ValueError: the text is invalid, or has numbers that no data set gives.
    """
    entries: Any = json.loads(text)
    columns = ("mean", "std", "q01", "q99")
    try:
        return {
            name: Scale(
                mode=entry["mode"],
                constant=float(entry.get("constant", 0)),
                **{column: tuple(map(float, entry[column])) for column in columns},
            )
            for name, entry in entries.items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"statistics need mean, std, q01, q99 and mode of each feature, got {text[:80]!r}") from error
