"""Frequency with which pieces of a row meet in one replica, and time per row, with Serve's router and with rlvlm's.

A row is what `ServedEngine` sends: one request a replica, all at once, the next row when all are answered. Replicas
sleep in place of a model, so a row of them should take as long as one piece on any machine.

    python benchmarks/replica_rows.py --replicas 1 2 4 8
"""

import argparse
import asyncio
import os
import statistics
import time

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from rlvlm.serving.router import FewestRequestsRouter

ROUTERS = {"serve": RequestRouterConfig(), "ours": RequestRouterConfig(request_router_class=FewestRequestsRouter)}


class Sleeper:
    """A replica that computes one request at a time, for `seconds` each."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._model = seconds, asyncio.Lock()

    async def ask(self) -> int:
        """The id of the process that answered."""
        async with self._model:
            await asyncio.sleep(self._seconds)
        return os.getpid()


def measure(router: str, replicas: int, rows: int, seconds: float) -> tuple[int, float]:
    """Rows in which two pieces met, and the median of a row in seconds."""
    deployment = serve.deployment(
        num_replicas=replicas, max_ongoing_requests=16, ray_actor_options={"num_cpus": 0},
        request_router_config=ROUTERS[router],
    )(Sleeper)  # fmt: skip
    handle = serve.run(deployment.bind(seconds), name=f"rows-{router}-{replicas}", route_prefix=None)
    collisions, times = 0, []
    for _ in range(rows):
        start = time.perf_counter()
        responses = [handle.ask.remote() for _ in range(replicas)]
        processes = [response.result() for response in responses]
        times.append(time.perf_counter() - start)
        collisions += len(set(processes)) < replicas
    serve.delete(f"rows-{router}-{replicas}")
    return collisions, statistics.median(times)


def main() -> None:
    """Prints one line per router and number of replicas."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=0.3, help="of sleep a piece")
    args = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
    for replicas in args.replicas:
        for router in ROUTERS:
            collisions, median_s = measure(router, replicas, args.rows, args.seconds)
            print(
                f"{replicas} replicas, {router:>5}: {collisions:2} of {args.rows} rows collide, median {median_s:.3f} s"
            )
    ray.shutdown()


if __name__ == "__main__":
    main()
