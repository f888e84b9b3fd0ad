"""A judge's score as a reward function of TRL."""

import asyncio
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from frameworks import needs, python_of, run, snippet

import rlvlm
from rlvlm.core.errors import JudgeUnavailable, UsageError
from rlvlm.core.judging import Score, Status
from rlvlm.plugins.trl.rewards import judge_or_none
from rlvlm.testing import FakeJudge


def brightness(completion, row):
    return np.full((row["side"], 8, 3), 17 * len(completion), np.uint8)


class Patchy(FakeJudge):
    """Has no answer to the second clip, and cannot be read about the third."""

    def score(self, clips):
        scores = super().score(clips)
        for index, status in ((1, Status.FAILED), (2, Status.INVALID)):
            scores[index] = Score(status=status, value=None, stamp=self.stamp)
        return scores


class Dead(FakeJudge):
    def score(self, clips):
        raise JudgeUnavailable("the server was killed")


def asked(judge, completions, goal="", **columns):
    function = judge_or_none(rlvlm.Judge.local(judge), brightness, goal=goal)
    return asyncio.run(function(prompts=["draw"] * len(completions), completions=completions, **columns))


def test_completions_are_scored_and_missing_answers_are_none() -> None:
    # by hand: n letters make a grey of 17 n, of 255
    logged = {}
    columns = {"goal": ["bright"] * 4, "side": [4] * 4, "trainer_state": object(), "log_metric": logged.__setitem__}
    values = asked(Patchy(), ["", "a", "ab", "abc"], **columns)
    assert values == [0.0, None, None, pytest.approx(51 / 255)]
    assert logged == {"judge/answered": 0.5}


def test_a_killed_server_leaves_every_completion_out() -> None:
    assert asked(Dead(), ["a", "b"], "bright", side=[4] * 2) == [None, None]


def test_a_wrong_key_ends_the_training() -> None:
    class WrongKey(FakeJudge):
        def score(self, clips):
            error = JudgeUnavailable("the key is wrong")
            error.is_final = True
            raise error

    with pytest.raises(JudgeUnavailable, match="key is wrong"):
        asked(WrongKey(), ["a"], "bright", side=[4])


def test_no_completions_are_no_rewards() -> None:
    assert asked(FakeJudge(), []) == []


def test_a_data_set_without_the_goal_says_which_column() -> None:
    with pytest.raises(UsageError, match="no column 'goal' with the goals; it has prompt, side") as raised:
        asked(FakeJudge(), ["a"], side=[4])
    assert "goal_column" in raised.value.fix


@needs("trl")
@pytest.mark.slow
def test_the_page_trains_with_trl_on_a_judge(tmp_path: Path) -> None:
    make = [python_of("trl"), Path(__file__).with_name("tiny_signs.py"), tmp_path / "my_model"]
    subprocess.run(make, check=True, capture_output=True)
    checks = """
log = [row for row in trainer.state.log_history if "rewards/judged_or_none/mean" in row]
print("before and after:", *(round(log[place]["rewards/judged_or_none/mean"], 2) for place in (0, -1)))
print("answered:", {row["judge/answered"] for row in log})
"""
    said = run("trl", snippet("TRL") + checks, tmp_path)
    before, after = map(float, re.findall(r"before and after: (\S+) (\S+)", said)[0])
    assert after > before + 0.2 and after > 0.8 and "answered: {1.0}" in said, said
