"""The check of a judge's contract finds every broken promise."""

from dataclasses import replace

import pytest

from rlvlm.core.judging import Stamp
from rlvlm.testing import FakeJudge, check_judge

OTHER = Stamp(judge="other", revision="1", prompt="x/1", decoding="")
BROKEN = {
    "no questions, no answers": ("score", lambda scores: scores or [None]),
    "every verdict carries the judge's stamp": (
        "compare",
        lambda verdicts: [replace(v, stamp=OTHER) for v in verdicts],
    ),
    "answers follow the order": ("compare", lambda verdicts: sorted(verdicts, key=lambda v: v.text)),
    "probabilities are a distribution": (
        "compare",
        lambda verdicts: [replace(v, probabilities=(0.5, 0.5, 0.5)) for v in verdicts],
    ),
    "one score per clip": ("score", lambda scores: scores[1:]),
    "scores lie in": ("score", lambda scores: [replace(s, value=s.value + 1) for s in scores]),
}


@pytest.mark.parametrize("promise", BROKEN)
def test_a_broken_promise_is_named(promise):
    method, harm = BROKEN[promise]
    judge = FakeJudge()
    answer = getattr(judge, method)
    setattr(judge, method, lambda asked: harm(answer(asked)))
    with pytest.raises(AssertionError, match=promise):
        check_judge(judge)
