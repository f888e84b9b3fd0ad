"""OpenVLA's action tokens: bins, ids, scales and the gripper."""

import json

import numpy as np
import pytest

from rlvlm.policies.vla.tokens import ALIAS, CENTRES, TOP_BIN, ActionScale, decode, encode, ids_of_bins
from rlvlm.policies.vla.used_range import used_range


def test_by_hand():
    width = 2 / 255  # 256 edges from -1 to 1 are 255 intervals apart
    numbers = np.array([-1.0, -1.0 + 1.5 * width, 0.0, 1.0 - 0.5 * width, 1.0, 7.0], np.float32)
    assert encode(numbers).tolist() == [0, 1, 127, 254, 255, 255]
    assert ids_of_bins(encode(numbers)).tolist() == [31999, 31998, 31872, 31745, 31744, 31744]
    assert decode(np.array([0, 127, 254, 255])) == pytest.approx([-1 + width / 2, 0, 1 - width / 2, 1 - width / 2])


def test_every_bin_comes_back_and_the_alias_means_the_top_bin():
    bins = np.arange(256)
    assert (np.diff(CENTRES) > 0).all(), "a higher bin is a larger action, and so a higher token a smaller one"
    assert ids_of_bins(bins).tolist() == list(range(31_999, 31_743, -1))
    assert ids_of_bins(bins, 300).tolist() == list(range(299, 43, -1))
    again = encode(decode(bins))
    assert again[:ALIAS].tolist() == bins[:ALIAS].tolist()
    assert again[ALIAS] == TOP_BIN and decode(bins)[ALIAS] == decode(bins)[TOP_BIN]


def test_scale_goes_there_and_back_and_leaves_the_gripper_alone():
    scale = ActionScale(low=(-0.5, 0.0, 0.0), high=(1.5, 0.0, 1.0), scaled=(True, True, False))
    env = scale.to_env(np.array([[0.0, -1.0, 0.25], [1.0, 1.0, 1.0]], np.float32))
    assert env == pytest.approx(np.array([[0.5, 0.0, 0.25], [1.5, 0.0, 1.0]]), abs=1e-7)
    back = scale.from_env(np.array([[0.5, 0.0, 0.25], [9.0, 0.0, 1.0]], np.float32))
    assert back == pytest.approx(np.array([[0.0, -1.0, 0.25], [1.0, -1.0, 1.0]]), abs=1e-7)


def test_scale_is_read_from_a_checkpoints_statistics():
    statistics = {"q01": [-0.6, 0.0], "q99": [0.8, 1.0], "mask": [True, False], "mean": [0, 0]}
    text = json.dumps({"libero_10_no_noops": {"action": statistics}})
    scale = ActionScale.read(text, "libero_10_no_noops")
    assert scale == ActionScale(low=(-0.6, 0.0), high=(0.8, 1.0), scaled=(True, False))
    assert ActionScale.read(scale.write("mine"), "mine") == scale
    with pytest.raises(ValueError, match="no 'libero_90'; it has libero_10_no_noops"):
        ActionScale.read(text, "libero_90")
    for odd in ("NaN", "Infinity"):
        with pytest.raises(ValueError, match="must be finite"):
            ActionScale.read(text.replace("0.8", odd), "libero_10_no_noops")


def test_rarely_demonstrated_actions_can_be_chosen():
    """A wrist that turns in 6 of 1,000 steps and a button pressed in 5; both percentiles are the same number."""
    actions = np.zeros((1_000, 3), np.float32)
    actions[:, 0] = np.linspace(-0.5, 0.5, 1_000)
    actions[100:106, 1], actions[:, 2], actions[500:505, 2] = 0.8, -1.0, 1.0
    scale = ActionScale.of_actions(actions, (True, True, True))
    back = scale.to_env(decode(encode(scale.from_env(actions))))
    assert np.abs(back - actions)[:, 1:].max() < 2 / 255 and scale.high[0] == pytest.approx(0.49)
    assert (scale.low, scale.high) == tuple(map(tuple, np.array(used_range(actions)).tolist()))
    still = ActionScale.of_actions(np.full((9, 1), 0.3, np.float32), (True,))
    assert still.to_env(decode(encode(np.array([0.9], np.float32)))) == pytest.approx(0.3)


def test_scale_of_demonstrations_is_their_quantiles():
    actions = np.stack([np.linspace(0, 1, 101), np.linspace(-2, 2, 101)], axis=1).astype(np.float32)
    scale = ActionScale.of_actions(actions, (True, True))
    assert scale.low == pytest.approx((0.01, -1.96)) and scale.high == pytest.approx((0.99, 1.96))
