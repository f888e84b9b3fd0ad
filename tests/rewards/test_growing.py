import numpy as np
import pytest

from rlvlm.rewards.growing import GrowingArray


def test_rows_come_back_in_order_across_growth() -> None:
    grown = GrowingArray((2,), np.int64, capacity=2)
    parts = [np.arange(2 * n, dtype=np.int64).reshape(n, 2) + 100 * n for n in (1, 2, 0, 7)]
    for part in parts:
        grown.append(part)
    np.testing.assert_array_equal(grown.rows, np.concatenate(parts))
    assert len(grown) == 10


def test_rows_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows must have shape \(2,\), got \(3,\)"):
        GrowingArray((2,)).append(np.zeros((1, 3)))
