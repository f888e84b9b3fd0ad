"""Success rates of the scripted expert in LIBERO's tasks, as rows of docs/libero.md's table.

    python benchmarks/libero_experts.py --suites libero_object libero_spatial --episodes 20

Held-out initial states, things moved, actions with the noise of demonstrations; processor time of one core.
"""

import gc
import time
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import tyro

from rlvlm.envs.env import FIRST_HELD_OUT_STATE
from rlvlm.envs.libero.tasks import SUITES
from rlvlm.envs.registry import make_env, task_env, task_goal


@dataclass(frozen=True, kw_only=True)
class Trial:
    suites: tuple[str, ...] = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
    tasks: Annotated[tuple[int, ...], tyro.conf.arg(help="Numbers within each suite; empty: all.")] = ()
    episodes: int = 20
    start_jitter_m: float = 0.02
    noise: float = 0.02


def main(trial: Trial) -> None:
    print("| task | script | env steps | cpu s | |\n|---|---|---|---|---|")
    for suite in trial.suites:
        for number in trial.tasks or range(len(SUITES[suite])):
            print(row(f"{suite}/{number}", trial), flush=True)
            gc.collect()  # a compiled task is hundreds of megabytes, and refers to itself


def row(task: str, trial: Trial) -> str:
    env = make_env(task, replace(task_env(task), start_jitter_m=trial.start_jitter_m), 0)
    rng = np.random.default_rng(0)
    lengths, started = [], time.process_time()
    for state_id in range(FIRST_HELD_OUT_STATE, FIRST_HELD_OUT_STATE + trial.episodes):
        env.reset(options={"state_id": state_id})
        length, is_over = 0, False
        while not is_over:
            chunk = env.scripted_chunk(trial.noise, rng)
            if chunk is None:
                return f"| `{task}` | none | | | {task_goal(task)} |"
            _, _, terminated, truncated, info = env.step(chunk)
            length += info["steps"]
            is_over = terminated or truncated
        lengths += [length] if info["success"] else []
    cpu_s = (time.process_time() - started) / trial.episodes
    env.close()
    steps = f"{np.mean(lengths):.0f}" if lengths else ""
    return f"| `{task}` | {len(lengths)} of {trial.episodes} | {steps} | {cpu_s:.1f} | {task_goal(task)} |"


if __name__ == "__main__":
    main(tyro.cli(Trial))
