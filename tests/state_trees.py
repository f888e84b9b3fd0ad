"""Comparison of state trees, for the tests of this folder."""

import numpy as np
import torch


def assert_same(left, right, path=""):
    """Two state trees are equal bit for bit."""
    assert type(left) is type(right) or isinstance(left, list | tuple), path
    if isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            assert_same(left[key], right[key], f"{path}/{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), path
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_same(*pair, f"{path}/{index}")
    elif isinstance(left, np.ndarray | torch.Tensor):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right), err_msg=path)
    else:
        assert left == right or (left != left and right != right), path
