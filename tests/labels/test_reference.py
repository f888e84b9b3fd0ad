"""Label files of the reference become a store: images, labels and true returns, and nothing else."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from rlvlm.core.judging import Label
from rlvlm.labels.pickles import RefusedPickle
from rlvlm.labels.reference import import_reference, read_reference
from rlvlm.labels.store import LabelStore, open_store


def make_session(num: int = 6, seed: int = 0) -> list[np.ndarray]:
    """A session as the reference pickles it; even labels are right, odd ones wrong."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (num, 10, 24, 3), np.uint8)
    rewards = [rng.random((num, 1, 1)) for _ in range(2)]
    truth = (rewards[0] < rewards[1]).reshape(num, 1).astype(np.int64)
    labels = np.where(np.arange(num)[:, None] % 2 == 0, truth, 1 - truth)
    sides = [rng.random((num, 1, 43)) for _ in range(2)]
    return [images, truth, labels, *sides, *rewards]


def write(file: Path, session: list) -> Path:
    file.write_bytes(pickle.dumps(session, pickle.HIGHEST_PROTOCOL))
    return file


def test_a_session_becomes_labels_with_images_and_truth(tmp_path):
    session = make_session()
    store = LabelStore(tmp_path / "s")
    counts = import_reference([write(tmp_path / "a.pkl", session)], store, goal="open the drawer", judge="gemini-pro")
    assert counts == {"labels": 6, "correct": 3, "wrong": 3, "disagrees": 0}
    opened = open_store(tmp_path / "s")
    truths = opened.truths()
    for number, item in enumerate(opened.answers()):
        assert item.answer.stamp.judge == "imported:gemini-pro" and item.question.goal == "open the drawer"
        assert item.answer.label is (Label.RIGHT if session[2][number] else Label.LEFT)
        np.testing.assert_array_equal(opened.image(item.question.left[0]), session[0][number][:, :12])
        np.testing.assert_array_equal(opened.image(item.question.right[0]), session[0][number][:, 12:])
        truth = truths[item.question.id]
        assert truth.progress is None
        assert truth.values == pytest.approx((session[5][number].sum(), session[6][number].sum()))


def test_importing_twice_adds_nothing_new(tmp_path):
    file = write(tmp_path / "a.pkl", make_session())
    for _ in range(2):
        import_reference([file, file], LabelStore(tmp_path / "s"), goal="open it", judge="x")
    assert len(open_store(tmp_path / "s")) == 6


def test_segments_are_summed_and_contradictions_counted(tmp_path):
    session = make_session()
    session[5] = np.concatenate([session[5], session[5]], axis=1)  # two steps: twice the return
    session[6] = np.concatenate([session[6], session[6]], axis=1)
    session[1] = 1 - session[1]
    read = read_reference(write(tmp_path / "a.pkl", session))
    np.testing.assert_allclose(read.returns[:, 0], session[5].sum((1, 2)), rtol=1e-6)
    counts = import_reference([tmp_path / "a.pkl"], LabelStore(tmp_path / "s"), goal="open it", judge="x")
    assert counts["disagrees"] == 6


def broken() -> dict[str, list]:
    good = make_session()
    odd_width = [good[0][:, :, :-1], *good[1:]]
    return {
        "six arrays": good[:6],
        "eight arrays": [*good, good[0]],
        "no images": [good[0][..., 0], *good[1:]],
        "float images": [good[0].astype(np.float32), *good[1:]],
        "odd width": odd_width,
        "fewer labels": [*good[:2], good[2][:-1], *good[3:]],
        "label 2": [*good[:2], good[2] + 2, *good[3:]],
        "labels in two columns": [*good[:2], np.zeros((6, 2)), *good[3:]],
        "label nan": [*good[:2], good[2] * np.nan, *good[3:]],
        "reward inf": [*good[:6], good[6] * np.inf],
        "fewer rewards": [*good[:5], good[5][:-1], good[6]],
    }


@pytest.mark.parametrize("name", broken())
def test_a_file_that_contradicts_itself_is_refused(tmp_path, name):
    file = write(tmp_path / "a.pkl", broken()[name])
    with pytest.raises(RefusedPickle):
        import_reference([file], LabelStore(tmp_path / "s"), goal="open it", judge="x")
    assert not (tmp_path / "s").exists()
