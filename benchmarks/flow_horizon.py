"""Why a supervised start learns a flow's whole chunk: the steps that the env runs attend to those that it does not run.

    PYTHONPATH=.:tests python benchmarks/flow_horizon.py           # two seeds, 350 and then 120 updates
    PYTHONPATH=.:tests python benchmarks/flow_horizon.py 1500 300

A small random pi0 with chunks of 50 steps learns 24 chunks of push_block, of which the env runs 8 steps, each of them
to the left throughout or to the right throughout. Then a copy goes on with the run steps alone, zeros in place of the
others, and another copy with whole chunks. For each policy: the flow-matching loss of the run steps in whole chunks,
and the share of sampled chunks whose run steps go to both sides, of 120.
"""

import copy
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from plugins.lerobot.tiny_lerobot import shrink_pi0, write_lerobot

from rlvlm.algorithms.sft_config import ChunkSFTConfig
from rlvlm.core.episodes import Observations
from rlvlm.envs.registry import make_env, task_env
from rlvlm.plugins.lerobot.config import LeRobotConfig
from rlvlm.policies.vla.build import build_policy
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vla.flow.config import FlowConfig
from rlvlm.policies.vla.policy import Demonstrations, Sampling, VLAPolicy

HORIZON, NUM, SIDE = 50, 24, 0.25


class Patch:
    """Pytest's `monkeypatch`, without an end."""

    setitem = staticmethod(dict.__setitem__)


def main() -> None:
    first, then = map(int, sys.argv[1:] or (350, 120))
    torch.set_num_threads(1)
    shrink_pi0(Patch())
    print(
        f"{'seed':4} {'after ' + str(first):>16} {f'+{then} run steps':>16} {f'+{then} whole':>16}   loss, both sides"
    )
    for seed in range(2):
        row = []
        with tempfile.TemporaryDirectory() as folder:
            for policy, shown, env in policies(Path(folder), seed, first, then):
                row.append(f"{loss_of_run_steps(policy, shown, env):.3f} {both_sides(policy, shown, env):7.0%}")
        print(f"{seed:4}", *(f"{text:>16}" for text in row), flush=True)


def policies(folder: Path, seed: int, first: int, then: int):
    """Yields the good policy, and what the two further starts make of it."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    env = make_env("push_block", task_env("push_block"), seed)
    model = write_lerobot(folder / "checkpoint", env, "pi0", chunk_size=HORIZON)
    flow, own = FlowConfig(learn="all"), LeRobotConfig(image_px=24, learns="all")
    policy = build_policy(VLAConfig(model=str(model), head="flow", lerobot=own, flow=flow), env)
    obs = Observations.joined([env.reset_to(number // 2)[0] for number in range(NUM)])  # both sides from each start
    actions = np.zeros((NUM, HORIZON, len(env.action_low)), np.float32)
    actions[:, :, 0] = SIDE * np.where(np.arange(NUM) % 2, 1, -1)[:, None]
    whole = Demonstrations(obs=obs, actions=actions, begins=np.arange(NUM), num_failures=0)
    learn(policy, whole, env, first, rng)
    yield policy, whole, env
    for shown in (replace(whole, actions=actions[:, : env.chunk_steps]), whole):
        other = copy.deepcopy(policy)
        learn(other, shown, env, then, np.random.default_rng(seed))
        yield other, whole, env


def learn(policy: VLAPolicy, shown: Demonstrations, env, updates: int, rng: np.random.Generator) -> None:
    loss = policy.imitation(shown, env, ChunkSFTConfig(), rng, lambda line: None).loss
    optimizer = torch.optim.Adam(policy.acting_parameters(), 1e-3)
    for _ in range(updates):
        optimizer.zero_grad()
        loss(torch.arange(NUM), None).backward()
        optimizer.step()


def loss_of_run_steps(policy: VLAPolicy, shown: Demonstrations, env) -> float:
    known = np.zeros(shown.actions.shape[:2], bool)
    known[:, : env.chunk_steps] = True  # the others are there, and not counted
    loss = policy.imitation(
        replace(shown, known=known), env, ChunkSFTConfig(), np.random.default_rng(9), lambda line: None
    ).loss
    with torch.no_grad():
        return float(np.mean([loss(torch.arange(NUM), None).item() for _ in range(20)]))


def both_sides(policy: VLAPolicy, shown: Demonstrations, env) -> float:
    policy.show(shown.obs.images, policy.draw(env, shown.obs.snapshots))
    generator = torch.Generator().manual_seed(9)
    sampled = [
        policy.sample(shown.obs, Sampling(from_noise=True, generator=generator)).actions[:, :, 0] > 0 for _ in range(5)
    ]
    right = np.concatenate(sampled)  # [5 M, L]
    return float((right.any(1) & ~right.all(1)).mean())


if __name__ == "__main__":
    main()
