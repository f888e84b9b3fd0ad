import math
import random

import pytest

from rlvlm.preferences.model.evidence import Evidence, log_odds


def test_the_odds_by_hand() -> None:
    # All n right: 2^n * 2 * the integral of p^n over (1/2, 1].
    assert math.exp(log_odds(8, 8)) == pytest.approx(2**9 * (1 - 0.5**9) / 9)
    assert log_odds(0, 0) == pytest.approx(0) and log_odds(10, 20) < 0 and log_odds(0, 3_000) == -math.inf


@pytest.mark.slow
def test_a_fair_coin_passes_in_fewer_runs_than_one_in_a_hundred_however_often_one_looks() -> None:
    rng, passed = random.Random(0), 0
    for _ in range(1_000):
        evidence = Evidence()
        evidence.add(rng.random() < 0.5 for _ in range(300))
        passed += evidence.is_enough
    assert passed <= 20, "10 are expected at most, with a standard deviation of 3"


def test_a_good_teacher_passes_at_once_a_poor_one_in_time_and_what_was_enough_stays_so() -> None:
    good, poor, rng = Evidence(), Evidence(), random.Random(0)
    good.add([True] * 9)
    assert good.is_enough
    good.add([False] * 50)
    assert good.is_enough and (good.num_right, good.num) == (9, 59)
    poor.add(rng.random() < 0.6 for _ in range(50))
    assert not poor.is_enough
    poor.add(rng.random() < 0.6 for _ in range(950))
    assert poor.is_enough
    again = Evidence()
    again.set_state(poor.get_state())
    assert again.get_state() == poor.get_state()
