import numpy as np
import pytest
from tiny_episodes import one_step, pair_of, score, tiny_episodes, verdict

from rlvlm.core.judging import Label, Status
from rlvlm.preferences.dataset import Examples, decided, scored
from rlvlm.preferences.queries import draw_pairs

ANSWERS = [verdict(Label.LEFT), verdict(Label.TIE), verdict(Label.RIGHT), verdict(None), verdict(None, Status.FAILED)]


@pytest.mark.parametrize(("ties", "p_right"), [("drop", [0, 1]), ("equal", [0, 0.5, 1])])
def test_ties_train_on_demand_and_missing_answers_never(ties, p_right):
    comparisons = Examples(num_sides=2)
    assert comparisons.add(decided([], [], ties)) == 0
    assert comparisons.add(decided([pair_of(0.1 * n, 1.0) for n in range(5)], ANSWERS, ties)) == len(p_right)
    assert comparisons.targets.tolist() == p_right
    assert len(comparisons) == len(p_right)


def test_steps_come_comparison_by_comparison_left_before_right():
    comparisons = Examples(num_sides=2)
    pairs = draw_pairs(tiny_episodes(3), 7, 3, np.random.default_rng(0))
    comparisons.add(decided(pairs[:5], [verdict(Label.LEFT)] * 5, "drop"))
    comparisons.add(decided(pairs[5:], [verdict(Label.RIGHT)] * 2, "drop"))
    steps = comparisons.steps()
    assert len(steps) == 7 * 2 * 3 and comparisons.segment_steps == 3
    for name in ("actions", "next_obs", "snapshots"):
        expected = np.concatenate([getattr(side, name) for pair in pairs for side in (pair.left, pair.right)])
        np.testing.assert_array_equal(getattr(steps, name), expected)


def test_scores_train_where_there_is_one():
    frames = [one_step(0.1 * number) for number in range(4)]
    scores = [score(0.0), score(None), score(0.75), score(None, Status.FAILED)]
    examples = Examples(num_sides=1)
    assert examples.add(scored(frames, scores)) == 2 == len(examples)
    assert examples.targets.tolist() == [0.0, 0.75] and examples.segment_steps == 1
    np.testing.assert_array_equal(examples.steps().next_obs, np.concatenate([frames[0].next_obs, frames[2].next_obs]))
