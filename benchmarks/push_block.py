"""GRPO on push_block without Ray: SFT, then updates, with success on held-out states over time, as one JSON line each.

    python benchmarks/push_block.py --seed 0
    python benchmarks/push_block.py --seed 0 --grpo.loss.ratio chunk --grpo.advantage.no-divide-by-std

It stops once sampled and greedy success have both reached `--until`, or after `--cpu-s` seconds of processor time.
"""

import json
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import torch
import tyro

from rlvlm import metrics
from rlvlm.algorithms.evaluation import FIRST_SEED
from rlvlm.algorithms.grpo.algorithm import VLAGRPOConfig
from rlvlm.algorithms.grpo.config import GRPOConfig, SFTConfig
from rlvlm.algorithms.grpo.groups import Group, gathered, sifted, weighed
from rlvlm.algorithms.grpo.imitation import demonstrate, imitate
from rlvlm.algorithms.grpo.learner import GRPOLearner
from rlvlm.algorithms.grpo.player import ChunkPlayer
from rlvlm.algorithms.grpo.rollouts import Eyes
from rlvlm.algorithms.grpo.runner import GroupRunner
from rlvlm.algorithms.grpo.scoring import SuccessScorer
from rlvlm.envs.registry import make_world, task_env
from rlvlm.policies.vla.config import PocketVLAConfig
from rlvlm.policies.vla.tokens import ActionScale


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run."""

    task: str = "push_block"
    """A task in chunks."""
    seed: int = 0
    """Of everything."""
    cpu_s: float = 300.0
    """Most processor time, demonstrations and imitation included, evaluations not."""
    until: float = 0.95
    """Success, sampled and greedy, at which it stops."""
    every: int = 20
    """Updates between evaluations."""
    episodes: int = 400
    """Held-out initial states of an evaluation."""
    policy: PocketVLAConfig = field(default_factory=PocketVLAConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)


def main(trial: Trial) -> None:
    torch.set_num_threads(trial.grpo.threads)
    torch.manual_seed(trial.seed)
    scorer = SuccessScorer()
    rng = np.random.default_rng(trial.seed)
    world_config = task_env(trial.task)
    config = (
        VLAGRPOConfig()
        .worlds(task=trial.task, world=world_config)
        .learning(policy=trial.policy, sft=trial.sft, grpo=trial.grpo)
        .debugging(seed=trial.seed)
    )
    runner = GroupRunner(config=config)
    learner = GRPOLearner(config=config, module_spec=config.get_multi_rl_module_spec(spaces=runner.get_spaces()))
    learner.build()
    viewer = make_world(trial.task, world_config, trial.seed)
    policy: object = learner.policy
    eyes = Eyes(policy, viewer)  # pyright: ignore[reportArgumentType]
    learner.watch(eyes, viewer)
    start, looked = time.process_time(), 0.0

    shown = demonstrate(viewer, trial.sft, rng)
    actions = shown.actions.reshape(-1, shown.actions.shape[-1])
    runner.scale = scale = ActionScale.of_actions(actions, viewer.scaled_actions)
    loss = imitate(policy, eyes, shown, scale, trial.sft, rng, lambda line: None)  # pyright: ignore[reportArgumentType]
    learner.begin()

    def success(temperature: float | None) -> float:
        player = ChunkPlayer(policy, viewer, scale, temperature)  # pyright: ignore[reportArgumentType]
        return float(np.mean([one.is_success for one in player.play(range(FIRST_SEED, FIRST_SEED + trial.episodes))]))

    episodes, train, kept = 0, 0.0, 0.0
    for update in range(1_000_000):
        cpu_s = time.process_time() - start - looked
        if update % trial.every == 0 or cpu_s > trial.cpu_s:
            before = time.process_time()
            greedy, sampled = success(None), success(trial.grpo.temperature)
            looked += time.process_time() - before
            row = {"seed": trial.seed, "updates": update, "episodes": episodes, "cpu_s": round(cpu_s, 1)}
            row |= {"greedy": greedy, "sampled": sampled, "train": round(train, 3), "kept": round(kept, 3)}
            row |= {name: float(f"{value:.3g}") for name, value in learner.report().items()}
            row |= {metrics.SFT_LOSS: round(loss, 3)} if not update else {}
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
            if min(greedy, sampled) >= trial.until or cpu_s > trial.cpu_s:
                return
        found: list[Group] = []
        for _ in range(trial.grpo.rounds):
            played = runner.sample(
                policy=policy,  # pyright: ignore[reportArgumentType]
                num_groups=trial.grpo.groups,
                group_size=trial.grpo.group_size,
                temperature=trial.grpo.temperature,
            )
            scorer.begin(played)
            good = sifted(gathered(played, scorer.collect(0)), trial.grpo.advantage)
            found += good
            episodes, kept = episodes + len(played), len(good) / trial.grpo.groups
            train = float(np.mean([episode.success for episode in played]))
            if len(found) >= trial.grpo.groups:
                break
        if found:
            learner.learn(weighed(found, trial.grpo.advantage))


if __name__ == "__main__":
    main(tyro.cli(Trial))
