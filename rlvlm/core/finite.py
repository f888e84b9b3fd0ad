"""Numbers that must be finite: a NaN or an infinity ends a run where it comes in, before it is learned or saved."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlvlm.core.errors import NumericsError


def check_finite(what: str, fix: str, found: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> None:
    """Checks that all numbers of `found` are finite.

    Args:
        what: where they come from, for the message.
        fix: what mends it.
        found: arrays or tensors by name.
        beside: further ones that were there, whatever they are; a run leaves both in its folder.

    Raises:
        NumericsError: says how many of which are not.
    """
    arrays = {name: _array(values) for name, values in found.items()}
    counts = {name: int(np.count_nonzero(~np.isfinite(values))) for name, values in arrays.items()}
    if odd := [f"{count} of {arrays[name].size} {name}" for name, count in counts.items() if count]:
        context = {name: _array(values) for name, values in (beside or {}).items()}
        raise NumericsError(f"{what}: {', '.join(odd)} are not finite", fix, arrays | context)


def _array(values: Any) -> np.ndarray:
    if hasattr(values, "detach"):  # a tensor, on any device and of any type; this file does without torch
        values = values.detach().float().cpu().numpy()
    return np.asarray(values)
