import math

import pytest

from rlvlm.algorithms.policy_gradient.monitors import (
    PolicyCollapsed,
    ReadableMonitor,
    action_entropy,
    repeated_pairs,
    same_thought_share,
)
from rlvlm.core import metrics


def replies(unreadable: float, cut: float = 0.0) -> dict[str, float]:
    return {metrics.REPLY_INVALID: unreadable, metrics.REPLY_CUT: cut}


def test_repetition_by_hand():
    assert repeated_pairs([1, 2, 1, 2, 1]) == pytest.approx(0.5)  # pairs 12 21 12 21: two of four are new
    assert repeated_pairs([7]) == 0


def test_one_thought_for_three_of_four_images():
    turns = [("left", b"a"), ("left", b"b"), ("left", b"c"), ("right", b"d"), ("left", b"a")]
    assert same_thought_share(turns) == 0.75
    assert same_thought_share(turns[:1]) == 0
    assert same_thought_share([("", b"a"), ("", b"b")]) == 0


def test_a_run_stops_where_a_limit_is_set(caplog):
    ReadableMonitor(0.0).check(replies(0.8))
    ReadableMonitor(0.5).check(replies(0.5))
    with pytest.raises(PolicyCollapsed, match="60% of the replies of a rollout cannot be read"):
        ReadableMonitor(0.5).check(replies(0.6))
    assert not caplog.records


def test_a_run_whose_replies_are_almost_all_unreadable_warns_once(caplog):
    monitor = ReadableMonitor(0.0)
    for share in (0.95, 1.0, 0.2, 0.93):
        monitor.check(replies(share))
    assert [record.getMessage()[:3] for record in caplog.records] == ["95%", "93%"], "again once it had been better"
    assert "more --sft.turns" in caplog.text
    monitor.check(replies(0.1))
    monitor.check(replies(1.0, cut=0.9))
    assert "a larger --algo.max-reply-tokens" in caplog.text


def test_entropy_of_a_coin_and_of_nothing():
    assert action_entropy([0, 1, 0, 1, None]) == pytest.approx(math.log(2))
    assert action_entropy([3, 3]) == 0
    assert action_entropy([None]) == 0
