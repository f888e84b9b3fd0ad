"""Faults of served judges: every question gets one right answer, whatever is killed, hung or flooded.

Each test runs small by default and at its full scale with `pytest -m full tests/faults`; the figures of a run go to the
folder that `RLVLM_FAULTS` names. Times count at full scale alone: a busy machine must not fail the small ones.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from chaos import FaultReport, Killer, exists, replica_pids, wait_until
from ray import serve
from ray.serve.exceptions import BackPressureError
from stub_judge import StubJudge, set_trap, stub, stub_queries

from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Query, Verdict
from rlvlm.judges.config import JudgeConfig
from rlvlm.serving.apps import start_judge
from rlvlm.serving.client import Receipt, Request, ServedJudge
from rlvlm.serving.config import PlacementConfig
from rlvlm.serving.deployments import MAX_ONGOING_REQUESTS, MAX_QUEUED_REQUESTS

pytestmark = pytest.mark.ray

SEED = 2026
CONFIG = JudgeConfig(batch_size=4, device="cpu")
PLACEMENT = PlacementConfig(num_replicas=2, num_cpus=0.1, timeout_s=30.0, stall_s=3.0)


@pytest.fixture(scope="module")
def cluster(local_ray) -> Iterator[None]:
    yield
    serve.shutdown()


@pytest.fixture(scope="module")
def trap(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("trap")


@pytest.fixture(scope="module")
def running(cluster, trap) -> Iterator[ServedJudge]:
    """Two replicas of a stub that takes 10 ms per batch and 5 ms per question: about 260 questions per second."""
    build = stub(latency_s=0.01, per_item_s=0.005, trap=str(trap))
    with start_judge(CONFIG, PLACEMENT, "stub", build) as running:
        yield running


@pytest.fixture
def report(request) -> Iterator[FaultReport]:
    report = FaultReport(name=re.sub(r"[^A-Za-z0-9]+", "-", request.node.name).strip("-"), seed=SEED)
    yield report
    sys.stderr.write(f"{report.summary()}\n")
    if folder := os.environ.get("RLVLM_FAULTS"):
        report.write(Path(folder))


def client_of(running: ServedJudge, **changes) -> ServedJudge:
    return ServedJudge(running.app, **{"timeout_s": 30.0, "retries": 6, "batch_size": 4, "in_flight": 8} | changes)


def right(queries: list[Query]) -> list[Verdict]:
    return [StubJudge().verdict(query) for query in queries]


def ask_all(client: ServedJudge, queries: list[Query]) -> list[list[Verdict]]:
    """The answers, each as the one of its question; a call that broke left its questions without."""
    return [[verdict] for verdict in client.compare(queries)]


def scales(small: object, full: object) -> list:
    return [pytest.param(small, id="small"), pytest.param(full, id="full", marks=[pytest.mark.full])]


def test_the_stubs_answer_is_known_beforehand(running):
    queries = stub_queries(20, SEED)
    answers = client_of(running).compare(queries)
    assert [answer.text for answer in answers] == [verdict.text for verdict in right(queries)]
    assert len({answer.text for answer in answers}) == 20


@pytest.mark.parametrize(
    ("count", "kills", "every_s"),
    [pytest.param(300, 2, 1.5, id="small"), pytest.param(5_000, 15, 3.0, id="full", marks=[pytest.mark.full])],
)
def test_killed_replicas_lose_nothing(running, report, count, kills, every_s):
    queries, answers, asked = stub_queries(count, SEED), [], 0
    client = client_of(running)
    with Killer(SEED, lambda: replica_pids(running.app), every_s, at_most=2 if count == 300 else 100) as killer:
        while asked < count or len(killer.killed) < kills:  # the load goes on until there were enough kills
            part = queries[asked : asked + 100] if asked < count else queries[:100]
            start = time.monotonic()
            got = ask_all(client, part)
            answers += got if asked < count else []
            asked += len(part)
            report.recovery_s += [time.monotonic() - moment for moment, _ in killer.killed if moment > start]
    report.faults_injected = len(killer.killed)
    report.count(right(queries), answers)
    assert report.faults_injected >= kills
    assert (report.survived, report.lost, report.duplicated, report.wrong) == (count, 0, 0, 0)
    wait_until(lambda: len(replica_pids(running.app)) == 2, 60, "both replicas back")


TEN_HANGS = [("sleep",), ("gil",), ("stop",), ("loop",), ("stop",)] * 2


@pytest.mark.parametrize("rounds", scales([("sleep", "stop")], TEN_HANGS))
def test_a_stuck_replica_is_replaced(running, report, trap, rounds):
    queries = stub_queries(40, SEED + 1)
    for kinds in rounds:
        wait_until(lambda: len(replica_pids(running.app)) == 2, 60, "two replicas to begin with")
        before = set(replica_pids(running.app))
        start = [set_trap(trap, kind) for kind in kinds][0]
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask_all, client_of(running, timeout_s=10.0), queries)
            wait_until(partial(_are_replaced, running.app, before, len(kinds)), 120, f"hang {kinds}: noticed")
            wait_until(lambda: len(replica_pids(running.app)) == 2, 120, f"hang {kinds}: replaced")
            report.recovery_s.append(time.monotonic() - start)
            report.count(right(queries), asking.result(120))
        report.faults_injected += len(kinds)
        gone = before - set(replica_pids(running.app))
        wait_until(lambda gone=gone: not any(map(exists, gone)), 60, f"hang {kinds}: process {gone} gone")
    assert (report.lost, report.duplicated, report.wrong) == (0, 0, 0)
    assert rounds is not TEN_HANGS or max(report.recovery_s) <= 15.0, report.recovery_s


def _are_replaced(app: str, before: set[int], count: int) -> bool:
    return len(before - set(replica_pids(app))) == count


@pytest.mark.parametrize("lasting_s", scales(2.0, 60.0))
def test_an_overload_is_refused_and_forgotten(running, report, lasting_s):
    # two replicas answer about 260 questions per second; ten times that is 650 requests of 4 per second
    handle = serve.get_app_handle(running.app)
    queries = stub_queries(4_000, SEED + 2)
    responses, begin = [], time.monotonic()
    while (now_s := time.monotonic() - begin) < lasting_s:
        due = min(int(650 * now_s) + 1, len(responses) + 65)
        for number in range(len(responses), due):
            items = [queries[(4 * number + place) % len(queries)] for place in range(4)]
            request = Request(key=f"overload-{number}", run="flood", kind="compare", items=items)
            responses.append((items, handle.ask.remote(request)))
        time.sleep(0.01)
    end = time.monotonic()
    fresh = stub_queries(4, SEED + 3)
    assert client_of(running, retries=10).compare(fresh) == right(fresh)
    report.recovery_s.append(time.monotonic() - end)
    refused = answered = 0
    for items, response in responses:
        try:
            receipt = response.result(timeout_s=30)
        except BackPressureError:
            refused += 1
            continue
        assert isinstance(receipt, Receipt)
        report.count(right(items), [[answer] for answer in receipt.answers])
        answered += 1
    report.faults_injected = len(responses)
    report.extra = {
        "offered": len(responses),
        "answered": answered,
        "refused": refused,
        "drained_s": round(time.monotonic() - end, 2),
    }
    bound = 2 * MAX_ONGOING_REQUESTS + MAX_QUEUED_REQUESTS
    assert refused >= len(responses) - 130 * lasting_s - bound, "what waits is bounded"
    assert refused > 0 and report.lost == report.wrong == 0
    assert lasting_s < 60 or report.recovery_s[0] <= 5.0


@pytest.mark.parametrize("count", scales(300, 5_000))
def test_two_runs_on_one_server_share_it_and_never_cross(running, report, count):
    mine, theirs = stub_queries(count, SEED + 4), stub_queries(count, SEED + 5)
    alone_s = _latency_s(client_of(running, run="calm"), mine[:40])
    over = threading.Event()
    with ThreadPoolExecutor(10) as pool:
        flood = client_of(running, run="flood", in_flight=2)  # twenty at once: within the queue
        parts = [theirs[start::10] for start in range(10)]
        asking = [pool.submit(_ask_until, flood, part, over) for part in parts]
        calm_s = _latency_s(client_of(running, run="calm"), mine[:40])
        report.count(right(mine), ask_all(client_of(running, run="calm"), mine))
        over.set()
        for part, future in zip(parts, asking, strict=True):
            report.count(right(part), future.result(120))
    report.extra = {
        "calm_alone_s": round(alone_s, 3),
        "calm_flooded_s": round(calm_s, 3),
        "slowdown": round(calm_s / alone_s, 2),
    }
    assert (report.survived, report.lost, report.wrong) == (2 * count, 0, 0)
    is_fair = calm_s <= 10 * alone_s  # twenty requests against one would be twenty times without fair shares
    assert count < 5_000 or is_fair, report.extra


def _latency_s(client: ServedJudge, queries: list[Query]) -> float:
    """The 95th percentile of the time that requests of four take, one after the other."""
    times = []
    for start in range(0, len(queries), 4):
        begin = time.monotonic()
        client.compare(queries[start : start + 4])
        times.append(time.monotonic() - begin)
    return sorted(times)[int(0.95 * len(times))]


def _ask_until(client: ServedJudge, queries: list[Query], over: threading.Event) -> list[list[Verdict]]:
    """All answers; goes on asking until it is over, so that the flood lasts."""
    answers = ask_all(client, queries)
    while not over.is_set():
        assert ask_all(client, queries) == answers
    return answers


@pytest.mark.parametrize(
    ("broken", "cause", "fix"),
    [
        ("unavailable", "the weights are made of cheese", "from the moon"),
        ("no room", "RuntimeError: no room", "replica's log"),
        ("two\nlines", "RuntimeError: two", "replica's log"),
        ("exit", "could not start", "replica's log"),
    ],
)
@pytest.mark.full  # by default `tests/serving/test_apps.py` has one such case
def test_a_judge_that_cannot_start_says_why(cluster, report, broken, cause, fix):
    start = time.monotonic()
    with pytest.raises(JudgeUnavailable, match=cause) as caught:
        start_judge(CONFIG, PLACEMENT, "broken", stub(broken=broken)).__enter__()
    report.faults_injected, report.recovery_s = 1, [time.monotonic() - start]
    assert fix in caught.value.fix and caught.value.exit_code == 5
    assert report.recovery_s[0] <= 60
    assert not [app for app in serve.status().applications if "broken" in app]
