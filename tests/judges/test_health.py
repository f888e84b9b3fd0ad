import pytest

from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Label, Score, Stamp, Status, Verdict
from rlvlm.judges.health import JudgeHealth

STAMP = Stamp(judge="test", revision="", prompt="", decoding="")
LEFT = Verdict(status=Status.OK, label=Label.LEFT, stamp=STAMP)


def unread(text: str = "hm") -> Verdict:
    return Verdict(status=Status.INVALID, label=None, stamp=STAMP, text=text)


def unanswered(text: str = "connection refused") -> Score:
    return Score(status=Status.FAILED, value=None, stamp=STAMP, text=text)


def test_no_answer_at_all_is_an_outage_and_one_answer_is_none():
    with pytest.raises(JudgeUnavailable, match="none of 5 queries was answered: connection refused") as raised:
        JudgeHealth().check([unanswered()] * 5)
    assert "rlvlm resume" in raised.value.fix
    JudgeHealth().check([unanswered(), LEFT])
    JudgeHealth().check([])


def test_a_judge_that_cannot_be_read_is_given_up_with_samples():
    health = JudgeHealth()
    garbage = [unread(f"hm {number}") for number in range(101)]
    for answers in ([LEFT] * 200, garbage[:100]):
        health.note(answers)
        health.check(answers)  # exactly half of the last 200 is not over half
    health.note(garbage[100:])
    with pytest.raises(JudgeUnavailable, match=r"101 of the last 200 answers .* \['hm 100'\]") as raised:
        health.check(garbage[100:])
    assert "--judge.prompt" in raised.value.fix
    health.check(garbage[100:])  # the next judge is not blamed for the last one
