"""Batches of examples that are about as long as each other, so that little of a batch is padding."""

from collections.abc import Iterator, Sequence

import numpy as np

_MEGA = 8
"""Batches that are sorted by length together: more save padding, fewer mix better."""


def grouped_by_length(
    lengths: Sequence[int], batch: int, noise: np.random.Generator, kinds: Sequence[int] | None = None
) -> Iterator[list[int]]:
    """One epoch: places of examples in batches, each place once; the last batch of a kind may be smaller.

    Args:
        lengths: [M] of each example.
        batch: examples per batch.
        noise: shuffles the examples, and then the batches.
        kinds: [M] kinds are never mixed in a batch, e.g. with and without an image; None: all are of one kind.
    """
    kinds = kinds if kinds is not None else [0] * len(lengths)
    batches: list[list[int]] = []
    for kind in sorted(set(kinds)):
        places = noise.permutation([place for place, own in enumerate(kinds) if own == kind]).tolist()
        for begin in range(0, len(places), batch * _MEGA):
            mega = sorted(places[begin : begin + batch * _MEGA], key=lambda place: lengths[place])
            batches += [mega[at : at + batch] for at in range(0, len(mega), batch)]
    for index in noise.permutation(len(batches)).tolist():
        yield batches[index]
