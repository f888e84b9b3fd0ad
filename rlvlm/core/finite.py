"""Checks for finite numbers: a NaN or an infinity ends a run where it occurs, before it is learned from or saved."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlvlm.core.errors import NumericsError


def check_finite(what: str, fix: str, found: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> None:
    """Checks that all numbers of `found` are finite.

    Args:
        what: origin of the numbers, for the message.
        fix: remedy, for the message.
        found: arrays or tensors by name.
        beside: further arrays at hand, finite or not; a run saves both in its folder.

    Raises:
        NumericsError: a number is not finite; says how many of which array.
    """
    arrays = {name: _array(values) for name, values in found.items()}
    counts = {name: int(np.count_nonzero(~np.isfinite(values))) for name, values in arrays.items()}
    if odd := [f"{count} of {arrays[name].size} {name}" for name, count in counts.items() if count]:
        context = {name: _array(values) for name, values in (beside or {}).items()}
        raise NumericsError(f"{what}: {', '.join(odd)} are not finite", fix, arrays | context)


def _array(values: Any) -> np.ndarray:
    if hasattr(values, "detach"):  # a tensor, on any device and of any type; this file needs no torch
        values = values.detach().float().cpu().numpy()
    return np.asarray(values)
