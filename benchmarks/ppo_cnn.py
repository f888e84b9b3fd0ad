"""Stock RLlib PPO with a CNN on an env in turns: success by env steps and by time, as one JSON line per evaluation.

    python benchmarks/ppo_cnn.py --task number_line --steps 50000
    python benchmarks/ppo_cnn.py --task doorkey_6x6 --steps 200000

The env, its image (made smaller), its rewards and evaluation episodes are those of `python -m rlvlm.run TASK`; the
network picks one of the actions' names, so there is no text, nothing unreadable and no demonstration. Settings are
RLlib's defaults but for what stands in `Trial`.
"""

import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from PIL import Image
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

from rlvlm.algorithms.base import quiet_rllib
from rlvlm.algorithms.evaluation import FIRST_SEED
from rlvlm.algorithms.policy_gradient.player import is_strict_success
from rlvlm.envs.registry import make_env, task_env
from rlvlm.envs.slots import EnvSlot
from rlvlm.judges.agreement import wilson_interval
from rlvlm.runs.start.ray_session import ray_session


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run."""

    task: str = "number_line"
    seed: int = 0
    steps: int = 50_000
    """Env steps."""
    every: int = 5_000
    """Env steps between evaluations."""
    episodes: int = 200
    """Episodes of an evaluation, greedy and sampled each."""
    image_px: int = 64
    """Side of the image that the network sees."""
    lr: float = 3e-4
    gamma: float = 0.95
    batch: int = 2_048
    """Env steps between updates."""
    minibatch: int = 128
    epochs: int = 8
    num_envs: int = 16
    """Stepped side by side."""


class ImageObs(gym.Env[np.ndarray, int]):
    """An env in turns as images and numbers of actions."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.slot = EnvSlot(make_env(settings["task"], task_env(settings["task"]), settings["seed"]), settings["task"])
        self._px = settings["image_px"]
        self.legal = self.slot.env.legal()
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (self._px, self._px, 3), np.float32)
        self.action_space = gym.spaces.Discrete(len(self.legal))
        self._rng = np.random.default_rng(settings["seed"])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self.slot.begin(int(self._rng.integers(2**32, 2**33)))
        return self.look(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        slot = self.slot
        is_over = slot.play(slot.env.action_text(self.legal[int(action)]))
        is_cut = is_over and not slot.is_terminated
        reward = float(slot.episode(only_newest=True).env_rewards[-1])
        return self.look(), reward, slot.is_terminated, is_cut, {}

    def look(self) -> np.ndarray:
        """The image as the network takes it."""
        frame = self.slot.env.draw(self.slot.turn.snapshot[None])[0]
        small = Image.fromarray(frame).resize((self._px, self._px), Image.Resampling.BOX)
        return np.asarray(small, np.float32) / 127.5 - 1.0


def evaluate(module: Any, trial: Trial, greedy: bool) -> list[bool]:
    """Strict success of each episode, from the seeds of every evaluation of this task."""
    env, rng = ImageObs({"task": trial.task, "seed": 0, "image_px": trial.image_px}), np.random.default_rng(0)
    found = []
    for seed in range(FIRST_SEED, FIRST_SEED + trial.episodes):
        env.slot.begin(seed)
        while not env.slot.is_over:
            with torch.no_grad():
                logits = module.forward_inference({Columns.OBS: torch.from_numpy(env.look()[None])})
            odds = logits[Columns.ACTION_DIST_INPUTS][0].double().softmax(-1).numpy()
            action = int(odds.argmax()) if greedy else int(rng.choice(len(odds), p=odds / odds.sum()))
            env.slot.play(env.slot.env.action_text(env.legal[action]))
        found.append(is_strict_success(env.slot.episode()))
    return found


def main(trial: Trial) -> None:
    torch.set_num_threads(1)
    config = (
        PPOConfig()
        .environment(ImageObs, env_config={"task": trial.task, "seed": trial.seed, "image_px": trial.image_px})
        .env_runners(num_env_runners=0, num_envs_per_env_runner=trial.num_envs)
        .rl_module(
            model_config=DefaultModelConfig(
                conv_filters=[[16, 4, 2], [32, 4, 2], [32, 4, 2]], head_fcnet_hiddens=[128], vf_share_layers=True
            )
        )
        .training(
            lr=trial.lr, gamma=trial.gamma, train_batch_size_per_learner=trial.batch, minibatch_size=trial.minibatch,
            num_epochs=trial.epochs,
        )
        .debugging(seed=trial.seed, log_level="ERROR")
    )  # fmt: skip
    with quiet_rllib():
        algorithm = config.build_algo()
    cpu_s = wall_s = 0.0
    env_steps = last = 0
    while env_steps < trial.steps:
        cpu, wall = time.process_time(), time.monotonic()
        result = algorithm.train()
        cpu_s, wall_s = cpu_s + time.process_time() - cpu, wall_s + time.monotonic() - wall
        env_steps = int(result["env_runners"]["num_env_steps_sampled_lifetime"])
        if env_steps - last < trial.every and env_steps < trial.steps:
            continue
        last, row = env_steps, {"env_steps": env_steps, "cpu_s": round(cpu_s, 1), "wall_s": round(wall_s, 1)}
        module = algorithm.get_module(DEFAULT_MODULE_ID)
        for name, greedy in (("greedy", True), ("sampled", False)):
            found = evaluate(module, trial, greedy)
            row |= {name: sum(found) / len(found), f"{name}_interval": wilson_interval(sum(found), len(found))}
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
    algorithm.stop()


if __name__ == "__main__":
    with ray_session():
        main(tyro.cli(Trial, description=__doc__))
