"""Calls that share a request: how they are gathered, answered one by one, and sent again."""

import asyncio
import pickle
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from rlvlm.core.errors import ModelUnavailable, UsageError
from rlvlm.serving import app_client as module
from rlvlm.serving.app_client import AppClient
from rlvlm.serving.bags import GATHER_S, Bag, BagSender, each_answer
from rlvlm.serving.router import num_calls


class Handle:
    """A handle of Serve. What arrives in each request is kept, and answered by `answer`; an error among the answers is
    that of the whole request.
    """

    def __init__(self, answer: Callable[[dict[int, Any], int], AsyncIterator[Any]]) -> None:
        self._answer = answer
        self.requests: list[dict[int, Any]] = []

    def options(self, **settings: Any) -> "Handle":
        assert settings == {"method_name": "ask_each", "stream": True}
        return self

    def remote(self, bag: Any) -> "Handle":
        self.requests.append(pickle.loads(pickle.dumps(bag)))
        return self

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._answer(self.requests[-1], len(self.requests))

    def cancel(self) -> None:
        pass


def check(call: Any, answer: Any) -> None:
    if answer != f"answer to {call}":
        raise ModelUnavailable("the answer to another question")


@pytest.fixture
def sender_of(monkeypatch):
    monkeypatch.setattr(module, "wait_random_exponential", lambda **_: lambda state: 0.0)
    senders: list[BagSender] = []

    def make(answer: Callable[[dict[int, Any], int], AsyncIterator[Any]], num_replicas: int = 1) -> Any:
        client = AppClient(
            "app", what="policy", section="engine", unavailable=ModelUnavailable, timeout_s=30, retries=2,
            note=lambda reason: None,
        )  # fmt: skip
        handle: Any = Handle(answer)
        client.handle = handle
        senders.append(BagSender(partial(client.stream, "ask_each"), num_replicas, check))
        return senders[-1], handle.requests

    yield make
    for sender in senders:
        sender.close()


async def right(calls: dict[int, Any], number: int) -> AsyncIterator[Any]:
    yield [(place, f"answer to {call}") for place, call in calls.items()]


def test_calls_of_some_milliseconds_are_one_request_a_replica(sender_of):
    # by hand: nothing is under way, so two replicas get three calls of five and two
    sender, requests = sender_of(right, num_replicas=2)
    asked = [future for call in "abcde" for future in sender.send([call], gathers=True)]
    assert [future.result(60) for future in asked] == [f"answer to {call}" for call in "abcde"]
    assert [list(calls.values()) for calls in requests] == [["a", "b", "c"], ["d", "e"]]
    for future in sender.send(["piece 1", "piece 2"], gathers=False):
        future.result(60)
    assert [list(calls.values()) for calls in requests[2:]] == [["piece 1"], ["piece 2"]]


def test_each_answer_comes_when_it_is_there_and_those_that_nobody_waits_for_end():
    ended: list[str] = []

    async def ask(call: str) -> str:
        try:
            await asyncio.sleep({"slow": 60, "late": GATHER_S / 5}.get(call, 0))
        except asyncio.CancelledError:
            ended.append(call)
            raise
        return call

    async def first() -> Any:
        answers = each_answer(ask, {0: "slow", 1: "quick", 2: "late"})
        part = await anext(answers)
        await answers.aclose()  # the caller has gone
        await asyncio.sleep(0)
        return part

    began = time.monotonic()
    assert sorted(asyncio.run(first())) == [(1, "quick"), (2, "late")] and ended == ["slow"]
    assert time.monotonic() - began < 30


def test_only_what_has_no_answer_is_sent_again(sender_of):
    async def answer(calls: dict[int, Any], number: int) -> AsyncIterator[Any]:
        if number == 1:
            yield [(0, "answer to a")]
            raise ActorDiedError()
        if number == 2:
            too_long = UsageError("the prompt is too long", "")
            yield [(1, "answer to somebody else"), (2, ModelUnavailable("busy")), (3, too_long), (4, "answer to e")]
            return
        yield [(place, f"answer to {call}") for place, call in calls.items()]

    sender, requests = sender_of(answer)
    *asked, long, last = sender.send(list("abcde"), gathers=True)
    assert [future.result(60) for future in [*asked, last]] == [f"answer to {call}" for call in "abce"]
    with pytest.raises(UsageError, match="too long"):
        long.result(60)
    assert requests == [dict(enumerate("abcde")), {1: "b", 2: "c", 3: "d", 4: "e"}, {1: "b", 2: "c"}]


def test_calls_that_are_never_answered_end_with_the_reason(sender_of):
    async def answer(calls: dict[int, Any], number: int) -> AsyncIterator[Any]:
        raise ActorDiedError()
        yield []

    sender, requests = sender_of(answer)
    for future in sender.send(["a", "b"], gathers=True):
        with pytest.raises(ModelUnavailable, match="gave no answer in 3 tries: ActorDiedError"):
            future.result(60)
    assert len(requests) == 3


def test_closing_cancels_what_is_under_way(sender_of):
    begun, ended = Event(), Event()

    async def answer(calls: dict[int, Any], number: int) -> AsyncIterator[Any]:
        begun.set()
        try:
            await asyncio.sleep(60)
            yield []
        finally:
            ended.set()

    sender, _ = sender_of(answer)
    [asked] = sender.send(["a"], gathers=True)
    assert begun.wait(60)
    sender.close()
    with pytest.raises(CancelledError):
        asked.result(60)
    assert ended.wait(60)
    sender._thread.join(60)


def test_a_replica_counts_as_busy_with_the_calls_that_are_still_open():
    bag = Bag([(call, Future()) for call in "ab"], check)
    requests: Any = [SimpleNamespace(args=[first]) for first in (bag, "a question to a judge")]
    assert [num_calls(request) for request in requests] == [2, 1]
    bag.take([(0, "answer to a")])
    assert num_calls(requests[0]) == 1
