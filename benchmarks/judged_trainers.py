"""Do other people's trainers learn from a judge through our adapters? The true metric over training, by judge.

    .envs/sb3/bin/python benchmarks/judged_trainers.py sb3     PPO of Stable-Baselines3 on a lamp to make brighter
    .envs/trl/bin/python benchmarks/judged_trainers.py trl     GRPO of TRL, a small random model that writes + and -

Judges: the truth; one that is right in 80 % of its answers and says the opposite in the others; and random answers.
Each row is the mean of three seeds, and the lowest and highest of them; run with PYTHONPATH=.:tests in the clone.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import rlvlm
from rlvlm.core.judging import Score, Status
from rlvlm.testing import FakeJudge

ROOT = Path(__file__).parents[1]
SEEDS = 3


class Noisy(FakeJudge):
    """The truth is the last image's brightness; `p_right` of the answers are it, the others its opposite or random."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        self._kind, self._rng = kind, np.random.default_rng(seed)

    def score(self, clips):
        truths = [score.value for score in super().score(clips)]
        chance = self._rng.random((2, len(clips)))
        if self._kind == "80 % right":
            truths = [truth if draw < 0.8 else 1 - truth for truth, draw in zip(truths, chance[0], strict=True)]
        elif self._kind == "random":
            truths = chance[1].tolist()
        return [Score(status=Status.OK, value=float(value), stamp=self.stamp) for value in truths]


def sb3(kind: str, seed: int) -> list[float]:
    """Returns the lamp's true level, the mean of an episode, over training."""
    from lamp import Lamp
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    from rlvlm.plugins.gymnasium.reward import Filmed
    from rlvlm.plugins.gymnasium.vec_env import JudgeVecReward

    envs = make_vec_env(Lamp, n_envs=4, seed=seed, wrapper_class=Filmed)
    model = PPO(
        "MlpPolicy",
        JudgeVecReward(envs, rlvlm.Judge.local(Noisy(kind, seed)), "make the lamp bright"),
        n_steps=64,
        batch_size=64,
        seed=seed,
        device="cpu",
    )
    curve = []
    for _ in range(8):
        model.learn(512, reset_num_timesteps=False)
        curve.append(float(np.mean([episode["r"] / episode["l"] for episode in list(model.ep_info_buffer)[-64:]])))
    return curve


def trl(kind: str, seed: int) -> list[float]:
    """Returns the true brightness that replies reach, over training."""
    from datasets import Dataset
    from transformers.utils import logging
    from trl import GRPOConfig, GRPOTrainer

    from rlvlm.plugins.trl.rewards import judge_or_none

    logging.disable_progress_bar()
    truths = []

    def show(completion, row):
        level = np.clip(4 + completion.count("+") - completion.count("-"), 0, 8)
        truths.append(level / 8)
        return np.full((8, 8, 3), round(255 * level / 8), np.uint8)

    with tempfile.TemporaryDirectory() as folder:
        make = ROOT / "tests/tiny_signs.py"
        subprocess.run([sys.executable, make, folder], check=True, capture_output=True)
        config = GRPOConfig(
            f"{folder}/out",
            max_completion_length=8,
            learning_rate=1e-2,
            max_steps=64,
            report_to="none",
            use_cpu=True,
            seed=seed,
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=64,
        )
        reward = judge_or_none(rlvlm.Judge.local(Noisy(kind, seed)), show, goal="make the lamp bright")
        data = Dataset.from_list([{"prompt": "lamp"}] * 512)
        GRPOTrainer(folder, reward_funcs=reward, args=config, train_dataset=data).train()
    return [float(part.mean()) for part in np.array_split(truths, 8)]


def main() -> None:
    for kind in ("truth", "80 % right", "random"):
        curves = np.array([{"sb3": sb3, "trl": trl}[sys.argv[1]](kind, seed) for seed in range(SEEDS)])  # [S, 8]
        ends = f"last {curves[:, -1].min():.2f} to {curves[:, -1].max():.2f}"
        print(f"{kind:12}", *(f"{value:.2f}" for value in curves.mean(0)), ends, flush=True)


if __name__ == "__main__":
    main()
