"""A judge's score as a reward function of TRL."""

import asyncio
import re

import numpy as np
import pytest
from frameworks import Faulty, needs, run, snippet, tiny_model

import rlvlm
from rlvlm.core.errors import UsageError
from rlvlm.core.judging import Status
from rlvlm.plugins.trl.rewards import judge_or_none


def brightness(completion, row):
    return np.full((row["side"], 8, 3), 17 * len(completion), np.uint8)


def asked(judge, completions, goal="", **columns):
    function = judge_or_none(rlvlm.Judge.local(judge), brightness, goal=goal)
    return asyncio.run(function(prompts=["draw"] * len(completions), completions=completions, **columns))


def test_completions_are_scored_and_missing_answers_are_none():
    # by hand: n letters make a grey of 17 n, of 255
    logged = {}
    columns = {"goal": ["bright"] * 4, "side": [4] * 4, "trainer_state": object(), "log_metric": logged.__setitem__}
    values = asked(Faulty(Status.OK, Status.FAILED, Status.INVALID), ["", "a", "ab", "abc"], **columns)
    assert values == [0.0, None, None, pytest.approx(51 / 255)]
    assert logged == {"judge/answered": 0.5}


def test_a_data_set_without_the_goal_says_which_column():
    with pytest.raises(UsageError, match="no column 'goal' with the goals; it has prompt, side") as raised:
        asked(Faulty(), ["a"], side=[4])
    assert "goal_column" in raised.value.fix


@needs("trl")
@pytest.mark.slow
def test_the_page_trains_with_trl_on_a_judge(tmp_path):
    tiny_model(tmp_path)
    checks = """
log = [row for row in trainer.state.log_history if "rewards/judged_or_none/mean" in row]
print("before and after:", *(round(log[place]["rewards/judged_or_none/mean"], 2) for place in (0, -1)))
print("answered:", {row["judge/answered"] for row in log})
"""
    said = run("trl", snippet("TRL") + checks, tmp_path)
    before, after = map(float, re.findall(r"before and after: (\S+) (\S+)", said)[0])
    assert after > before + 0.2 and after > 0.8 and "answered: {1.0}" in said, said
