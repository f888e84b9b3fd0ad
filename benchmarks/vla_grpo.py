"""GRPO of a VLA without Ray: SFT, then updates, one JSON line each, some with success on held-out states.

    python benchmarks/vla_grpo.py push_block --seed 0
    python benchmarks/vla_grpo.py push_block --grpo.loss.ratio chunk --grpo.advantage.no-divide-by-std
    python benchmarks/vla_grpo.py libero_goal/8 --start goal8.pt --every 4 --episodes 50 --until 0.9

All settings begin from the task's recipe. It stops once sampled and greedy success have both reached `--until`, after
`--cpu-s` seconds of processor time or after `--max-episodes`.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from rlvlm.algorithms.evaluation import FIRST_SEED
from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradientAlgorithmConfig
from rlvlm.algorithms.policy_gradient.chunks import ChunkRunner, ChunkSampler
from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig
from rlvlm.algorithms.policy_gradient.critic import Critic
from rlvlm.algorithms.policy_gradient.learner import TokenLearner
from rlvlm.algorithms.policy_gradient.player import chunk_player
from rlvlm.algorithms.policy_gradient.rewards import RewardLabeller, drop_unlabelled
from rlvlm.algorithms.policy_gradient.source import informative_groups
from rlvlm.algorithms.sft import Imitator
from rlvlm.algorithms.sft_chunks import demonstrate, read_demonstrations
from rlvlm.algorithms.sft_config import ChunkSFTConfig
from rlvlm.core import metrics
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.steps import FloatArray
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.env import ChunkEnv
from rlvlm.envs.registry import make_env
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.rewards.config import ChunkRewardConfig, TurnRewardConfig
from rlvlm.rewards.scorers import make_scorer
from rlvlm.runs.settings.recipes import recipe


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run."""

    seed: int = 0
    """Seed of everything, the starts of training too: to go on from a `--start` that GRPO made, take another one."""
    cpu_s: float = 300.0
    """Most processor time, demonstrations and imitation included, evaluations not."""
    max_episodes: int = 10_000_000
    """Episodes of training, at most."""
    until: float = 0.95
    """Success, sampled and greedy, at which it stops."""
    every: int = 20
    """Updates between evaluations."""
    episodes: int = 400
    """Held-out initial states of an evaluation."""
    start: Path | None = None
    """File of the supervised start: written if it is missing, else read in place of demonstrations and imitation. For
    starts that differ only in how they are learned, let `rlvlm collect` play, and name its folder with
    `--sft.demonstrations`."""
    end: Path | None = None
    """File for the policy as it was at the newest evaluation, in the same form."""
    env: ChunkEnvConfig
    policy: VLAConfig
    sft: ChunkSFTConfig
    grpo: PolicyGradientConfig
    reward: TurnRewardConfig
    """Without a judge: success, or one of the simulated teachers."""


def main(task: str, trial: Trial) -> None:
    runner, learner, viewer = set_up(task, trial)
    policy, scorer = runner.policy, None
    noise = trial.grpo.advantage.scorer_noise
    if noise == "measured":
        raise SystemExit("error: a trial gives its noise as a number; `python -m rlvlm.run` measures it")
    if trial.reward.source == "judged":
        scorer = make_scorer(
            trial.reward, task, trial.seed, lambda snapshots: viewer.draw(snapshots, 64), remembers=False
        )
    labeller, critic = RewardLabeller(trial.reward, scorer), None
    if trial.grpo.advantage.values == "state":
        critic = Critic(trial.grpo.advantage.critic, viewer, trial.seed)
    start, looked = time.process_time(), 0.0

    row = supervised(task, policy, viewer, trial)
    learner.begin()

    def success(is_greedy: bool) -> float:
        player = chunk_player(ChunkSampler(policy=policy, env=viewer, algo=trial.grpo), is_greedy)
        return float(
            np.mean([episode.is_success for episode in player.play(range(FIRST_SEED, FIRST_SEED + trial.episodes))])
        )

    episodes, env_steps, updates = 0, 0, 0
    rollouts_s = update_s = 0.0
    for update in range(1_000_000):
        cpu_s = time.process_time() - start - looked
        is_over = cpu_s > trial.cpu_s or episodes >= trial.max_episodes
        row |= {"seed": trial.seed, "updates": updates, "episodes": episodes, "env_steps": env_steps}
        row |= {"cpu_s": round(cpu_s, 1), "rollouts_s": round(rollouts_s, 1), "update_s": round(update_s, 1)}
        row |= {name: float(f"{value:.3g}") for name, value in learner.report().items()}
        if trial.episodes and (update % trial.every == 0 or is_over):
            before = time.process_time()
            greedy, sampled = success(True), success(False)
            looked += time.process_time() - before
            row |= {"greedy": greedy, "sampled": sampled}
            is_over = is_over or min(greedy, sampled) >= trial.until
        if trial.end is not None and (update % trial.every == 0 or is_over):
            save(policy, trial.end)
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
        if is_over:
            break
        before, row = time.process_time(), {}
        found, successes, num_steps = rolled(runner, trial.grpo, labeller, noise)
        episodes, env_steps = episodes + len(successes), env_steps + num_steps
        row |= {"train": round(float(successes.mean()), 3), "found": len(found) // trial.grpo.group_size}
        rollouts_s += time.process_time() - before
        before = time.process_time()
        made = critic.fill(found) if critic else found
        row |= critic.report() if critic else {}
        if made:
            learner.learn(made, max(cpu_s / trial.cpu_s, episodes / trial.max_episodes))
            updates += 1
        update_s += time.process_time() - before


def set_up(task: str, trial: Trial) -> tuple[ChunkRunner, TokenLearner, ChunkEnv]:
    """Who plays, who learns, and an env for everything else; all of one policy."""
    torch.set_num_threads(trial.grpo.threads)
    torch.manual_seed(trial.seed)
    config = (
        PolicyGradientAlgorithmConfig()
        .settings(task=task, env_settings=trial.env, policy=trial.policy, sft=trial.sft, algo=trial.grpo)
        .debugging(seed=trial.seed)
    )
    runner = ChunkRunner(config=config)
    learner = TokenLearner(config=config, module_spec=config.get_multi_rl_module_spec(spaces=runner.get_spaces()))
    learner.build()
    viewer = make_env(task, trial.env.for_evaluation(), trial.seed)
    learner.watch(viewer)
    policy: Any = learner.policy
    runner.policy = policy
    return runner, learner, viewer


def rolled(
    runner: ChunkRunner, algo: PolicyGradientConfig, labeller: RewardLabeller, noise: float
) -> tuple[list[TokenEpisode], FloatArray, int]:
    """Episodes of groups that teach something, successes of all, and how many env steps they took."""
    found: list[TokenEpisode] = []
    successes: list[FloatArray] = []
    num_steps = 0
    for _ in range(algo.rounds):
        played, _ = runner.sample(num_groups=algo.groups)
        successes.append(np.array([episode.is_success for episode in played], np.float32))
        num_steps += sum(episode.num_steps for episode in played)
        labeller.show(played)
        known = drop_unlabelled(labeller.label(played, 0))
        found += known if algo.advantage.values == "state" else informative_groups(known, algo.advantage, noise)
        if len(found) >= algo.groups * algo.group_size:
            break
    return found, np.concatenate(successes), num_steps


def supervised(task: str, policy: Any, env: ChunkEnv, trial: Trial) -> dict[str, Any]:
    if trial.start is not None and trial.start.exists():
        kept = torch.load(trial.start)
        policy.load_state_dict(kept["policy"])
        policy.load_statistics(kept["scale"])
        return {}
    rng, began = np.random.default_rng(trial.seed), time.process_time()
    if trial.sft.demonstrations:
        shown = read_demonstrations(trial.sft, task, trial.env, env, policy.image_px, lambda line: None)
    else:
        shown = demonstrate(env, trial.sft, trial.seed)
    policy.learn_statistics(shown, env)
    shown_s = time.process_time() - began
    loss = Imitator(policy, env, shown, trial.sft, rng, lambda line: None).train(trial.sft.updates)
    if trial.start is not None:
        save(policy, trial.start)
    return {"demonstrations_s": round(shown_s, 1), metrics.SFT_LOSS: round(loss, 3)}


def told(task: str, args: list[str]) -> tuple[str, Trial]:
    """A task by its full name, and its recipe's settings but for those of the command line."""
    own = recipe(task)
    assert own.kind.name == "chunks", f"{own.task} is no task in chunks"
    default = Trial(env=own.policy_env, policy=own.policy, sft=own.sft, grpo=own.algo, reward=ChunkRewardConfig())
    trial = tyro.cli(Trial, default=default, args=args)
    if trial.sft.start_from:
        raise SystemExit("error: a trial begins with --start, not with a run's checkpoint")
    if trial.reward.asks_judge:
        raise SystemExit("error: a trial asks no judge, only simulated teachers; `python -m rlvlm.run` asks one")
    return own.task, trial


def save(policy: Any, file: Path) -> None:
    torch.save({"policy": policy.state_dict(), "scale": policy.statistics}, file)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(*told(sys.argv[1], sys.argv[2:]))
