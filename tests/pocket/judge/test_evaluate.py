import numpy as np
import pytest

from rlvlm.core.judging import Label, Stamp, Status, Verdict
from rlvlm.pocket.judge.evaluate import draw_balanced_pairs, grade, measure, table_of
from rlvlm.pocket.scenes.pairs import Scenes

STAMP = Stamp(judge="test", revision="", prompt="direct/1", decoding="")
STATUS = {Label.LEFT: Status.OK, Label.RIGHT: Status.OK, Label.TIE: Status.NO_PREFERENCE, None: Status.INVALID}


def say(*labels):
    return [Verdict(status=STATUS[label], label=label, stamp=STAMP) for label in labels]


class BrightnessJudge:
    """Prefers the brighter image."""

    stamp = STAMP

    def compare(self, queries):
        gaps = [float(query.right.mean()) - float(query.left.mean()) for query in queries]
        return say(*(Label.TIE if gap == 0 else Label.RIGHT if gap > 0 else Label.LEFT for gap in gaps))

    def score(self, clips):
        raise NotImplementedError


def make_scenes(num_pictures=256):
    progress = np.linspace(0, 1, num_pictures, dtype=np.float32)
    images = np.broadcast_to(np.arange(num_pictures, dtype=np.uint8)[:, None, None, None], (num_pictures, 2, 2, 3))
    return Scenes(
        task="greys",
        name="all",
        goal="brighten it",
        phrase="it is {percent}% bright",
        images=images,
        progress=progress,
        frames=np.arange(num_pictures),
    )


def test_shares_worked_by_hand():
    graded = grade(
        np.array([0.95, -0.95, 0.05, 0.05], np.float32),
        say(Label.RIGHT, Label.RIGHT, Label.TIE, None),
        say(Label.LEFT, Label.RIGHT, Label.TIE, None),
    )
    assert graded["right"] == 0.5
    assert graded["undecided"] == graded["unread"] == 0.25
    assert graded["swapped"] == 0.75
    assert graded["pairs_by_bin"] == (2, 0, 0, 0, 0, 0, 0, 0, 0, 2)
    assert graded["right_by_bin"][9] == 0.5
    assert np.isnan(graded["right_by_bin"][0])
    assert graded["undecided_by_bin"][0] == 0.5


def test_balanced_pairs_fill_all_bins_about_equally():
    scenes = make_scenes()
    pairs = draw_balanced_pairs(scenes, 200, np.random.default_rng(0))
    gaps = np.abs(scenes.progress[pairs[:, 0]] - scenes.progress[pairs[:, 1]])
    assert np.histogram(gaps, 10, (0, 1))[0] == pytest.approx([20] * 10, abs=6)


def test_a_perfect_judge_gets_full_marks():
    scenes = make_scenes()
    result = measure(BrightnessJudge(), scenes, "balanced", draw_balanced_pairs(scenes, 100, np.random.default_rng(0)))
    assert result.right == result.swapped == 1.0
    assert result.unread == 0.0
    assert table_of([result]).row_count == 1
