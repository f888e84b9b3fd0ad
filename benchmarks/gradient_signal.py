"""Share of an update's gradient that two blocks of episodes agree on, by the way in which chunks are credited.

    python benchmarks/gradient_signal.py libero_goal/8 --start goal8.pt --max-episodes 2048

The policy is not updated. Critics learn from all episodes, one block of 64 after the other, and each block of the
second half gives a gradient. Printed is the mean cosine between two blocks', and its standard error if there were no
signal: of the gradient itself, and of the gradient as Adam follows it, divided by its size in each parameter. Options
are those of `vla_grpo.py`; the recipe's `algo.min-range` is in force (`--grpo.min-range 0`: all dimensions).
"""

import sys
from dataclasses import replace

import numpy as np
import torch
from vla_grpo import Trial, set_up, supervised, told

from rlvlm.algorithms.policy_gradient.batch import BatchMaker
from rlvlm.algorithms.policy_gradient.config import AdvantageConfig, PolicyGradientConfig
from rlvlm.algorithms.policy_gradient.critic import Critic
from rlvlm.algorithms.policy_gradient.learner import TokenLearner
from rlvlm.algorithms.policy_gradient.rewards import RewardLabeller
from rlvlm.algorithms.policy_gradient.source import informative_groups
from rlvlm.core.episodes import TokenEpisode
from rlvlm.core.steps import FloatArray
from rlvlm.policies.protocol import Reading
from rlvlm.rewards.config import ValueConfig

BLOCK = 64
TRACES = (0.0, 0.5, 0.9, 1.0)


def main(task: str, trial: Trial) -> None:
    trial = replace(trial, grpo=replace(trial.grpo, groups=BLOCK // trial.grpo.group_size))
    runner, learner, viewer = set_up(task, trial)
    supervised(task, runner.policy, viewer, trial)
    labeller, critic = RewardLabeller(trial.reward, None), Critic(ValueConfig(), viewer, trial.seed)
    plain = AdvantageConfig(estimator="grpo")
    credits = {"groups": plain} | {
        f"critic, lambda {trace:g}": AdvantageConfig(gamma=1.0, gae_lambda=trace, values="state") for trace in TRACES
    }
    gradients: dict[str, list[FloatArray]] = {name: [] for name in credits}
    successes: list[float] = []
    num_blocks = trial.max_episodes // BLOCK
    for block in range(num_blocks):
        played, _ = runner.sample(num_groups=trial.grpo.groups)
        episodes = labeller.label(played, 0)
        filled = critic.fill(episodes)
        successes.append(float(np.mean([episode.is_success for episode in episodes])))
        sys.stderr.write(f"\rblock {block + 1} of {num_blocks}, success {np.mean(successes):.2f}")
        if 2 * block >= num_blocks:
            for name, credit in credits.items():
                used = informative_groups(episodes, plain, 0.0) if name == "groups" else filled
                algo = replace(trial.grpo, advantage=credit)
                gradients[name] += [gradient(learner, used, algo)] if used else []
    sys.stderr.write("\n")
    for name, found in gradients.items():
        if not found:  # groups of one episode, or all alike
            continue
        rows = np.stack(found).astype(np.float64)
        size = np.sqrt((rows**2).mean(axis=0))
        sys.stdout.write(
            f"{name:20s} {agreement(rows)}   as Adam sees it {agreement(rows[:, size > 0] / size[size > 0])}\n"
        )


def gradient(learner: TokenLearner, episodes: list[TokenEpisode], algo: PolicyGradientConfig) -> FloatArray:
    """[P] of the loss where ratios are 1."""
    batches = BatchMaker(learner.policy, learner.batches.env, algo)
    batch = batches.make(episodes)
    now = learner.policy.log_probs(batch.obs, batch.answers, Reading(temperature=algo.temperature))
    worth = now.log_probs * batch.weights * batch.advantages[:, None]
    parts = torch.autograd.grad(-worth.sum(), learner.policy.acting_parameters())
    return torch.cat([part.flatten() for part in parts]).numpy()


def agreement(rows: FloatArray) -> str:
    """Mean cosine between two of `rows` [N, P], and its standard error if they were drawn without signal."""
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = (unit @ unit.T)[np.triu_indices(len(rows), 1)]
    return f"{cosines.mean():6.3f} ({cosines.std() / len(cosines) ** 0.5:.3f})"


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(*told(sys.argv[1], sys.argv[2:]))
