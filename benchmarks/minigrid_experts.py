"""Success rates of the scripted expert in each env of MiniGrid and BabyAI.

python benchmarks/minigrid_experts.py --seeds 20
"""

import logging
import sys
import time
from collections import defaultdict
from dataclasses import dataclass

import tyro

from rlvlm.envs.minigrid.ids import IDS, WITHOUT_EXPERT
from rlvlm.envs.registry import make_env, task_env


@dataclass(frozen=True)
class Trial:
    seeds: int = 20
    """Starts of each id."""
    only: str = ""
    """Part of the ids that are tried."""


def main(trial: Trial) -> None:
    rows: dict[int, list[str]] = defaultdict(list)
    turns, began = 0, time.process_time()
    names = [name for name in IDS if trial.only in name and name not in WITHOUT_EXPERT]
    for name in names:
        env = make_env(f"minigrid/{name}", task_env(f"minigrid/{name}"), 0)
        solved, failed = 0, []
        for seed in range(trial.seeds):
            env.reset(seed=seed)
            is_over = False
            while not is_over:
                *_, terminated, truncated, info = env.step(env.action_text(env.expert_action()))
                turns, is_over = turns + 1, terminated or truncated
                is_success = info["success"]
            solved += is_success
            failed += [] if is_success else [seed]
        rows[solved].append(name)
        if failed:
            sys.stdout.write(f"{name}: {solved} of {trial.seeds}, failed on seeds {failed}\n")
    seconds = time.process_time() - began
    for solved in sorted(rows, reverse=True):
        sys.stdout.write(f"{len(rows[solved])} ids solve {solved} of {trial.seeds} starts\n")
    sys.stdout.write(
        f"{len(names)} ids have an expert, {len(IDS) - len(names)} none; {turns / seconds:.0f} turns a second\n"
    )


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # the package warns of its own names
    main(tyro.cli(Trial))
