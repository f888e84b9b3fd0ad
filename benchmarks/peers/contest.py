"""What a contestant of `sac_peers.py` runs in: it takes orders on stdin and answers on stdout, one JSON line each."""

import json
import os
import sys
import time
from collections.abc import Callable

BATCH, WARM_UP_STEPS = 256, 500
"""Rows per update; steps with random actions before the first one."""


def answer_orders(advance: Callable[[int], None]) -> None:
    """Calls `advance(steps)` for every line with a number, and tells how long it took until stdin ends.

    `wall_s` is what a user waits; `cpu_s` counts the processor time of this whole process, which busy neighbours
    on the same machine hardly change.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print must not mix with the answers
    for line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        advance(int(line))
        print(json.dumps({"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}), file=answers,
              flush=True)
