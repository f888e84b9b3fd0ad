"""Faults of served judges: every question gets one right answer, whatever is killed, hung or flooded.

Each test runs small by default and at its full scale with `pytest -m full tests/faults`; the figures of a run go to the
folder that `RLVLM_FAULTS` names. Times count at full scale alone: a busy machine must not fail the small ones.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer, Call, Response, error
from chaos import FaultReport, Killer, exists, replica_pids, wait_until
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from stub_judge import WHO, StubJudge, set_trap, stub, stub_queries
from tiny_run import table

from rlvlm.algorithms.sft_config import ChunkSFTConfig
from rlvlm.core import metrics
from rlvlm.core.errors import JudgeUnavailable
from rlvlm.core.judging import Clip, Query, Verdict
from rlvlm.judges.config import JudgeConfig
from rlvlm.rewards.config import ChunkRewardConfig, MonitorConfig
from rlvlm.serving.apps import start_judge
from rlvlm.serving.client import Receipt, Request, ServedJudge
from rlvlm.serving.config import PlacementConfig
from rlvlm.serving.deployments import MAX_ONGOING_REQUESTS, MAX_QUEUED_REQUESTS
from tests.algorithms.policy_gradient.tiny_runs import chunk_config

pytestmark = pytest.mark.ray

SEED = 2026
CONFIG = JudgeConfig(batch_size=4, device="cpu")
PLACEMENT = PlacementConfig(num_replicas=2, num_cpus=0.1, timeout_s=30.0, stall_s=3.0)


@pytest.fixture(scope="module")
def cluster(local_ray):
    yield
    serve.shutdown()


@pytest.fixture(scope="module")
def trap(tmp_path_factory):
    return tmp_path_factory.mktemp("trap")


@pytest.fixture(scope="module")
def running(cluster, trap):
    """Two replicas of a stub that takes 10 ms per batch and 5 ms per question: about 260 questions per second."""
    build = stub(latency_s=0.01, per_item_s=0.005, trap=str(trap))
    with start_judge(CONFIG, PLACEMENT, "stub", build) as running:
        yield running


@pytest.fixture
def report(request):
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


def test_pieces_of_a_row_meet_in_no_replica(running):
    # two pieces at once, as an engine sends a row; Serve's own router has them meet in half of all rows
    rows = [client_of(running).compare(stub_queries(8, seed, WHO)) for seed in range(12)]
    assert [len({verdict.text for verdict in row}) for row in rows] == [2] * 12


def one_slow(config: JudgeConfig, folder: Path) -> StubJudge:
    """The first of an app's judges takes half a second a batch, the others ten milliseconds."""
    with suppress(FileExistsError):
        (folder / "slow").touch(exist_ok=False)
        return StubJudge(latency_s=0.5)
    return StubJudge(latency_s=0.01)


def test_a_slow_replica_is_named_and_the_others_go_on(cluster, tmp_path, caplog):
    with start_judge(CONFIG, PLACEMENT, "uneven", partial(one_slow, folder=tmp_path)) as running:
        client = client_of(running)
        client.compare(stub_queries(80, SEED))
        # two pieces at once, as an engine sends a row: one would go to each
        rows = [client.compare(stub_queries(8, seed, WHO)) for seed in range(4)]
        assert len({verdict.text for row in rows for verdict in row}) == 1
        (line,) = [record.getMessage() for record in caplog.records if "is slow" in record.getMessage()]
        assert running.app in line and "a request takes 0.5" in line


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
    wait_until(lambda: len(replica_pids(running.app)) == 2, "both replicas back")


TEN_HANGS = [("sleep",), ("gil",), ("stop",), ("loop",), ("stop",)] * 2


@pytest.mark.parametrize("rounds", scales([("sleep", "stop")], TEN_HANGS))
def test_a_stuck_replica_is_replaced(running, report, trap, rounds):
    queries = stub_queries(40, SEED + 1)
    for kinds in rounds:
        wait_until(lambda: len(replica_pids(running.app)) == 2, "two replicas to begin with")
        before = set(replica_pids(running.app))
        start = [set_trap(trap, kind) for kind in kinds][0]
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask_all, client_of(running, timeout_s=10.0), queries)
            wait_until(partial(_are_replaced, running.app, before, len(kinds)), f"hang {kinds}: noticed")
            wait_until(lambda: len(replica_pids(running.app)) == 2, f"hang {kinds}: replaced")
            report.recovery_s.append(time.monotonic() - start)
            report.count(right(queries), asking.result(120))
        report.faults_injected += len(kinds)
        gone = before - set(replica_pids(running.app))
        wait_until(lambda gone=gone: not any(map(exists, gone)), f"hang {kinds}: process {gone} gone")
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
    refused = answered = interrupted = 0
    for items, response in responses:
        try:
            receipt = response.result(timeout_s=30)
        except BackPressureError:
            refused += 1
            continue
        except RayActorError:  # a starved machine answers health checks late; a client, unlike a handle, asks again
            interrupted += 1
            continue
        assert isinstance(receipt, Receipt)
        report.count(right(items), [[answer] for answer in receipt.answers])
        answered += 1
    report.faults_injected = len(responses)
    report.extra = {
        "offered": len(responses),
        "answered": answered,
        "refused": refused,
        "interrupted": interrupted,
        "drained_s": round(time.monotonic() - end, 2),
    }
    bound = 2 * MAX_ONGOING_REQUESTS + MAX_QUEUED_REQUESTS
    assert refused >= len(responses) - 130 * lasting_s - bound, "what waits is bounded"
    assert refused > 0 and report.lost == report.wrong == 0
    assert lasting_s < 60 or (report.recovery_s[0] <= 5.0 and not interrupted)


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


@pytest.mark.slow
@pytest.mark.parametrize("kills", scales(2, 10))
def test_replicas_killed_while_they_score_leave_every_episode_one_score(cluster, kills):
    """The stub's score follows from the images alone, so that a lost, doubled or swapped one would be seen."""
    untested = MonitorConfig(preflight=0, controls=0)
    with start_judge(CONFIG, PLACEMENT, "rollouts", stub(per_item_s=0.03)) as running:
        algorithm: Any = chunk_config(
            sft=ChunkSFTConfig(episodes=8, updates=10),
            reward=ChunkRewardConfig(source="judged", frame_px=16, num_frames=3, monitor=untested),
            make_judge=partial(client_of, running),
            groups=8,
            group_size=4,
            rounds=1,
        ).build_algo()
        records: list[Any] = []
        algorithm.prepare(lambda line: None)
        with Killer(SEED, lambda: replica_pids(running.app), 1.5, at_most=kills) as killer:
            while len(killer.killed) < kills or len(records) < 64:
                algorithm.train()
                records += algorithm.drain_records()
        episodes = algorithm.report()[metrics.EPISODES]
        clips = [Clip(goal=one.item.goal, frames=algorithm.draw(one.item.snapshots, 16)) for one in records]
        algorithm.stop()
    assert len(records) == episodes, "one score an episode"
    expected = [score.value for score in StubJudge().score(clips)]
    assert [one.score.value for one in records] == expected and len(set(expected)) > 20


WORDS = (
    "push_block --steps 4000 --sft.episodes 8 --sft.updates 20 --algo.groups 4 --algo.group-size 4 --algo.rounds 1 "
    "--policy.pocket.hidden 32 --policy.pocket.image-px 16 --eval.every-steps 2000 --eval.episodes 2 "
    "--track.checkpoint-every-steps 500 --track.log-every-steps 500 --reward.source judged --reward.num-frames 2 "
    "--reward.frame-px 16 --reward.monitor.preflight 0 --reward.monitor.controls 0 --judge.backend openai "
    "--judge.model m --judge.score progress --judge.api.retries 1 --judge.api.deadline-s 5"
).split()


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.full
def test_a_judge_that_is_gone_for_good_ends_the_run_which_goes_on_when_it_is_back(tmp_path):
    gone, back, server = threading.Event(), threading.Event(), ApiServer()
    truth = server.truth

    def answer(call: Call) -> Response:
        if len(server.calls) > 80:
            gone.set()
        return error(503, "out of order") if gone.is_set() and not back.is_set() else truth(call)

    server.truth = answer
    out = tmp_path / "run"
    with server.running() as url:
        ended = run("rlvlm.run", *WORDS, "--judge.api.base-url", url, "--out", str(out))
        assert ended.returncode == 5, ended.stdout + ended.stderr
        assert "503" in ended.stderr and f"resume with: rlvlm resume {out}" in ended.stdout
        rows = table(out / "vlm_score_log.csv")
        assert rows and all(row["vlm_score"] for row in rows), "no score was made up"
        back.set()
        resumed = run("rlvlm.cli", "resume", str(out))
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    assert (summary["exit_reason"], summary["env_steps"] >= 4_000) == ("done", True)
    steps = [json.loads(line)["env_steps"] for line in open(out / "metrics.jsonl")]
    assert steps == sorted(set(steps)), "each step stands in the log once"
