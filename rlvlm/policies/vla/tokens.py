"""OpenVLA's action tokens to the letter: numbers to bins, bins to token ids, normalised actions to the env's own.

Source: Kim et al. 2024, arXiv:2406.09246 (OpenVLA), and the published checkpoints' `dataset_statistics.json`.

A number in [-1, 1] falls into one of 256 bins between 256 evenly spaced edges: `bin` b holds what `digitize` calls
b + 1, and its token is 31999 - b, so that a higher token is a more negative action. There are only 255 intervals: bin
255 is the single number 1. It decodes to the middle of interval 254, as bin 254 does: two names of one action, whose
probabilities belong together (`rlvlm.policies.vla.sampling` adds them).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.steps import FloatArray

NUM_BINS = 256
ALIAS, TOP_BIN = 255, 254
"""Bin 255 means the same action as bin 254."""
VOCABULARY = 32_000
"""Of Llama 2 without padding: action tokens are its last 256 ids, 31744 to 31999."""
_EDGES = np.linspace(-1.0, 1.0, NUM_BINS)
CENTRES: FloatArray = ((_EDGES[:-1] + _EDGES[1:]) / 2).astype(np.float32)
"""[255] the numbers that bins decode to."""


def encode(actions: FloatArray) -> NDArray[np.int64]:
    """Bins, 0 to 255, of normalised actions of any shape; what lies outside [-1, 1] counts as its edge."""
    return np.digitize(np.clip(actions, -1.0, 1.0), _EDGES).astype(np.int64) - 1


def decode(bins: NDArray[np.int64]) -> FloatArray:
    """The normalised actions that `bins` of any shape stand for."""
    return CENTRES[np.clip(bins, 0, TOP_BIN)]


def token_ids(bins: NDArray[np.int64], num_words: int = VOCABULARY) -> NDArray[np.int64]:
    """Token ids of `bins`: the last of the tokenizer's `num_words` ids is bin 0. 31744 to 31999 with Llama 2's."""
    return num_words - 1 - bins


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionScale:
    """Where the numbers of normalised actions lie in the env's own units: quantiles of the demonstrations' actions."""

    low: tuple[float, ...]
    """The 1st percentile of each dimension, decoded from -1."""
    high: tuple[float, ...]
    """The 99th percentile of each dimension, decoded from 1."""
    scaled: tuple[bool, ...]
    """Which dimensions are scaled; the others (the gripper) are in [0, 1] in both."""

    def __post_init__(self) -> None:
        if not len(self.low) == len(self.high) == len(self.scaled):
            raise ValueError(f"low, high and scaled need one entry each per dimension, got {self}")
        if any(low > high for low, high in zip(self.low, self.high, strict=True)):
            raise ValueError(f"low must not be above high, got {self.low} and {self.high}")

    def to_env(self, normalised: FloatArray) -> FloatArray:
        """`[..., A]` in the env's units: (a + 1) / 2 * (high - low + 1e-8) + low where a dimension is scaled."""
        low, high = np.array(self.low), np.array(self.high)
        scaled = 0.5 * (normalised + 1.0) * (high - low + 1e-8) + low
        return np.where(self.scaled, scaled, normalised).astype(np.float32)

    def from_env(self, actions: FloatArray) -> FloatArray:
        """`[..., A]` normalised and cut to [-1, 1]: 2 (a - low) / (high - low + 1e-8) - 1 where scaled."""
        low, high = np.array(self.low), np.array(self.high)
        normalised = np.clip(2.0 * (actions - low) / (high - low + 1e-8) - 1.0, -1.0, 1.0)
        return np.where(self.scaled, normalised, actions).astype(np.float32)

    def share_used(self, least: FloatArray, most: FloatArray) -> FloatArray:
        """[A] how much of the range from `least` to `most` [A] lies between `low` and `high`; 1 where not scaled."""
        return np.where(self.scaled, (np.array(self.high) - np.array(self.low)) / (most - least), 1.0)

    @classmethod
    def of_actions(cls, actions: FloatArray, scaled: tuple[bool, ...]) -> "ActionScale":
        """The scale of demonstrations: `actions` [N, A] in the env's units."""
        low, high = np.quantile(actions.astype(np.float64), [0.01, 0.99], axis=0)
        return cls(low=tuple(low.tolist()), high=tuple(high.tolist()), scaled=scaled)

    @classmethod
    def read(cls, statistics: str, key: str, part: str = "action") -> "ActionScale":
        """The scale in the text of a checkpoint's `dataset_statistics.json`.

        Args:
            statistics: the file's text.
            key: the data set's name in it, OpenVLA's `unnorm_key`, e.g. `libero_10_no_noops`.
            part: `action`, or `proprio`, which is scaled in the same way.

        Raises:
            ValueError: there is no such key, or its entry has no quantiles of this part.
        """
        entries: Mapping[str, Any] = json.loads(statistics)
        if key not in entries:
            raise ValueError(f"dataset_statistics.json has no {key!r}; it has {', '.join(sorted(entries))}")
        bounds = entries[key].get(part, {})
        if not {"q01", "q99"} <= bounds.keys():
            raise ValueError(f"the entry {key!r} needs {part}.q01 and {part}.q99, got {sorted(bounds)}")
        scaled = bounds.get("mask", [True] * len(bounds["q01"]))
        return cls(low=tuple(bounds["q01"]), high=tuple(bounds["q99"]), scaled=tuple(map(bool, scaled)))

    def write(self, key: str) -> str:
        """The text of a `dataset_statistics.json` with this scale under `key`."""
        action = {"q01": list(self.low), "q99": list(self.high), "mask": list(self.scaled)}
        return json.dumps({key: {"action": action}}, indent=1)
