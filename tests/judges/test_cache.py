"""Judges that answer from memory or from a label store."""

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


class CountingJudge(FakeJudge):
    """Remembers how many questions came in each call."""

    def __init__(self, margin: float = 0.0, failing: int = 0) -> None:
        super().__init__(margin, failing)
        self.calls: list[int] = []

    def compare(self, queries):
        self.calls.append(len(queries))
        return super().compare(queries)


def test_a_question_is_asked_once(tmp_path):
    judge = CountingJudge()
    cached = CachedJudge(judge, LabelStore(tmp_path / "store"))
    queries = [make_query(0, 9), make_query(9, 0), make_query(0, 9)]
    first = cached.compare(queries)
    assert (judge.calls, cached.hits, cached.misses) == ([2], 1, 2)
    assert cached.compare([*queries, make_query(5, 5)]) == [*first, *FakeJudge().compare([make_query(5, 5)])]
    assert (judge.calls, cached.hits, cached.misses) == ([2, 1], 4, 3)


def test_judges_with_a_memory_keep_the_contract(tmp_path):
    check_judge(CachedJudge(FakeJudge(), LabelStore(tmp_path / "store")))
    check_judge(CachedJudge(FakeJudge(), LabelStore(tmp_path / "store")))  # from the disk alone
    check_judge(stored(tmp_path / "store"))


def test_failed_answers_are_asked_again(tmp_path):
    judge = CountingJudge(failing=1)
    cached = CachedJudge(judge, LabelStore(tmp_path / "store"))
    queries = [make_query(0, 9), make_query(9, 0)]
    assert [verdict.status for verdict in cached.compare(queries)] == [Status.FAILED, Status.OK]
    assert [verdict.status for verdict in cached.compare(queries)] == [Status.OK, Status.OK]
    assert judge.calls == [2, 1]


def test_two_runs_that_share_a_store_see_each_others_answers_while_both_live(tmp_path):
    one, other = CountingJudge(), CountingJudge()
    first = CachedJudge(one, LabelStore(tmp_path / "store"))
    second = CachedJudge(other, LabelStore(tmp_path / "store"))
    queries = [make_query(0, 9), make_query(3, 1)]
    assert first.compare(queries) == second.compare(queries)
    second.compare([make_query(7, 8)])
    first.compare([make_query(7, 8)])
    assert (one.calls, other.calls) == ([2], [1])


def stored(folder: Path, **names: str):
    return build_judge(JudgeConfig(backend="cached", cached=CachedConfig(store=str(folder), **names)))


def test_the_stored_judge_repeats_its_answers_and_refuses_other_questions_by_key(tmp_path):
    fake = FakeJudge()
    queries = [make_query(0, 9), make_query(9, 0)]
    first = CachedJudge(fake, LabelStore(tmp_path / "s")).compare(queries)
    judge = stored(tmp_path / "s")
    assert judge.stamp == fake.stamp
    answers = judge.compare([*queries, make_query(1, 2)])
    assert answers[:2] == first
    assert answers[2].status is Status.FAILED and "no answer under key" in answers[2].text
    with pytest.raises(JudgeUnavailable, match="none of 1 answers"):
        judge.compare([make_query(1, 2)])
    with pytest.raises(JudgeUnavailable, match="none of 1 answers"):
        judge.score([Clip(goal="open it", frames=queries[0].left)])


def test_among_several_judges_one_is_named(tmp_path):
    for margin in (0.0, 5.0):
        CachedJudge(FakeJudge(margin), LabelStore(tmp_path / "s")).compare([make_query(0, 9)])
    for names, message in (({}, "2 judges"), ({"judge": "nobody"}, "no judge"), ({"prompt": "two_stage"}, "no judge")):
        with pytest.raises(JudgeUnavailable, match=message):
            stored(tmp_path / "s", **names)


def test_a_folder_that_is_no_store_is_named(tmp_path):
    with pytest.raises(JudgeUnavailable, match="no label store"):
        stored(tmp_path / "s")
    with pytest.raises(ValueError, match="needs judge.cached.store"):
        JudgeConfig(backend="cached")
