"""Process of a contestant of `sac_peers.py`: it reads commands on stdin and answers on stdout, one JSON line each."""

import json
import os
import sys
import time
from collections.abc import Callable

BATCH, WARM_UP_STEPS = 256, 500
"""Rows per update; steps with random actions before the first one."""


def answer_orders(advance: Callable[[int], int]) -> None:
    """Calls `advance(steps)` for every line with a number, and tells what it took, until stdin ends.

    `advance` returns the steps it made: some only stop at an episode's end. `wall_s` is what a user waits; `cpu_s`
    counts the processor time of this whole process, which busy neighbours on the same machine change less.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print must not mix with the answers
    for line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        steps = advance(int(line))
        answer = {"steps": steps, "wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        print(json.dumps(answer), file=answers, flush=True)
