"""What a missing answer is worth in somebody else's trainer: the same for every adapter."""

import asyncio

import numpy as np
import pytest
from frameworks import Faulty

import rlvlm
from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Status
from rlvlm.judges.rewarding import Rewards

CLIPS = [np.full((1, 8, 8, 3), level, np.uint8) for level in (0, 51, 102)]
PATCHY = Faulty(Status.OK, Status.INVALID)
KILLED = Faulty(error=JudgeUnavailable("the server was killed"))
WRONG_KEY = Faulty(error=JudgeUnavailable("the key is wrong"))
WRONG_KEY.error.is_final = True


@pytest.mark.parametrize(
    ("judge", "without_answer", "expected"),
    [
        # by hand: the judge of the tests sees brightness, 0, 51 and 102 of 255
        (Faulty(), "raise", [0.0, 0.2, 0.4]),
        (PATCHY, "raise", "no score for 1 of 3 clips: invalid"),
        (PATCHY, None, [0.0, None, 0.4]),
        (PATCHY, 0.5, [0.0, 0.5, 0.4]),
        (KILLED, "raise", "server was killed"),
        (KILLED, None, [None] * 3),
        (KILLED, 0.25, [0.25] * 3),
        (WRONG_KEY, None, "key is wrong"),
        (WRONG_KEY, 0.5, "key is wrong"),
    ],
)
def test_a_missing_answer_raises_or_is_worth_what_the_user_says(judge, without_answer, expected):
    rewards = Rewards(judge=rlvlm.Judge.local(judge), goal="bright", without_answer=without_answer, takes_none=True)
    for ask in (rewards.ask, lambda clips: asyncio.run(rewards.ask_async(clips))):
        if isinstance(expected, str):
            with pytest.raises(JudgeUnavailable, match=expected):
                ask(CLIPS)
        else:
            assert ask(CLIPS).values == expected


@pytest.mark.parametrize("without_answer", ["neutral", 1.5, -0.1, None])
def test_a_reward_that_no_trainer_could_take_is_refused(without_answer):
    with pytest.raises(ValueError, match="without_answer is raise, or a reward in"):
        Rewards(judge=rlvlm.Judge.local(Faulty()), without_answer=without_answer)
