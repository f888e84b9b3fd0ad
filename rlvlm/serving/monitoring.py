"""All metrics at Ray's Prometheus endpoint: name, kind, tags, and who observes them.

Ray exports them on each node's metrics port beside its own (Serve's latencies, queues and replica health), with the
prefix `ray_` and, for counters, the suffix `_total`; `docs/monitoring/rlvlm.json` is a Grafana dashboard for them. In a
process without Ray, observing does nothing.
"""

from collections import Counter as Tally
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.util import metrics as ray_metrics

from rlvlm.core.judging import Score, Verdict

SIZES = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0]

ANSWERS = "rlvlm_judge_answers"
"""Counter, tags kind (compare, score), status (ok, no_preference, invalid, failed), run: questions answered."""
BATCH_SIZE = "rlvlm_judge_batch_size"
"""Histogram, tag kind: questions per batch."""
QUEUE = "rlvlm_judge_queue"
"""Gauge: questions waiting in a replica for a batch."""
LATENCY_S = "rlvlm_judge_latency_s"
"""Histogram, tag kind: seconds a request spent in a replica, including waiting."""
GPU_BYTES = "rlvlm_judge_gpu_bytes"
"""Gauge: maximum GPU memory that the replica has held, bytes."""
RETRIES = "rlvlm_judge_retries"
"""Counter, tag reason (the error's name): requests that a client sent again."""
REFUSED = "rlvlm_judge_refused"
"""Counter: requests refused because the queue was full."""
CROSSED = "rlvlm_judge_crossed"
"""Counter: answers to other images than those sent; anything but 0 is a bug of ours."""
CACHE_HITS = "rlvlm_cache_hits"
"""Gauge, tag run: questions answered from the cache so far."""
CACHE_MISSES = "rlvlm_cache_misses"
"""Gauge, tag run: questions asked of the judge so far."""
RUN_FIGURE = "rlvlm_run_figure"
"""Gauge, tags run and figure: latest value of each metric of a run, named as in its `metrics.jsonl`."""

COUNTERS = (ANSWERS, RETRIES, REFUSED, CROSSED)
GAUGES = (QUEUE, GPU_BYTES, CACHE_HITS, CACHE_MISSES, RUN_FIGURE)
HISTOGRAMS = (BATCH_SIZE, LATENCY_S)


class ReplicaMetrics:
    """Metrics of one replica. Serve adds the tags application, deployment and replica."""

    def __init__(self) -> None:
        # slow to import, and a run without replicas has none; as Ray's own, plus application, deployment and replica
        from ray.serve import metrics as serve_metrics

        tags: Any = ("kind", "status", "run")  # Serve's own annotation allows one tag only
        self._answers = serve_metrics.Counter(ANSWERS, "Questions answered.", tag_keys=tags)
        self.batch_size = serve_metrics.Histogram(BATCH_SIZE, "Questions per batch.", SIZES, tag_keys=("kind",))
        self._latency_s = serve_metrics.Histogram(LATENCY_S, "Seconds per request.", SECONDS, tag_keys=("kind",))
        self._queue = serve_metrics.Gauge(QUEUE, "Questions waiting for a batch.")
        self._gpu_bytes = serve_metrics.Gauge(GPU_BYTES, "Most GPU memory held, in bytes.")

    def request(self, kind: str, run: str, answers: Sequence[Verdict | Score], seconds: float) -> None:
        """Counts the answers to one request by status."""
        for status, count in Tally(answer.status for answer in answers).items():
            self._answers.inc(count, {"kind": kind, "status": status.value, "run": run or "unnamed"})
        self._latency_s.observe(seconds, {"kind": kind})

    def state(self, num_waiting: int, gpu_bytes: int = 0) -> None:
        """Records the replica's queue and GPU memory."""
        self._queue.set(num_waiting)
        self._gpu_bytes.set(gpu_bytes)


class ClientMetrics:
    """Metrics of the client's side: failed tries."""

    def __init__(self) -> None:
        self.retries = ray_metrics.Counter(RETRIES, "Requests sent again.", tag_keys=("run", "reason"))
        self.refused = ray_metrics.Counter(REFUSED, "Requests refused: queue full.", tag_keys=("run",))
        self.crossed = ray_metrics.Counter(CROSSED, "Answers about other images than were sent.", tag_keys=("run",))


def show_cache(run: str) -> Callable[[int, int], None]:
    """Returns a function that exports hits and misses, which a run's `CachedJudge` calls after every answer."""
    hits = ray_metrics.Gauge(CACHE_HITS, "Questions answered from memory.", tag_keys=("run",))
    misses = ray_metrics.Gauge(CACHE_MISSES, "Questions put to the judge.", tag_keys=("run",))

    def show(num_hits: int, num_misses: int) -> None:
        hits.set(num_hits, {"run": run})
        misses.set(num_misses, {"run": run})

    return show


def show_figures(run: str) -> Callable[[Mapping[str, float]], None]:
    """Returns a function that exports each row of a run's metrics, of training and labels, beside the judge's."""
    gauge = ray_metrics.Gauge(RUN_FIGURE, "Newest figures of a run.", tag_keys=("run", "figure"))

    def show(row: Mapping[str, float]) -> None:
        for figure, value in row.items():
            gauge.set(value, {"run": run, "figure": figure})

    return show
