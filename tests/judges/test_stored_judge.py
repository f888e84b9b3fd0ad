"""The backend that answers from disk alone."""

from pathlib import Path

import numpy as np
import pytest

from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Clip, Query, Status
from rlvlm.judges.build import build_judge
from rlvlm.judges.cache import CachedJudge
from rlvlm.judges.config import CachedConfig, JudgeConfig
from rlvlm.labels.store import LabelStore
from rlvlm.testing import FakeJudge, check_judge


def make_query(left: int, right: int) -> Query:
    frames = [np.full((1, 4, 4, 3), level, np.uint8) for level in (left, right)]
    return Query(goal="open it", left=frames[0], right=frames[1])


def stored(folder: Path, **names: str):
    return build_judge(JudgeConfig(backend="cached", cached=CachedConfig(store=str(folder), **names)))


def test_it_answers_what_was_answered_and_refuses_the_rest_by_key(tmp_path):
    fake = FakeJudge()
    queries = [make_query(0, 9), make_query(9, 0)]
    told = CachedJudge(fake, LabelStore(tmp_path / "s")).compare(queries)
    judge = stored(tmp_path / "s")
    assert judge.stamp == fake.stamp
    answers = judge.compare([*queries, make_query(1, 2)])
    assert answers[:2] == told
    assert answers[2].status is Status.FAILED and "no answer under key" in answers[2].text
    with pytest.raises(JudgeUnavailable, match="none of 1 answers"):
        judge.compare([make_query(1, 2)])
    with pytest.raises(JudgeUnavailable, match="none of 1 answers"):
        judge.score([Clip(goal="open it", frames=queries[0].left)])


def test_it_keeps_the_contract(tmp_path):
    check_judge(CachedJudge(FakeJudge(), LabelStore(tmp_path / "s")))
    check_judge(stored(tmp_path / "s"))


def test_among_several_judges_one_is_named(tmp_path):
    for margin in (0.0, 5.0):
        CachedJudge(FakeJudge(margin), LabelStore(tmp_path / "s")).compare([make_query(0, 9)])
    for names, told in (({}, "2 judges"), ({"judge": "nobody"}, "no judge"), ({"prompt": "two_stage"}, "no judge")):
        with pytest.raises(JudgeUnavailable, match=told):
            stored(tmp_path / "s", **names)


def test_a_store_that_is_none_is_named(tmp_path):
    with pytest.raises(JudgeUnavailable, match="no label store"):
        stored(tmp_path / "s")
    with pytest.raises(ValueError, match="needs judge.cached.store"):
        JudgeConfig(backend="cached")
