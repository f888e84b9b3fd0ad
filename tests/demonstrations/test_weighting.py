from dataclasses import replace

import numpy as np
import pytest

from rlvlm.core.errors import UsageError
from rlvlm.demonstrations.recorded_labels import RecordedLabels
from rlvlm.demonstrations.weighting import (
    MAX_WEIGHT,
    TEMPERATURE,
    Weights,
    better_than_expected,
    exponentiated,
    n_step_advantages,
    progress_weights,
    table_advantages,
    weigh,
)


def labels(progress: dict[int, list[float | None]], success: dict[int, float] | None = None) -> RecordedLabels:
    known = {
        (episode, frame): value
        for episode, values in progress.items()
        for frame, value in enumerate(values)
        if value is not None
    }
    return RecordedLabels(dataset="d", judge="j", progress=known, success=success or {})


def test_gains_in_progress_by_hand():
    # gains .2, 0, -.2 and, of the last frame, that before it; mean -.05, taken as 0; soft(0) = 2 s / 4 s
    (weights,) = progress_weights([np.array([0.0, 0.2, 0.2, 0.0])])
    np.testing.assert_allclose(weights, [1, 0.5, 0, 0], atol=1e-5)
    (rising,) = progress_weights([np.array([0.0, 0.3, 0.6, 0.9])])
    assert rising.tolist() == [1, 1, 1, 1], "the last answer of an episode that got nearer teaches to finish"
    (unknown,) = progress_weights([np.array([0.0, np.nan, 0.5, 0.9])])
    assert unknown.tolist() == [1, 1, 1, 1]


def test_advantages_by_hand():
    # of like progress (a bin each) the worths are 1 and 0: the value is .5, the advantages .5 and -.5
    found = exponentiated(table_advantages([np.array([0.05, 0.55]), np.array([0.05])], np.array([1.0, 0.0])))
    np.testing.assert_allclose(found[0], [np.exp(0.5 / TEMPERATURE), 1.0])
    np.testing.assert_allclose(found[1], [np.exp(-0.5 / TEMPERATURE)])
    assert MAX_WEIGHT > found[0][0]
    unknown = exponentiated(table_advantages([np.array([0.1]), np.array([0.1])], np.array([np.nan, 0.4])))
    assert [part.tolist() for part in unknown] == [[0.0], [1.0]]


VALUES = ([0.5, 0.4, 0.8, 0.9], [0.5, 0.6], [0.5, 0.3, 0.1], [0.5])
"""Four episodes: a success that first went wrong, a failure, one without an outcome, and a lucky one."""


def test_advantages_of_two_answers_by_hand():
    """After two more answers .8 and .9 are left of the first, and then its outcome, 1."""
    found = n_step_advantages([np.array(values) for values in VALUES], {0: 1.0, 1: 0.0, 3: 1.0}, 2)
    by_hand = ([0.8 - 0.5, 0.9 - 0.4, 1 - 0.8, 1 - 0.9], [-0.5, -0.6], [0.1 - 0.5, np.nan, np.nan], [0.5])
    for own, expected in zip(found, by_hand, strict=True):
        np.testing.assert_allclose(own, expected)
    to_the_end = n_step_advantages([np.array(values) for values in VALUES], {0: 1.0, 1: 0.0, 3: 1.0}, 0)
    np.testing.assert_allclose(np.concatenate(to_the_end[:2]), [0.5, 0.6, 0.2, 0.1, -0.5, -0.6])
    assert np.isnan(to_the_end[2]).all()


def test_labels_with_a_value_weigh_each_answer_by_its_own_advantage():
    frames = {(number, frame): value for number, own in enumerate(VALUES) for frame, value in enumerate(own)}
    given = replace(labels({}, {0: 0.9}), values=frames, outcomes={0: 1.0, 1: 0.0, 3: 1.0})
    lengths = [len(values) for values in VALUES]
    weights = weigh(given, lengths, "advantage", 0.5, 2).values
    expected = np.exp(np.array([0.3, 0.5, 0.2, 0.1, -0.5, -0.6, -0.4, -np.inf, -np.inf, 0.5]) / TEMPERATURE)
    np.testing.assert_allclose(weights, expected / expected.mean(), rtol=1e-5)
    told = weigh(given, lengths, "condition", 0.5, 2).judged
    np.testing.assert_array_equal(told, [1, 1, 0, 0, 0, 0, 0, np.nan, np.nan, 1])
    # a person's answers are good ones, whatever the value expects of the moment at which one took over
    helped = replace(given, corrected={(1, 0): 1.0, (2, 1): 1.0, (0, 0): 0.0})
    told = weigh(helped, lengths, "condition", 0.5, 2).judged
    np.testing.assert_array_equal(told, [1, 1, 0, 0, 1, 0, 0, 1, np.nan, 1])
    upper = replace(given, upper_values=frames)
    one = np.exp(np.array([-0.1, 0.4, 0.1, 0.1, 0.1, -0.6, -0.2, -0.2, -np.inf, 0.5]) / TEMPERATURE)
    np.testing.assert_allclose(weigh(upper, lengths, "iql", 0.5).values, one / one.mean(), rtol=1e-5)
    with pytest.raises(UsageError, match="iql needs a value, which these labels lack"):
        weigh(given, lengths, "iql", 0.5)


def test_at_most_two_in_five_count_as_better_than_expected():
    worth = np.array([1.0, 0.8, 0.0, 0.0, np.nan])
    found = better_than_expected(
        table_advantages([np.array([0.05, 0.15])] * 5, worth)
    )  # means .45 in both bins of progress
    assert found[:8].tolist() == [1, 1, 1, 1, 0, 0, 0, 0] and np.isnan(found[8:]).all()
    few = better_than_expected(table_advantages([np.array([0.05])] * 10, np.arange(10) / 10))
    assert few.tolist() == [0] * 6 + [1] * 4


def test_weights_know_their_episodes_when_some_are_left_out():
    weights = weigh(labels({}, {0: 0.9, 2: 0.2}), [2, 0, 1], "preference", 0.5)
    assert weights.episodes.tolist() == [0, 0, 2] and weights.judged.tolist() == pytest.approx([0.9, 0.9, 0.2])
    assert weights.is_good().tolist() == [True, True, False]
    assert weigh(labels({}, {0: 0.9, 2: 0.2}), [2, 0, 1], "filter", 0.5).is_good().tolist() == [True, True, False]
    again = Weights.of_rows(weights.rows()).at([0, 2])
    assert again.episodes.tolist() == [0, 2] and again.values.tolist() == [1, 1]


def test_the_weights_are_reported():
    two = labels({0: [0.0, 0.5], 1: [0.0, 0.1]}, {0: 0.9, 1: 0.2})
    weights = weigh(two, [2, 2], "filter", 0.5)
    assert weights.values.tolist() == [2, 2, 0, 0] and weights.effective == 2 and weights.counted == 0.5
    assert "2 of 4 answers' worth, 50% count, the largest 2.0" in weights.told()
    assert weigh(two, [0, 2], "progress", 0.5).values.tolist() == [1, 1], "an episode of which nothing is learned"
    assert weigh(labels({0: [0.1, None, 0.9]}), [3], "filter", 0.5).values.tolist() == [1, 1, 1], "by its last progress"


@pytest.mark.parametrize(
    ("given", "weighting", "message"),
    [
        (labels({0: [0.0, 0.1]}, {0: 0.1}), "filter", "leaves nothing to learn from"),
        (labels({0: [0.5, 0.1]}), "progress", "leaves nothing to learn from"),
        (labels({}, {0: 1.0}), "progress", "no progress of these episodes"),
        (labels({}), "advantage", "of no episode what it is worth"),
        (labels({}), "condition", "of no episode what it is worth"),
        (labels({0: [0.5, 0.5]}), "condition", "nothing to tell apart"),
        (labels({}), "preference", "leaves nothing to learn from"),
    ],
)
def test_weights_that_teach_nothing_are_refused(given, weighting, message):
    with pytest.raises(UsageError, match=message):
        weigh(given, [2], weighting, 0.5)
