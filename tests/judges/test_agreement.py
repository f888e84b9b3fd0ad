import math

import numpy as np
import pytest
from scipy.stats import rankdata

from rlvlm.judges.agreement import (
    area_interval,
    area_under_curve,
    average_ranks,
    best_threshold,
    calibration_error,
    kept_leads,
    wilson_interval,
)


def test_area_by_hand():
    # successes score .9 and .4, failures .1, .4 and .8: of six pairs four are in order and one is a tie
    assert area_under_curve([0.9, 0.4, 0.1, 0.4, 0.8], [1, 1, 0, 0, 0]) == pytest.approx((3 + 1.5) / 6)
    assert area_under_curve([0.1, 0.9], [1, 0]) == 0
    assert math.isnan(area_under_curve([0.1, 0.9], [1, 1]))


@pytest.mark.parametrize("count", [0, 1, 2, 75])
def test_ranks_are_scipys(count):
    rng = np.random.default_rng(count)
    for values in (rng.random(count), rng.integers(3, size=count).astype(float), np.full(count, 2.0)):
        np.testing.assert_array_equal(average_ranks(values), rankdata(values))
    assert np.isnan(average_ranks([1.0, np.nan])).all()


def test_threshold_by_hand():
    # successes .9, .7 and .3, failures .1, .2 and .4: from .55 on two of three and none; from .25 on all and one
    assert best_threshold([0.9, 0.7, 0.3, 0.1, 0.2, 0.4], [1, 1, 1, 0, 0, 0]) == pytest.approx((0.25, 2 / 3))
    assert best_threshold([0.5, 0.5], [1, 0]) == (0.5, 0)
    # fourteen successes near 1 and one at 0.004: the middle, and not 0.0025 in the noise of the failures
    threshold, youden = best_threshold([0.98] * 14 + [0.004] + [0.001] * 40, [1] * 15 + [0] * 40)
    assert threshold == pytest.approx((0.0025 + 0.492) / 2) and youden == 1
    assert best_threshold([0.1, 0.9], [1, 0]) == pytest.approx((0.1, 0))  # it has them the wrong way round


def test_calibration_by_hand():
    # one bin: mean score .8, three of four true: off by .05; another: score .2, none true: off by .2
    assert calibration_error([0.8, 0.8, 0.8, 0.8], [1, 1, 1, 0]) == pytest.approx(0.05)
    assert calibration_error([0.8] * 4 + [0.2] * 4, [1, 1, 1, 0] + [0] * 4) == pytest.approx(0.125)
    assert calibration_error([1.0, 0.0], [1, 0]) == 0


def test_wilson_by_hand():
    low, high = wilson_interval(8, 10, confidence=math.erf(2 / math.sqrt(2)))  # two standard deviations
    assert low == pytest.approx((0.8 + 0.2 - 2 * math.sqrt(0.016 + 0.01)) / 1.4)
    assert high == pytest.approx((0.8 + 0.2 + 2 * math.sqrt(0.016 + 0.01)) / 1.4)
    assert wilson_interval(200, 200) == (pytest.approx(0.9811, abs=1e-3), 1.0)
    assert wilson_interval(0, 5)[0] == 0


def test_the_interval_of_an_area_is_that_of_its_paper():
    """Hanley and McNeil 1982, their example: 0.893 of 51 abnormal and 58 normal images, standard error 0.032."""
    low, high = area_interval(0.893, 51, 58)
    assert (high - low) / (2 * 1.96) == pytest.approx(0.0325, abs=2e-4) and (low + high) / 2 == pytest.approx(0.893)
    assert area_interval(1.0, 30, 30)[0] > 0.95 and area_interval(0.107, 58, 51)[1] == pytest.approx(1 - low, abs=0.01)


def test_leads_that_controls_keep_by_hand():
    # above the ordinary 0.2: leads of 0.4, 0.4, 0.1 and none; the controls keep 0.3, 0.1 and all
    assert kept_leads([0.6, 0.6, 0.3, 0.2], [0.5, 0.3, 0.3, 0.9], 0.2) == (2, 3)
    assert kept_leads([], [], []) == (0, 0)
