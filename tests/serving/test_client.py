"""The client's side of a fault, with a handle that misbehaves on purpose."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ObjectLostError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from stub_judge import StubJudge, stub_queries

from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Status
from rlvlm.serving import app_client, client
from rlvlm.serving.client import Receipt, Request, ServedJudge, digest


class Handle:
    """Answers each request with what `answer` makes of it, or raises it."""

    def __init__(self, answer: Callable[[Request, int], Any]) -> None:
        self._answer = answer
        self.requests: list[Request] = []

    @property
    def ask(self) -> "Handle":
        return self

    def remote(self, request: Request) -> "Handle":
        self.requests.append(request)
        return self

    def cancel(self) -> None:
        pass

    def result(self, timeout_s: float) -> Any:
        outcome = self._answer(self.requests[-1], len(self.requests))
        if isinstance(outcome, Exception) and not isinstance(outcome, JudgeUnavailable):
            raise outcome
        return outcome


def right(request: Request) -> Receipt:
    return Receipt(answers=StubJudge().compare(request.items), digests=[digest(item) for item in request.items])


@pytest.fixture
def ask(monkeypatch):
    monkeypatch.setattr(app_client, "REFUSED_WAIT_S", (0.0, 0.01))
    for module in (app_client, client):
        monkeypatch.setattr(module, "wait_random_exponential", lambda **_: lambda state: 0.0)

    def make(answer: Callable[[Request, int], Any], **settings: Any) -> tuple[ServedJudge, Handle]:
        judge, handle = ServedJudge("app", **{"batch_size": 4, "retries": 2, "in_flight": 1} | settings), Handle(answer)
        judge._client.handle = handle  # type: ignore[assignment]
        return judge, handle

    return make


def test_ten_queries_are_three_requests_of_one_call(ask):
    # by hand: pieces of 4, 4 and 2
    judge, handle = ask(lambda request, _: right(request))
    queries = stub_queries(10, 0)
    assert judge.compare(queries) == StubJudge().compare(queries)
    assert [len(request.items) for request in handle.requests] == [4, 4, 2]
    assert len({request.key for request in handle.requests}) == 3
    assert {request.key.partition(":")[0] for request in handle.requests} == {handle.requests[0].key.partition(":")[0]}


def test_answers_arrive_one_by_one_and_survive_a_later_refusal(ask):
    spent = JudgeUnavailable("the budget is spent")
    spent.is_final = True
    done: list[int] = []
    judge, handle = ask(lambda request, number: right(request) if number < 3 else spent, batch_size=1)
    with pytest.raises(JudgeUnavailable, match="budget"):
        judge.tell_each(stub_queries(4, 0), lambda index, answer: done.append(index))
    assert done == [0, 1] and len(handle.requests) == 3, "what cannot pass is not asked for again"


def test_answers_beside_the_end_of_a_budget_are_told(ask):
    spent, done = JudgeUnavailable("the budget is spent"), list[int]()
    spent.is_final = True
    judge, handle = ask(lambda request, _: replace(right(request), answers=[*right(request).answers[:3], spent]))
    with pytest.raises(JudgeUnavailable, match="budget"):
        judge.tell_each(stub_queries(8, 0), lambda index, answer: done.append(index))
    assert done == [0, 1, 2] and len(handle.requests) == 1


def test_an_outage_behind_a_judge_is_waited_for_and_a_refused_question_is_not(ask):
    def failed(request, latency_s):
        answers = [
            replace(answer, status=Status.FAILED, label=None, latency_s=latency_s) for answer in right(request).answers
        ]
        return replace(right(request), answers=answers)

    judge, handle = ask(lambda request, number: failed(request, 1.0) if number < 3 else right(request), batch_size=1)
    assert judge.compare(stub_queries(1, 1))[0].status is not Status.FAILED
    assert len(handle.requests) == 3 and len({request.key for request in handle.requests}) == 3
    judge, handle = ask(lambda request, _: failed(request, 1.0))
    with pytest.raises(JudgeUnavailable, match="every one of 2"):
        judge.compare(stub_queries(2, 1))
    judge, handle = ask(lambda request, _: failed(request, 0.0))  # the provider blocks it
    assert judge.compare(stub_queries(1, 1))[0].status is Status.FAILED and len(handle.requests) == 1


@pytest.mark.parametrize("loss", [ActorDiedError(), ObjectLostError("00" * 28, "", "here")])
def test_a_request_whose_replica_or_answer_was_lost_is_sent_again_under_its_key(ask, loss):
    judge, handle = ask(lambda request, number: loss if number < 3 else right(request))
    assert len(judge.compare(stub_queries(2, 0))) == 2
    assert len(handle.requests) == 3 and len({request.key for request in handle.requests}) == 1
    judge, _ = ask(lambda *_: loss)
    with pytest.raises(JudgeUnavailable, match=f"no answer in 3 tries: {type(loss).__name__}"):
        judge.compare(stub_queries(2, 0))


def test_an_app_that_was_deployed_anew_is_looked_up_again(ask, monkeypatch):
    gone = DeploymentUnavailableError(DeploymentID(name="judge-old", app_name="app"))
    judge, old = ask(lambda *_: gone)
    new = Handle(lambda request, _: right(request))
    monkeypatch.setattr(app_client.serve, "get_app_handle", lambda app: new)
    assert len(judge.compare(stub_queries(2, 0))) == 2
    assert (len(old.requests), len(new.requests)) == (1, 1) and judge._client.handle is new


def test_the_same_question_twice_is_two_requests(ask):
    # a sampling judge may be asked the same thing again on purpose
    judge, handle = ask(lambda request, _: right(request), batch_size=1)
    query = stub_queries(1, 0)
    judge.compare(query + query)
    judge.compare(query)
    assert len({request.key for request in handle.requests}) == 3


def test_an_answer_about_other_images_is_refused_and_asked_again(ask):
    other = stub_queries(2, 9)

    def crossed(request: Request, number: int) -> Receipt:
        return (
            right(request)
            if number > 1
            else Receipt(answers=StubJudge().compare(other), digests=[digest(query) for query in other])
        )

    judge, handle = ask(crossed)
    queries = stub_queries(2, 0)
    assert judge.compare(queries) == StubJudge().compare(queries) and len(handle.requests) == 2
    always, _ = ask(lambda request, _: crossed(request, 1))
    with pytest.raises(JudgeUnavailable, match="answered a question that was not asked"):
        always.compare(queries)


def test_a_full_queue_is_no_failure_until_it_stays_full(ask):
    refused = BackPressureError(num_queued_requests=32, max_queued_requests=32)
    judge, handle = ask(lambda request, number: refused if number < 20 else right(request), retries=0)
    assert len(judge.compare(stub_queries(1, 0))) == 1 and len(handle.requests) == 20
    judge, _ = ask(lambda request, number: refused, retries=0, timeout_s=0.05)
    with pytest.raises(JudgeUnavailable, match="gave no answer in 1 tries: BackPressureError") as caught:
        judge.compare(stub_queries(1, 0))
    assert "--serve.num-replicas" in caught.value.fix


def test_the_end_of_a_run_stops_waiting_for_answers(ask):
    def silent(request: Request, number: int) -> Exception:
        judge.close()  # while it waits
        return TimeoutError()

    judge, handle = ask(silent, retries=4, timeout_s=1e9)
    with pytest.raises(JudgeUnavailable):
        judge.compare(stub_queries(1, 0))
    assert len(handle.requests) == 1, "neither waited for on nor tried again"
    with pytest.raises(JudgeUnavailable, match="the run is over"):
        judge.compare(stub_queries(1, 0))
    assert len(handle.requests) == 1


def test_an_answer_may_take_many_short_waits(ask):
    waits = []

    def slow(request: Request, number: int) -> Any:
        waits.append(number)
        return right(request) if len(waits) == 5 else TimeoutError()

    judge, handle = ask(slow, retries=0)
    assert len(judge.compare(stub_queries(1, 0))) == 1
    assert len(waits) == 5 and len(handle.requests) == 1


def test_the_client_pickles_with_its_name_and_without_its_handle(ask):
    judge, _ = ask(lambda request, _: right(request), run="mine")
    judge.compare(stub_queries(1, 0))
    copy = pickle.loads(pickle.dumps(judge))
    assert copy._run == "mine" and copy._client.handle is None
