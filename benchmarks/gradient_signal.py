"""How much of an update's gradient is signal: what two blocks of episodes agree on, by how chunks are credited.

    python benchmarks/gradient_signal.py libero_goal/8 --start goal8.pt --most-episodes 2048

The policy stays as it is. Critics learn from all episodes, one block of 64 after the other, and each block of the
second half gives a gradient. Printed is the mean cosine between two blocks', and its standard error if there were no
signal: of the gradient itself, and of the gradient as Adam follows it, divided by its size in each parameter. Options
are those of `vla_grpo.py`; the recipe's `algo.least-range` is in force (`--grpo.least-range 0`: all dimensions).
"""

import sys
from dataclasses import replace

import numpy as np
import torch
from vla_grpo import Trial, set_up, supervised, told

from rlvlm.algorithms.grpo.config import AdvantageConfig, CriticConfig
from rlvlm.algorithms.grpo.credit.critic import Critic
from rlvlm.algorithms.grpo.credit.groups import UpdateBatch, filter_groups, group_episodes, make_update
from rlvlm.algorithms.grpo.learner import GRPOLearner
from rlvlm.core.steps import FloatArray
from rlvlm.policies.vla.sampling import log_probs_of

BLOCK = 64
TRACES = (0.0, 0.5, 0.9, 1.0)


def main(task: str, trial: Trial) -> None:
    trial = replace(trial, grpo=replace(trial.grpo, groups=BLOCK // trial.grpo.group_size))
    runner, learner, viewer = set_up(task, trial)
    scale, _ = supervised(task, runner.policy, runner.obs_processor, viewer, trial)
    critics = {
        f"critic, trace {trace:g}": Critic(
            AdvantageConfig(baseline="critic", critic=CriticConfig(trace=trace)), viewer, trial.seed
        )
        for trace in TRACES
    }
    gradients: dict[str, list[FloatArray]] = {name: [] for name in ("groups", *critics)}
    successes: list[float] = []
    num_blocks = trial.most_episodes // BLOCK
    for block in range(num_blocks):
        episodes = runner.sample(num_groups=trial.grpo.groups, scale=scale).episodes
        groups = group_episodes(episodes, np.array([episode.success for episode in episodes], np.float32))
        updates = {name: critic.weigh(groups) for name, critic in critics.items()}
        plain = AdvantageConfig()
        mixed = filter_groups(groups, plain, 0.0)
        updates["groups"] = make_update(mixed, plain) if mixed else None
        successes.append(float(np.mean([episode.success for episode in episodes])))
        sys.stderr.write(f"\rblock {block + 1} of {num_blocks}, success {np.mean(successes):.2f}")
        if 2 * block >= num_blocks:
            for name, update in updates.items():
                gradients[name] += [] if update is None else [gradient(learner, update, trial.grpo.temperature)]
    sys.stderr.write("\n")
    for name, found in gradients.items():
        if not found:  # groups of one episode, or all alike
            continue
        rows = np.stack(found).astype(np.float64)
        size = np.sqrt((rows**2).mean(axis=0))
        sys.stdout.write(
            f"{name:20s} {agreement(rows)}   as Adam sees it {agreement(rows[:, size > 0] / size[size > 0])}\n"
        )


def gradient(learner: GRPOLearner, update: UpdateBatch, temperature: float) -> FloatArray:
    """[P] of the loss where ratios are 1."""
    batch = learner._train_batch(update)
    logits = learner.policy(batch.images[batch.drawn], batch.words, batch.proprio)
    worth = log_probs_of(logits, batch.bins, temperature) * batch.weights * batch.advantages[:, None]
    parts = torch.autograd.grad(-worth.sum(), list(learner.policy.parameters()))
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
