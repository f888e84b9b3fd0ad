"""`rlvlm.Judge`: a judge of somebody else's trainer, over HTTP against the real routes, or in this process."""

import asyncio
import multiprocessing
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from http_edge import Edge, FakeClient

import rlvlm
from rlvlm.core.errors import JudgeUnavailable, UsageError
from rlvlm.core.judging import Clip, Query, Score, Status
from rlvlm.judges import http
from rlvlm.serving.refusal import Refusal, overloaded
from rlvlm.testing import FakeJudge, check_judge

GOAL = "open the drawer"


def grey(level: int, num: int = 1, side: int = 8) -> np.ndarray:
    return np.full((num, side, side, 3), level, np.uint8)


class Counted(FakeClient):
    """Counts the requests, and lets the first ones meet an error."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.sizes, self.errors = [], list(errors)

    async def score(self, clips):
        if self.errors:
            raise self.errors.pop(0)
        self.sizes.append(sum(len(clip.frames) for clip in clips))
        return self.judge.score(clips)


@pytest.fixture
def edge(tmp_path):
    return Edge(tmp_path, judge=Counted(), judges=("fake", "other"))


def test_scores_and_choices_come_in_order_with_their_statuses(edge):
    # by hand: the fake judge's score is the last image's brightness, and it likes the light
    levels = [10 * index for index in range(20)]
    with edge.listening() as url:
        judge = rlvlm.Judge(url, edge.token)
        values, statuses = judge.score([grey(0, 2), *map(grey, levels)], GOAL)
        assert values == [0.0, *(level / 255 for level in levels)] and set(statuses) == {"ok"}
        assert sorted(edge.judge.sizes) == [6, 16], "22 images, at most 16 in a request"
        pairs = [(grey(50), grey(200)), (grey(200), grey(50)[0]), Query(goal=GOAL, left=grey(9), right=grey(9))]
        labels, statuses = judge.compare(pairs, GOAL)
        assert labels == ["right", "left", "tie"] and statuses == ["ok", "ok", "no_preference"]
        assert judge.score([], GOAL) == ([], [])
        check_judge(judge.protocol)
        assert judge.protocol.stamp == FakeJudge().stamp


def test_callers_at_the_same_time_share_requests_and_get_their_own_answers(edge):
    with edge.listening() as url:
        judge = rlvlm.Judge(url, edge.token)
        judge.score([grey(0)], GOAL)
        edge.judge.sizes.clear()
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(lambda level: judge.score([grey(level)], GOAL).values[0], range(16)))

        async def together() -> list[float | None]:
            asked = (judge.score_async([grey(level)], GOAL) for level in range(16))
            return [values[0] for values, _ in await asyncio.gather(*asked)]

        assert found == asyncio.run(together()) == [level / 255 for level in range(16)]
        assert sum(edge.judge.sizes) == 32 and len(edge.judge.sizes) < 24


def test_an_overloaded_server_and_a_lost_replica_are_asked_again(edge, monkeypatch):
    monkeypatch.setattr(http, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(Refusal, "headers", {"retry-after": "0"})
    edge.judge.errors = [overloaded("full"), Refusal(503, "judge", "the judge does not answer now")]
    with edge.listening() as url:
        assert rlvlm.Judge(url, edge.token).score([grey(51)], GOAL).values == [0.2]
    with pytest.raises(JudgeUnavailable, match="gave no answer within 0.2 s"):
        rlvlm.Judge(url, edge.token, deadline_s=0.2).score([grey(51)], GOAL)


def test_a_refused_question_costs_no_other_callers_answer(edge):
    class Picky(Counted):
        async def score(self, clips):
            if any(clip.frames.mean() == 13 for clip in clips):
                raise Refusal(422, "picture", "13 is unlucky")
            return await super().score(clips)

    picky = Edge(edge.media.parent / "picky", judge=Picky())
    with picky.listening() as url:
        judge = rlvlm.Judge(url, picky.token)
        values, statuses = judge.score([grey(level) for level in (10, 13, 20)], GOAL)
        assert statuses == ["ok", "failed", "ok"] and values == [10 / 255, None, 20 / 255]
        with pytest.raises(JudgeUnavailable, match="13 is unlucky"):
            judge.score([grey(13)], GOAL)


def test_a_missing_answer_is_no_number(tmp_path):
    class Mumbling(FakeClient):
        async def score(self, clips):
            return [Score(status=Status.INVALID, value=None, stamp=self.judge.stamp, text="hm") for _ in clips]

    edge = Edge(tmp_path, judge=Mumbling())
    with edge.listening() as url:
        assert rlvlm.Judge(url, edge.token).score([grey(9)], GOAL) == ([None], ["invalid"])


def in_child(judge: rlvlm.Judge, answers) -> None:
    answers.put((os.getpid(), judge.score([grey(102)], GOAL).values))


@pytest.mark.slow
def test_a_judge_works_in_processes_that_were_started_after_it_was_used(edge):
    with edge.listening() as url:
        judge = rlvlm.Judge(url, edge.token)
        assert judge.score([grey(51)], GOAL).values == [0.2]
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        children = [context.Process(target=in_child, args=(judge, answers)) for _ in range(2)]
        for child in children:
            child.start()
        found = [answers.get(timeout=60) for _ in children]
        for child in children:
            child.join(10)
        assert len({pid for pid, _ in found}) == 2 and all(values == [0.4] for _, values in found)
        # a spawned one is handed the judge as a pickle
        code = "import pickle, sys, numpy as np; judge = pickle.load(sys.stdin.buffer); "
        code += f"print(judge.score([np.full((1, 8, 8, 3), 102, np.uint8)], {GOAL!r}).values)"
        spawned = subprocess.run(
            [sys.executable, "-c", code], input=pickle.dumps(judge), capture_output=True, timeout=60
        )
        assert spawned.stdout == b"[0.4]\n", spawned.stderr
        assert judge.score([grey(51)], GOAL).values == [0.2], "and goes on here"


def test_a_judge_in_this_process_has_the_same_interface(tmp_path, monkeypatch):
    (tmp_path / "own_brightness.py").write_text("def bright(images, goal):\n    return images.mean((1, 2, 3)) / 255\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for judge in (rlvlm.Judge.local(FakeJudge()), rlvlm.Judge.local("own_brightness:bright")):
        assert judge.score([grey(51), [grey(0)[0], grey(102)[0]]], [GOAL, "close it"]).values == [0.2, 0.4]
        assert judge.compare([(grey(50), grey(200))], GOAL) == (["right"], ["ok"])
        assert asyncio.run(judge.score_async([Clip(goal=GOAL, frames=grey(51))])).values == [0.2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "pocket"}, "has no judge 'pocket'; judges: fake, other"),
        ({"token": "x" * 40}, "does not accept this token"),
        ({"version": "0.9.1"}, f"runs rlvlm 0.9.1, and this is rlvlm {rlvlm.__version__}"),
    ],
)
def test_a_server_that_does_not_fit_is_named(edge, monkeypatch, change, message):
    with edge.listening() as url:
        judge = rlvlm.Judge(url, change.get("token", edge.token), name=change.get("name", ""))
        if "version" in change:
            real = http.HttpJudge._request

            async def aged(self, *args, **kwargs):
                answer = await real(self, *args, **kwargs)
                return {**answer, "rlvlm": {**answer["rlvlm"], "version": change["version"]}}

            monkeypatch.setattr(http.HttpJudge, "_request", aged)
        with pytest.raises(JudgeUnavailable, match=message):
            judge.score([grey(1)], GOAL)


@pytest.mark.parametrize(
    ("clip", "goal", "message"),
    [
        ([grey(1)[0], grey(1, side=9)[0]], GOAL, r"share one size, got \[\(8, 8, 3\), \(9, 9, 3\)\]"),
        (grey(1) / 255, GOAL, "got .* of float64"),
        (grey(1), "", "needs a goal"),
        (grey(1), [GOAL, GOAL], "1 questions need as many goals, got 2"),
    ],
)
def test_a_clip_that_cannot_be_asked_is_refused_before_anything_is_sent(clip, goal, message):
    with pytest.raises(UsageError, match=message):
        rlvlm.Judge("http://127.0.0.1:9").score([clip], goal)
