"""Converts label files of the reference implementation into a store. Nothing in them is executed.

Source: RL-VLM-F (Wang et al. 2024, arXiv:2402.03681), its cached VLM labels: a pickled list of seven arrays for each
feedback session: pairs of images side by side [N, H, 2W, 3] uint8, true labels [N, 1], the VLM's labels [N, 1], states
and actions of both sides, and true rewards of both sides [N, L, 1]; undecided labels were removed before. Departure:
states and actions are left out; a label store keeps only the judge's images and answers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlvlm.core.judging import Label, Query, Stamp, Status, Verdict
from rlvlm.core.steps import FloatArray, Frames
from rlvlm.labels.records import Truth, describe
from rlvlm.labels.store import LabelStore
from rlvlm.plugins.pickles.pickles import RefusedPickle, read_pickled_arrays

PROMPT = "reference"
"""Prompt in the stamp: the text was the reference's, not a version of ours."""
_NUM_ARRAYS = 7
_LABELS = {0: Label.LEFT, 1: Label.RIGHT, -1: Label.TIE}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceSession:
    """Labels of one file."""

    left: Frames
    """[N, H, W, 3] uint8."""
    right: Frames
    """[N, H, W, 3] uint8."""
    labels: NDArray[np.int64]
    """[N] 0 left, 1 right, -1 undecided."""
    true_labels: NDArray[np.int64]
    """[N] true labels according to the file."""
    returns: FloatArray
    """[N, 2] true returns of both sides."""


def read_reference(file: Path) -> ReferenceSession:
    """Reads the labels in one pickled file of the reference, which is untrusted.

    Raises:
        RefusedPickle: it is anything else; says what was found.
    """
    arrays = read_pickled_arrays(file)
    if len(arrays) != _NUM_ARRAYS:
        raise RefusedPickle(f"{_NUM_ARRAYS} arrays are wanted, got {len(arrays)}")
    images, true_labels, labels, _, _, *rewards = arrays
    # every shape is checked before anything is stored: half a session in a store would look complete
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or images.shape[2] % 2:
        raise RefusedPickle(f"pairs of images are [N, H, 2W, 3] uint8, got {images.shape} {images.dtype}")
    count, width = len(images), images.shape[2] // 2
    if any(len(array) != count for array in (true_labels, labels, *rewards)):
        raise RefusedPickle(f"{count} pairs need as many labels and rewards")
    returns = np.stack([_sums(side, count) for side in rewards], axis=1)
    return ReferenceSession(
        left=images[:, :, :width],
        right=images[:, :, width:],
        labels=_codes(labels, count),
        true_labels=_codes(true_labels, count),
        returns=returns,
    )


def import_reference(files: Sequence[Path], store: LabelStore, *, goal: str, judge: str) -> Counter[str]:
    """Adds the labels of the files to a store, and returns counts of them.

    Args:
        files: files of one run of the reference.
        store: store to fill.
        goal: goal in that run's questions; the files do not say.
        judge: name of the VLM; the files do not say.

    Returns:
        `labels`; `correct` and `wrong` by the true returns; `disagrees`: true labels of a file that its own rewards
        contradict.

    Raises:
        RefusedPickle: a file is anything else; those before it are in the store.
    """
    stamp = Stamp(judge=f"imported:{judge}", revision="", prompt=PROMPT, decoding="")
    counts: Counter[str] = Counter()
    for file in files:
        session = read_reference(file)
        described = [
            describe(Query(goal=goal, left=left[None], right=right[None]))
            for left, right in zip(session.left, session.right, strict=True)
        ]
        questions = [question for question, _ in described]
        labels = [_LABELS[int(code)] for code in session.labels]
        verdicts = [Verdict(status=Status.of(label), label=label, stamp=stamp) for label in labels]
        # images before the answers about them, and the truth after: after a crash, everything stored is complete
        store.keep_images([image for _, shown in described for image in shown])
        store.add_answers(list(zip(questions, verdicts, strict=True)))
        store.add_truths(
            Truth(question=question.id, returns=(float(left), float(right)))
            for question, (left, right) in zip(questions, session.returns, strict=True)
        )
        gains = session.returns[:, 1] - session.returns[:, 0]
        is_checked = (session.labels >= 0) & (gains != 0)
        is_right = (session.labels == 1) == (gains > 0)
        counts["labels"] += len(session.labels)
        counts["correct"] += int((is_checked & is_right).sum())
        counts["wrong"] += int((is_checked & ~is_right).sum())
        counts["disagrees"] += int(((session.true_labels == 1) != (gains > 0))[gains != 0].sum())
    return counts


def _codes(array: np.ndarray, count: int) -> NDArray[np.int64]:
    flat = array.reshape(-1)
    # by value, whatever number type the file has: 1.0 is a label, 0.5 is not
    if len(flat) != count or not np.isin(flat, list(_LABELS)).all():
        raise RefusedPickle("labels are 0, 1 or -1, one per pair")
    return flat.astype(np.int64)


def _sums(rewards: np.ndarray, count: int) -> FloatArray:
    """Returns [N] sums over the steps of each segment."""
    sums = rewards.reshape(count, -1).astype(np.float64).sum(axis=1)
    if not np.isfinite(sums).all():
        raise RefusedPickle("rewards are finite numbers")
    return sums.astype(np.float32)
