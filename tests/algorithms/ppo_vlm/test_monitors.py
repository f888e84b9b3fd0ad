import math

import numpy as np
import pytest

from rlvlm.algorithms.env_slots import TurnObs, TurnOutcome
from rlvlm.algorithms.ppo_vlm.monitors import (
    PolicyCollapsed,
    action_entropy,
    check_readable,
    repeated_pairs,
    same_thought_share,
)
from rlvlm.algorithms.ppo_vlm.play import PlayedTurn, PolicyOutput
from rlvlm.core import metrics
from rlvlm.core.sampling import ReplyTokens
from rlvlm.core.turns import Reply


def turn(image: bytes, thought: str) -> PlayedTurn:
    obs = TurnObs(image=image, prompt="")
    tokens = ReplyTokens(prompt_ids=np.zeros(1, np.int64), image=image, reply_ids=np.zeros(1, np.int64))
    output = PolicyOutput(text="", tokens=tokens, log_probs=np.zeros(1, np.float32), value=0.0, action=None, version=0)
    reply = Reply(text="", thought=thought, action=0, action_span=None)
    outcome = TurnOutcome(
        obs=obs, reply=reply, action="+", goal="", snapshots=np.zeros((2, 1), np.float32), env_reward=0.0,
        is_success=False, progress=0.0, gain=0.0, is_end=False, is_terminated=False, next_obs=obs,
        episode=None,
    )  # fmt: skip
    return PlayedTurn(output=output, outcome=outcome)


def test_repetition_by_hand():
    assert repeated_pairs([1, 2, 1, 2, 1]) == pytest.approx(0.5)  # pairs 12 21 12 21: two of four are new
    assert repeated_pairs([7]) == 0


def test_one_thought_for_three_of_four_images():
    turns = [turn(b"a", "left"), turn(b"b", "left"), turn(b"c", "left"), turn(b"d", "right"), turn(b"a", "left")]
    assert same_thought_share(turns) == 0.75
    assert same_thought_share(turns[:1]) == 0
    assert same_thought_share([turn(b"a", ""), turn(b"b", "")]) == 0


def test_a_run_stops_when_told_how_much_is_too_much():
    check_readable({metrics.REPLY_INVALID: 1.0}, 0.0)
    check_readable({metrics.REPLY_INVALID: 0.5}, 0.5)
    with pytest.raises(PolicyCollapsed, match="60% of the replies of a rollout cannot be read"):
        check_readable({metrics.REPLY_INVALID: 0.6}, 0.5)


def test_entropy_of_a_coin_and_of_nothing():
    assert action_entropy([0, 1, 0, 1, None]) == pytest.approx(math.log(2))
    assert action_entropy([3, 3]) == 0
    assert action_entropy([None]) == 0
