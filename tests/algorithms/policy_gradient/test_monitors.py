import math

import pytest

from rlvlm.algorithms.policy_gradient.monitors import (
    PolicyCollapsed,
    action_entropy,
    check_readable,
    repeated_pairs,
    same_thought_share,
)
from rlvlm.core import metrics


def test_repetition_by_hand():
    assert repeated_pairs([1, 2, 1, 2, 1]) == pytest.approx(0.5)  # pairs 12 21 12 21: two of four are new
    assert repeated_pairs([7]) == 0


def test_one_thought_for_three_of_four_images():
    turns = [("left", b"a"), ("left", b"b"), ("left", b"c"), ("right", b"d"), ("left", b"a")]
    assert same_thought_share(turns) == 0.75
    assert same_thought_share(turns[:1]) == 0
    assert same_thought_share([("", b"a"), ("", b"b")]) == 0


def test_a_run_stops_when_told_how_much_is_too_much():
    check_readable({metrics.REPLY_INVALID: 1.0}, 0.0)
    check_readable({metrics.REPLY_INVALID: 0.5}, 0.5)
    with pytest.raises(PolicyCollapsed, match="60% of the replies of a rollout cannot be read"):
        check_readable({metrics.REPLY_INVALID: 0.6}, 0.5)


def test_entropy_of_a_coin_and_of_nothing():
    assert action_entropy([0, 1, 0, 1, None]) == pytest.approx(math.log(2))
    assert action_entropy([3, 3]) == 0
    assert action_entropy([None]) == 0
