import numpy as np
import pytest
from tiny_episodes import pair_of, tiny_episodes, truth, verdict

from rlvlm.preferences.dataset import Comparisons
from rlvlm.preferences.queries import draw_pairs
from rlvlm.types import Label, Status

ANSWERS = [verdict(Label.LEFT), verdict(Label.TIE), verdict(Label.RIGHT), verdict(None),
           verdict(None, Status.FAILED)]  # fmt: skip


@pytest.mark.parametrize(("ties", "p_right"), [("drop", [0, 1]), ("equal", [0, 0.5, 1])])
def test_ties_train_on_demand_and_missing_answers_never(ties: str, p_right: list[float]) -> None:
    comparisons = Comparisons(ties)
    assert comparisons.add([pair_of(0.1 * n, 1.0) for n in range(5)], ANSWERS) == len(p_right)
    assert comparisons.p_right.tolist() == p_right
    assert len(comparisons) == len(p_right)


def test_steps_come_comparison_by_comparison_left_before_right() -> None:
    comparisons = Comparisons("drop")
    pairs = draw_pairs(tiny_episodes(3), 7, 3, np.random.default_rng(0))
    comparisons.add(pairs[:5], [verdict(Label.LEFT)] * 5)
    comparisons.add(pairs[5:], [verdict(Label.RIGHT)] * 2)
    steps = comparisons.steps()
    assert len(steps) == 7 * 2 * 3 and comparisons.segment_steps == 3
    for name in ("actions", "next_obs", "snapshots"):
        expected = np.concatenate([getattr(side, name) for pair in pairs for side in (pair.left, pair.right)])
        np.testing.assert_array_equal(getattr(steps, name), expected)


def test_a_session_without_labels_adds_nothing() -> None:
    comparisons = Comparisons("drop")
    assert comparisons.add([], []) == 0
    assert comparisons.add([pair_of(0, 1)], [verdict(None)]) == 0
    assert len(comparisons) == 0


def test_a_restored_set_holds_the_same_and_takes_more() -> None:
    pairs = draw_pairs(tiny_episodes(3), 6, 2, np.random.default_rng(0))
    one, other = Comparisons("equal"), Comparisons("equal")
    other.set_state(one.get_state())
    one.add(pairs[:4], truth(pairs[:4]))
    other.set_state(one.get_state())
    for comparisons in (one, other):
        comparisons.add(pairs[4:], truth(pairs[4:]))
    np.testing.assert_array_equal(one.p_right, other.p_right)
    np.testing.assert_array_equal(one.steps().snapshots, other.steps().snapshots)
