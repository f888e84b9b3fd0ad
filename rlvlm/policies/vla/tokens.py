"""OpenVLA's action tokens, reproduced exactly: numbers to bins, bins to token ids, normalised actions to the env's
units, the probability of each bin, and sampling.

Source: Kim et al. 2024, arXiv:2406.09246 (OpenVLA), and the published checkpoints' `dataset_statistics.json`.

A number in [-1, 1] falls into one of 256 bins between 256 evenly spaced edges: `bin` b is `digitize`'s b + 1, and its
token is 31999 - b, so that a higher token is a more negative action. There are only 255 intervals: bin 255 is the
single number 1. It decodes to the middle of interval 254, as bin 254 does: both mean the same action, so their
probabilities are added in sampling: in float32, over exactly the 256 bins, at one temperature.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlvlm.core.steps import FloatArray
from rlvlm.policies.vla.used_range import used_range

NUM_BINS = 256
ALIAS, TOP_BIN = 255, 254
"""Bin 255 means the same action as bin 254."""
VOCABULARY = 32_000
"""Token ids of Llama 2 without padding; action tokens are the last 256, 31744 to 31999."""
_EDGES = np.linspace(-1.0, 1.0, NUM_BINS)
CENTRES: FloatArray = ((_EDGES[:-1] + _EDGES[1:]) / 2).astype(np.float32)
"""[255] numbers to which bins decode."""


def encode(actions: FloatArray) -> NDArray[np.int64]:
    """Returns bins, 0 to 255, of normalised actions of any shape; values outside [-1, 1] count as its edges."""
    return np.digitize(np.clip(actions, -1.0, 1.0), _EDGES).astype(np.int64) - 1


def decode(bins: NDArray[np.int64]) -> FloatArray:
    """Returns the normalised actions for `bins` of any shape."""
    return CENTRES[np.clip(bins, 0, TOP_BIN)]


def ids_of_bins(bins: NDArray[np.int64], num_words: int = VOCABULARY) -> NDArray[np.int64]:
    """Returns token ids of `bins`: bin 0 is the last of the tokenizer's `num_words` ids. Llama 2's are 31744 to
    31999.
    """
    return num_words - 1 - bins


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionScale:
    """Scale of normalised actions in the env's units: quantiles of the demonstrations' actions."""

    low: tuple[float, ...]
    """1st percentile of each dimension, decoded from -1."""
    high: tuple[float, ...]
    """99th percentile of each dimension, decoded from 1."""
    scaled: tuple[bool, ...]
    """For each dimension, whether it is scaled; the others (the gripper) are in [0, 1] in both."""

    def __post_init__(self) -> None:
        if not len(self.low) == len(self.high) == len(self.scaled):
            raise ValueError(f"low, high and scaled need one entry each per dimension, got {self}")
        if not np.isfinite([*self.low, *self.high]).all():
            raise ValueError(f"low and high must be finite, got {self.low} and {self.high}")
        if any(low > high for low, high in zip(self.low, self.high, strict=True)):
            raise ValueError(f"low must not be above high, got {self.low} and {self.high}")

    def to_env(self, normalised: FloatArray) -> FloatArray:
        """Returns `[..., A]` in the env's units: (a + 1) / 2 * (high - low + 1e-8) + low if scaled."""
        low, high = np.array(self.low), np.array(self.high)
        scaled = 0.5 * (normalised + 1.0) * (high - low + 1e-8) + low
        return np.where(self.scaled, scaled, normalised).astype(np.float32)

    def from_env(self, actions: FloatArray) -> FloatArray:
        """Returns `[..., A]` normalised and clipped to [-1, 1]: 2 (a - low) / (high - low + 1e-8) - 1 if scaled."""
        low, high = np.array(self.low), np.array(self.high)
        normalised = np.clip(2.0 * (actions - low) / (high - low + 1e-8) - 1.0, -1.0, 1.0)
        return np.where(self.scaled, normalised, actions).astype(np.float32)

    def share_used(self, least: FloatArray, most: FloatArray) -> FloatArray:
        """Returns [A], the share of the range `least` to `most` [A] between `low` and `high`; 1 if not scaled."""
        return np.where(self.scaled, (np.array(self.high) - np.array(self.low)) / (most - least), 1.0)

    @classmethod
    def of_actions(cls, actions: FloatArray, scaled: tuple[bool, ...]) -> "ActionScale":
        """Returns the scale of demonstrated `actions` [N, A] in the env's units."""
        low, high = used_range(actions)
        return cls(low=tuple(low.tolist()), high=tuple(high.tolist()), scaled=scaled)

    @classmethod
    def read(cls, statistics: str, key: str, part: str = "action") -> "ActionScale":
        """Reads the scale in the text of a checkpoint's `dataset_statistics.json`.

        Args:
            statistics: text of the file.
            key: name of the data set in it, OpenVLA's `unnorm_key`, e.g. `libero_10_no_noops`.
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
        """Returns the text of a `dataset_statistics.json` with this scale under `key`."""
        action = {"q01": list(self.low), "q99": list(self.high), "mask": list(self.scaled)}
        return json.dumps({key: {"action": action}}, indent=1)


def log_distribution(logits: Tensor, temperature: float) -> Tensor:
    """Returns log-probabilities `[..., 255]` of the decoded actions, from logits `[..., 256]`, float32, nats."""
    # log p(top) = log(p(254) + p(255)): both decode to the same action
    every = torch.log_softmax(logits.float() / temperature, dim=-1)
    top = torch.logaddexp(every[..., TOP_BIN], every[..., ALIAS])
    return torch.cat([every[..., :TOP_BIN], top[..., None]], dim=-1)


def log_probs_of(logits: Tensor, bins: Tensor, temperature: float) -> Tensor:
    """Returns log-probabilities `[...]` of the actions of `bins` `[...]`, float32, nats.

    Equals `log_distribution` indexed by `bins`, without computing a second table.
    """
    scaled = logits.float() / temperature
    chosen = scaled.gather(-1, bins.clamp(max=TOP_BIN)[..., None])[..., 0]
    chosen = torch.where(bins >= TOP_BIN, torch.logaddexp(scaled[..., TOP_BIN], scaled[..., ALIAS]), chosen)
    return chosen - scaled.logsumexp(dim=-1)


def draw_bins(
    logits: Tensor, temperature: float, generator: torch.Generator, shared: int = 1, explored: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Samples one bin for each token, with its log-probability.

    Args:
        logits: [..., 256].
        temperature: temperature > 0.
        generator: generator on the CPU, for uniform numbers.
        shared: number of equal parts of the last row of tokens that use the same random numbers: with the env steps of
            a chunk as parts, each dimension of its actions deviates in the same direction in all of them. Each token
            has the same distribution for any value.
        explored: [the last row of tokens] bool, those that are sampled; for the others the most likely one is taken
            with log-probability 0, because no other is possible. None: all are sampled.

    Returns:
        Bins [...] from 0 to 254, and their log-probabilities [...], float32.
    """
    scaled = logits.float() / temperature
    # inverse of the cumulative distribution: the first bin whose running sum exceeds a uniform number
    scaled -= scaled.amax(dim=-1, keepdim=True)
    rising = torch.exp(scaled).cumsum_(dim=-1)  # in place: these are the largest tensors of a rollout
    total = rising[..., -1:]
    *rows, num = logits.shape[:-1]
    uniform = torch.rand((*rows, num // shared), generator=generator).repeat((1,) * len(rows) + (shared,))
    uniform = uniform.to(logits.device)
    bins = torch.searchsorted(rising, uniform[..., None] * total).clamp(max=TOP_BIN)  # the alias becomes the top
    chosen = scaled.gather(-1, bins)
    top = torch.logaddexp(scaled[..., TOP_BIN], scaled[..., ALIAS])[..., None]
    log_probs = (torch.where(bins == TOP_BIN, top, chosen) - total.log())[..., 0]
    log_probs.clamp_(max=-torch.finfo(log_probs.dtype).tiny)  # a certain outcome was sampled all the same
    bins = bins[..., 0]
    if explored is not None and not explored.all():
        explored = explored.to(logits.device)
        bins = torch.where(explored, bins, likeliest_bins(logits))
        log_probs = torch.where(explored, log_probs, 0.0)
    return bins, log_probs


def likeliest_bins(logits: Tensor) -> Tensor:
    """Returns the bin `[...]` from 0 to 254 of the most likely action at temperature 1."""
    return log_distribution(logits, 1.0).argmax(dim=-1)


def entropy(logits: Tensor, temperature: float) -> Tensor:
    """Returns the entropy `[...]` of each token's action, nats."""
    distribution = log_distribution(logits, temperature)
    return -(distribution.exp() * distribution).sum(dim=-1)
