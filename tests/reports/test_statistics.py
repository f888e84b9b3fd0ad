import numpy as np
import pytest

from rlvlm.reports.statistics import (
    Estimate,
    estimate,
    estimated_lead,
    interquartile_mean,
    resampled_means,
)


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([7.0], 7.0),
        ([0.0, 1.0], 0.5),
        ([0.0, 1.0, 2.0, 9.0], 1.5),  # the outer quarter on each side is one value
        ([0.0, 1.0, 5.0], (0.25 * 0 + 1.0 + 0.25 * 5) / 1.5),
        ([100.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, -50.0], 3.0),
    ],
)
def test_the_middle_half_is_averaged(values: list[float], mean: float) -> None:
    assert interquartile_mean(values) == pytest.approx(mean)


def test_it_is_averaged_along_the_axis_asked_for() -> None:
    values = np.array([[0.0, 10.0], [1.0, 11.0], [2.0, 12.0], [9.0, 99.0]])
    np.testing.assert_allclose(interquartile_mean(values, axis=0), [1.5, 11.5])


def test_two_runs_are_drawn_in_their_four_ways() -> None:
    """Of runs 0 and 1, a draw of two gives the mean 0, 0.5 or 1, with chances 1/4, 1/2, 1/4."""
    means = resampled_means([np.array([0.0, 1.0])], np.random.default_rng(0), resamples=20_000)
    values, counts = np.unique(means, return_counts=True)
    np.testing.assert_allclose(values, [0.0, 0.5, 1.0])
    np.testing.assert_allclose(counts / 20_000, [0.25, 0.5, 0.25], atol=0.02)


def test_each_task_is_drawn_from_itself() -> None:
    """With one run per task every draw is the same: only runs of the same task stand in for one another."""
    strata = [np.array([0.0]), np.array([1.0])]
    assert estimate(strata, np.random.default_rng(0)) == Estimate(value=0.5, low=0.5, high=0.5)
    mixed = estimate([np.array([0.0, 1.0])], np.random.default_rng(0))
    assert (mixed.value, mixed.low, mixed.high) == (0.5, 0.0, 1.0)


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Of 200 samples of 12 runs from a normal around 3, about 95 % of the intervals hold 3 (bootstrap: a bit fewer)."""
    rng = np.random.default_rng(1)
    found = [estimate([rng.normal(3, 1, 12)], rng) for _ in range(200)]
    assert 0.86 <= np.mean([number.low <= 3 <= number.high for number in found]) <= 0.99


def test_a_lead_is_the_difference_and_turns_with_the_sides() -> None:
    left, right = [np.array([0.9, 1.0, 1.0])], [np.array([0.0, 0.1, 0.0])]
    lead = estimated_lead(left, right, np.random.default_rng(0))
    back = estimated_lead(right, left, np.random.default_rng(0))
    assert lead.value == pytest.approx(-back.value) and lead.excludes_zero and back.excludes_zero
    assert 0.8 < lead.low <= lead.value <= lead.high <= 1.0
    assert not estimated_lead(left, left, np.random.default_rng(0)).excludes_zero
