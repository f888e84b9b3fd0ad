"""Seconds of an evaluation in turns by envs that are played at once: `python benchmarks/evaluation_rows.py`.

The pocket policy on number_line, and the same behind a pause, as a large policy has whose tokens take as long for few
replies as for many. Episodes and figures must be the same each time.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import tyro

from rlvlm.algorithms.policy_gradient.player import turn_player
from rlvlm.algorithms.policy_gradient.turns import Actor
from rlvlm.envs.registry import task_env
from rlvlm.envs.slots import make_slot
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.engine import PolicyEngine
from rlvlm.policies.vlm.loading import load_policy


@dataclass(frozen=True, kw_only=True)
class Config:
    task: str = "number_line"
    episodes: int = 64
    """Greedy ones, and as many sampled."""
    envs: tuple[int, ...] = (8, 16, 64)
    pauses_s: tuple[float, ...] = (0.0, 0.2)


class PausedEngine(PolicyEngine):
    """Counts its batches, before each of which it sleeps."""

    pause_s, batches = 0.0, 0

    def reply(self, *args: Any, **named: Any) -> Any:
        self.batches += 1
        time.sleep(self.pause_s)
        return super().reply(*args, **named)


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    torch.set_num_threads(1)
    slots = partial(make_slot, config.task, task_env(config.task).for_evaluation())
    policy, first = load_policy(PolicyConfig(), len(slots().env.action_names)), None
    print("| pause before a batch, s | envs at once | batches | s |\n|---|---|---|---|")
    for pause_s in config.pauses_s:
        for envs in config.envs:
            engine = PausedEngine(policy, envs)
            engine.pause_s, began = pause_s, time.monotonic()
            evaluation, _ = turn_player(Actor(engine, ReplySampling(max_new_tokens=48)), slots, envs).evaluate(
                config.episodes
            )
            took_s = time.monotonic() - began
            found = [episode.captions for episode in evaluation.episodes], dict(evaluation.metrics)
            first = first or found
            assert found == first, "what is played beside an episode changes it"
            print(f"| {pause_s:g} | {envs} | {engine.batches} | {took_s:.1f} |", flush=True)


if __name__ == "__main__":
    main()
