"""Ten times more over HTTP than the judge can answer: what waits is bounded, every refusal is a 429."""

import asyncio
import base64
import io
import json
import os
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import psutil
import pytest
import ray
from chaos import FaultReport
from PIL import Image
from ray import serve
from ray.serve.config import HTTPOptions
from stub_judge import stub

from rlvlm.judges.config import JudgeConfig
from rlvlm.serving.config import HttpConfig, PlacementConfig
from rlvlm.serving.deployments import bind_judge
from rlvlm.serving.ingress import bind_gateway

pytestmark = [pytest.mark.ray, pytest.mark.full]  # its small version is the handle's, in test_served_judges.py

SEED = 2026
LASTING_S, RATE = float(os.environ.get("RLVLM_OVERLOAD_S", "60")), 60.0
"""The stub answers about 6 requests per second. More than 60 a gateway on half a core reads late, and refuses too."""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A gateway in front of one slow stub: its address and the header that opens it."""
    token_file = tmp_path_factory.mktemp("token") / "token"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host="127.0.0.1", port=port))
    placement = PlacementConfig(num_cpus=0.1)
    judge = bind_judge(JudgeConfig(batch_size=4), placement, stub(latency_s=0.66))
    serve.run(judge, name="stub", route_prefix=None)
    serve.run(bind_gateway(HttpConfig(judges=("stub",), token_file=str(token_file))), name="gateway", route_prefix="/")
    yield f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {token_file.read_text().strip()}"}
    serve.shutdown()
    ray.shutdown()


def image(rng: np.random.Generator) -> str:
    stream = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


def gateway_rss_mb() -> float:
    return (
        sum(
            process.info["memory_info"].rss
            for process in psutil.process_iter(["cmdline", "memory_info"])
            if "ServeReplica:gateway" in " ".join(process.info["cmdline"] or [])
        )
        / 2**20
    )


async def flood(url: str, headers: dict[str, str], bodies: list[Any]) -> tuple[Counter[int], list[float], int, float]:
    """Statuses, seconds of the accepted requests, refusals without Retry-After, and how long after the end of the
    flood, at a steady rate, a fresh request was answered.
    """
    statuses: Counter[int] = Counter()
    accepted_s: list[float] = []
    bare = 0

    async def post(client: aiohttp.ClientSession, body: dict[str, Any]) -> bool:
        nonlocal bare
        start = time.monotonic()
        async with client.post(f"{url}/v1/preference", json=body, headers=headers) as answer:
            await answer.read()
        statuses[answer.status] += 1
        if answer.status == 200:
            accepted_s.append(time.monotonic() - start)
        else:
            bare += "Retry-After" not in answer.headers
        return answer.status == 200

    connector = aiohttp.TCPConnector(limit=0)  # httpx takes time quadratic in the number of connections
    async with aiohttp.ClientSession(connector=connector) as client, asyncio.TaskGroup() as group:
        begin, sent = time.monotonic(), 0
        while (now_s := time.monotonic() - begin) < LASTING_S:
            for _ in range(int(RATE * now_s) - sent):
                group.create_task(post(client, bodies[sent % len(bodies)]))
                sent += 1
            await asyncio.sleep(0.01)
        end = time.monotonic()
        while not await post(client, bodies[0]):
            await asyncio.sleep(0.1)
        recovered_s = time.monotonic() - end
    return statuses, accepted_s, bare, recovered_s


def test_every_refusal_is_a_429_and_the_judge_recovers(address):
    url, headers = address
    rng = np.random.default_rng(SEED)
    bodies = [{"goal": "open the drawer", "left": [image(rng)], "right": [image(rng)]} for _ in range(50)]
    assert httpx.post(f"{url}/v1/preference", json=bodies[0], headers=headers, timeout=60).status_code == 200
    before_mb = gateway_rss_mb()
    statuses, accepted_s, bare, recovered_s = asyncio.run(flood(url, headers, bodies))
    grown_mb = gateway_rss_mb() - before_mb
    report = FaultReport(name="http-overload", seed=SEED, faults_injected=statuses.total(), recovery_s=[recovered_s])
    report.extra = {
        "offered": statuses.total(),
        "answered": statuses[200],
        "refused": statuses[429],
        "accepted_p95_s": round(float(np.percentile(accepted_s, 95)), 2),
        "gateway_grown_mb": round(grown_mb, 1),
    }
    if folder := os.environ.get("RLVLM_FAULTS"):
        report.write(Path(folder))
    assert set(statuses) == {200, 429}, json.dumps(report.summary()) + str(statuses)
    assert bare == 0 and statuses[429] > statuses[200] / 2, report.summary()
    assert grown_mb <= 150 and recovered_s <= 5, report.summary()
