from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlvlm.judges.cache import CachedJudge, clip_key, query_key, read_answers
from rlvlm.testing import FakeJudge, check_judge
from rlvlm.types import Clip, Query, Status, Verdict


def make_query(left: int, right: int) -> Query:
    frames = [np.full((1, 4, 4, 3), level, np.uint8) for level in (left, right)]
    return Query(goal="open it", left=frames[0], right=frames[1])


class CountingJudge(FakeJudge):
    """Remembers how many questions came in each call."""

    def __init__(self, failing: int = 0) -> None:
        super().__init__(failing=failing)
        self.calls: list[int] = []

    def compare(self, queries):
        self.calls.append(len(queries))
        return super().compare(queries)


def test_a_question_is_asked_once():
    judge = CountingJudge()
    cached = CachedJudge(judge)
    queries = [make_query(0, 9), make_query(9, 0), make_query(0, 9)]
    first = cached.compare(queries)
    assert (judge.calls, cached.hits, cached.misses) == ([2], 1, 2)
    assert cached.compare([*queries, make_query(5, 5)]) == [*first, *FakeJudge().compare([make_query(5, 5)])]
    assert (judge.calls, cached.hits, cached.misses) == ([2, 1], 4, 3)


def test_the_cached_judge_keeps_the_contract(tmp_path):
    check_judge(CachedJudge(FakeJudge(), tmp_path / "answers.jsonl"))


def test_failed_answers_are_asked_again(tmp_path):
    judge = CountingJudge(failing=1)
    cached = CachedJudge(judge, tmp_path / "answers.jsonl")
    queries = [make_query(0, 9), make_query(9, 0)]
    assert [verdict.status for verdict in cached.compare(queries)] == [Status.FAILED, Status.OK]
    assert [verdict.status for verdict in cached.compare(queries)] == [Status.OK, Status.OK]
    assert judge.calls == [2, 1]


def test_everything_that_decides_an_answer_is_in_the_key():
    query, stamp = make_query(1, 2), FakeJudge().stamp
    swapped = Query(goal=query.goal, left=query.right, right=query.left)
    wide = replace(query, left=query.left.reshape(1, 2, 8, 3))
    others = [query_key(swapped, stamp), query_key(replace(query, goal="close it"), stamp), query_key(wide, stamp),
              *(query_key(query, replace(stamp, **{p: "x"})) for p in ("judge", "revision", "prompt", "decoding")),
              clip_key(Clip(goal=query.goal, frames=query.left), stamp)]
    assert query_key(query, stamp) == query_key(make_query(1, 2), stamp)
    assert len({query_key(query, stamp), *others}) == 1 + len(others)


def write_some(file: Path) -> list[Verdict]:
    cached = CachedJudge(FakeJudge(margin=1), file)
    cached.score([Clip(goal="open it", frames=make_query(7, 7).left)])
    return cached.compare([make_query(0, 9), make_query(9, 0), make_query(4, 4)])


def test_answers_outlive_the_process(tmp_path):
    verdicts = write_some(tmp_path / "answers.jsonl")
    judge = CountingJudge()
    judge._margin = 1
    again = CachedJudge(judge, tmp_path / "answers.jsonl")
    assert again.compare([make_query(0, 9), make_query(9, 0), make_query(4, 4)]) == verdicts
    assert judge.calls == [] and len(read_answers(tmp_path / "answers.jsonl")) == 4


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_torn_last_line_is_cut_off_and_the_rest_kept(tmp_path, cut):
    file = tmp_path / "answers.jsonl"
    write_some(file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-cut])
    assert len(read_answers(file)) == 3
    assert write_some(file) and file.read_bytes() == whole


def test_a_damaged_line_is_not_believed(tmp_path):
    file = tmp_path / "answers.jsonl"
    write_some(file)
    file.write_bytes(file.read_bytes().replace(b'"label": "left"', b'"label": "tie"', 1))
    assert len(read_answers(file)) == 3
