"""A replica without Ray around it."""

import asyncio
import threading
from collections.abc import Callable

import numpy as np
import pytest
import ray
from api_server import ApiServer

from rlvlm.core.errors import JudgeUnavailable, UnsupportedQuestion
from rlvlm.core.judging import Clip, Query
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig
from rlvlm.serving import judge_replica as module
from rlvlm.serving.client import Receipt, Request, digest
from rlvlm.serving.config import PlacementConfig
from rlvlm.serving.judge_replica import JudgeReplica
from rlvlm.serving.replica import marked
from rlvlm.testing import FakeJudge
from rlvlm.vlms.config import ApiConfig


def make_queries(count: int) -> list[Query]:
    """Query i's right side is brighter when i is odd."""
    grey, dark, light = (np.full((1, 4, 4, 3), level, np.uint8) for level in (100, 50, 150))
    return [Query(goal="open the drawer", left=grey, right=light if index % 2 else dark) for index in range(count)]


class SlowJudge(FakeJudge):
    """Notes the size of each batch, waits when told to and breaks when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.error: Exception | None = None

    def compare(self, queries):
        self.sizes.append(len(queries))
        self.may_answer.wait(30)
        if self.error:
            raise self.error
        return super().compare(queries)

    async def answer(self, item):
        return self.compare([item])[0]


def make_replica(judge: SlowJudge, **placement) -> JudgeReplica:
    replica = JudgeReplica(JudgeConfig(device="cpu", batch_size=8), PlacementConfig(**placement), lambda config: judge)
    assert judge.sizes == [1], "a judge is asked once before it is ready"
    judge.sizes.clear()
    return replica


@pytest.fixture
def judge():
    return SlowJudge()


def test_small_requests_share_batches_and_each_gets_its_own_answers(judge, monkeypatch):
    monkeypatch.setattr(module, "BATCH_WAIT_S", 0.5)

    # by hand: 12 requests of 2 are 24 questions, three batches of 8
    async def ask():
        replica = make_replica(judge)
        queries = make_queries(24)
        return await asyncio.gather(*(replica.compare(queries[start : start + 2]) for start in range(0, 24, 2)))

    outcomes = asyncio.run(ask())
    assert judge.sizes == [8, 8, 8]
    assert [verdict for outcome in outcomes for verdict in outcome] == FakeJudge().compare(make_queries(24))


def test_a_large_request_is_cut_to_batches(judge):
    async def ask():
        replica = make_replica(judge)
        clip = Clip(goal="open the drawer", frames=make_queries(1)[0].left)
        return await replica.compare(make_queries(20)), await replica.score([clip] * 20), await replica.compare([])

    verdicts, scores, nothing = asyncio.run(ask())
    assert verdicts == FakeJudge().compare(make_queries(20)) and sorted(judge.sizes) == [4, 8, 8]
    assert len(scores) == 20 and nothing == []


def test_the_receipt_says_which_images_were_looked_at(judge):
    queries = make_queries(3)
    receipt = asyncio.run(make_replica(judge).ask(Request(key="k", run="a", kind="compare", items=queries)))
    assert isinstance(receipt, Receipt)
    assert receipt.answers == FakeJudge().compare(queries)
    assert receipt.digests == [digest(query) for query in queries] and digest(queries[0]) != digest(queries[1])


@pytest.mark.parametrize(
    "error",
    [
        JudgeUnavailable("the card fell off the bus", "restart it"),
        UnsupportedQuestion("it compares nothing", "restart it"),
    ],
)
def test_an_outage_travels_as_a_value(judge, error):
    async def ask():
        replica = make_replica(judge)
        judge.error = error
        return await replica.compare(make_queries(3))

    outcome = asyncio.run(ask())
    assert outcome is error


def test_the_pocket_judge_refuses_unknown_tasks_from_other_callers(judge):
    coffee = [Query(goal="make coffee", left=query.left, right=query.right) for query in make_queries(2)]
    refused = asyncio.run(make_replica(judge).compare(coffee))
    assert isinstance(refused, UnsupportedQuestion) and "make coffee" in str(refused)
    assert "open the drawer" in refused.fix and judge.sizes == [], "and the model is not asked"
    asked_all_the_same = JudgeReplica(
        JudgeConfig(device="cpu", untrained="ok"), PlacementConfig(), lambda config: SlowJudge()
    )
    assert len(asyncio.run(asked_all_the_same.compare(coffee))) == 2  # type: ignore[arg-type]


def test_an_idle_judge_is_probed_beside_the_health_check(judge, monkeypatch):
    monkeypatch.setattr(module, "PROBE_EVERY_S", 0.0)

    async def check():
        replica = make_replica(judge)
        await replica.check_health()
        assert judge.sizes == [], "the check does not wait for the model"
        await until(lambda: judge.sizes == [1])

    asyncio.run(check())


def test_a_judge_that_breaks_is_unhealthy_until_it_answers_a_probe(judge):
    async def check():
        replica = make_replica(judge)
        await replica.check_health()
        judge.error = JudgeUnavailable("device-side assert")
        await replica.compare(make_queries(1))
        for _ in range(3):
            with pytest.raises(RuntimeError, match="does not answer: device-side assert"):
                await replica.check_health()
        judge.error = None
        await until(lambda: not replica._failure, replica.check_health)

    asyncio.run(check())


async def until(holds: Callable[[], bool], between=None) -> None:
    for _ in range(500):
        if holds():
            return
        await asyncio.sleep(0.01)
        if between is not None and not holds():
            try:
                await between()
            except RuntimeError:
                pass
    raise AssertionError("waited 5 s in vain")


def test_a_busy_judge_is_healthy(judge):
    async def check():
        replica = make_replica(judge)
        judge.may_answer.clear()
        request = asyncio.create_task(replica.compare(make_queries(1)))
        await until(lambda: bool(judge.sizes))
        await asyncio.wait_for(replica.check_health(), 1)
        judge.may_answer.set()
        await request

    asyncio.run(check())


def test_a_paid_judge_is_never_asked_for_nothing(judge, monkeypatch):
    monkeypatch.setattr(module, "PROBE_EVERY_S", 0.0)
    config = JudgeConfig(backend="openai", model="gpt-9", device="cpu")

    async def check():
        replica = JudgeReplica(config, PlacementConfig(), lambda config: judge)
        await replica.check_health()
        judge.error = JudgeUnavailable("quota")
        await replica.compare(make_queries(1))
        await replica.check_health()
        await asyncio.sleep(0.05)

    asyncio.run(check())
    assert judge.sizes == [1]


def test_a_paid_answer_does_not_wait_for_others_of_its_batch():
    hangs, server = threading.Event(), ApiServer()
    truth = server.truth
    server.truth = lambda call: (hangs.wait(30) if call.images[0].mean() == 255 else None, truth(call))[1]
    light = np.full((1, 4, 4, 3), 255, np.uint8)
    slow = Query(goal="open the drawer", left=light, right=light)

    async def check(url):
        replica = JudgeReplica(
            JudgeConfig(backend="openai", model="m", device="cpu", api=ApiConfig(base_url=url)), PlacementConfig()
        )
        queries = [slow, *make_queries(3)]
        asked = [Request(key=str(n), run="a", kind="compare", items=[query]) for n, query in enumerate(queries)]
        waiting, *others = [asyncio.ensure_future(replica.ask(request)) for request in asked]
        receipts = await asyncio.wait_for(asyncio.gather(*others), 20)
        assert not waiting.done() and all(receipt.answers[0].status == "ok" for receipt in receipts)
        hangs.set()
        assert (await waiting).answers[0].status == "no_preference"

    with server.running() as url:
        asyncio.run(check(url))


def test_a_request_in_which_a_budget_ends_brings_what_was_paid_for():
    server = ApiServer()

    async def check(url):
        api = ApiConfig(base_url=url, max_requests=5)
        replica = JudgeReplica(JudgeConfig(backend="openai", model="m", device="cpu", api=api), PlacementConfig())
        receipts = [await replica.ask(Request(key=key, run="a", kind="compare", items=make_queries(8))) for key in "ab"]
        return receipts, await replica.compare(make_queries(3))

    with server.running() as url:
        (receipt, refused), direct = asyncio.run(check(url))
    spent = [answer for answer in receipt.answers if isinstance(answer, JudgeUnavailable)]
    assert len(server.calls) == 5 and len(receipt.answers) - len(spent) > 0
    for error in (*spent, refused, direct):
        assert "budget of 5 requests" in str(error)


def too_large(config: JudgeConfig) -> FakeJudge:
    raise MemoryError("no room")


@pytest.mark.parametrize(
    ("model", "build", "said"),
    [
        ("/no/such/folder", build_judge, "no/such/folder.*does not exist"),
        ("", too_large, "MemoryError: no room.*replica's log"),
        ("", lambda config: FakeJudge(failing=1), "failed on a first, easy question: outage"),
    ],
)
def test_a_judge_that_does_not_start_says_why_in_one_line(model, build, said):
    with pytest.raises(RuntimeError, match=f"rlvlm-cause.*{said}"):
        JudgeReplica(JudgeConfig(model=model, device="cpu"), PlacementConfig(), build)


def test_of_several_nodes_the_one_is_named_on_which_a_replica_does_not_start(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    for count in (1, 2):
        monkeypatch.setattr(ray, "nodes", lambda count=count: [{"Alive": True}] * count)
        assert ("(on node " in str(marked(JudgeUnavailable("no such folder", "")))) == (count == 2)
