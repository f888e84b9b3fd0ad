import numpy as np
import pytest

from rlvlm.sweeps.config import FlatConfig
from rlvlm.sweeps.trial import is_flat

THIRD = FlatConfig(share=1 / 3, tolerance=0.02, after=1 / 3)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([0, 0, 0, 0], False),  # at step 400 of 900 only 100 steps count, from 300 on
        ([0, 0, 0, 0, 0, 0], True),  # 300 to 600 is a third
        ([0, 1, 1, 1, 1], False),
        ([0, 0, 1, 1, 1, 1], True),
        ([0, 0, 1, 1, 1, 0.9], False),  # it moved
        ([0, 0, 1, 1, 0.99, 1], True),
        ([0, 0, 0, 0, 0.5, 0.5, 0.5], False),  # flat for 200 steps
        ([], False),
    ],
)
def test_a_third_of_900_steps_must_not_move(scores: list[float], expected: bool) -> None:
    steps = 100 * np.arange(1, len(scores) + 1, dtype=np.float32)
    assert is_flat(steps, np.array(scores, np.float32), 900, THIRD) is expected


def test_the_beginning_may_count_too() -> None:
    steps = np.array([100, 200, 300, 400], np.float32)
    never = np.zeros(4, np.float32)
    assert is_flat(steps, never, 900, FlatConfig(share=1 / 3, after=0.0))
    assert not is_flat(steps[:3], never[:3], 900, FlatConfig(share=1 / 3, after=0.0))
