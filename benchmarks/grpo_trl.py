"""GRPO of a VLM policy beside TRL's `GRPOTrainer`: one random Qwen2.5-VL, the same prompts, images and lengths.

    pip install trl==1.16.0 torchvision
    PYTHONPATH=. python benchmarks/grpo_trl.py --rounds 5

Both train every weight in float32 on one thread of a CPU, by AdamW, with a group's mean as baseline, clipped ratios
and no reference; a step has 16 replies of 48 tokens at most. They take turns, step by step, in one process, so that
whatever else the machine does hits both. Processor seconds of 16 replies, and of an update: the forward and backward
pass, the optimiser's step and what each does around them. With `--no-train-vision` both freeze the vision encoder.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import tyro
from datasets import Dataset
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen2_5_VLConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.real_sizes import write_vlm
from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradientAlgorithmConfig
from rlvlm.algorithms.policy_gradient.config import PolicyGradientConfig, with_preset
from rlvlm.algorithms.policy_gradient.learner import TokenLearner
from rlvlm.algorithms.policy_gradient.turns import Actor, TurnRunner
from rlvlm.core.episodes import TokenEpisode
from rlvlm.envs.registry import task_env
from rlvlm.policies.reply_policy import ReplySampling
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.engine import PolicyEngine

ROWS, GROUP, TOKENS, LR = 16, 2, 48, 1e-5

Times = tuple[float, float]
"""Processor seconds of sampling and of the update."""


@dataclass(frozen=True, kw_only=True)
class Config:
    rounds: int = 5
    """Steps of each, after one that warms up."""
    train_vision: bool = True
    """Whether the vision encoder is trained."""


def write_model(folder: Path) -> Path:
    """A random Qwen2.5-VL of some 8 million parameters."""
    text = {
        "hidden_size": 288, "intermediate_size": 1152, "num_hidden_layers": 6, "num_attention_heads": 9, "head_dim": 32,
        "num_key_value_heads": 3, "max_position_embeddings": 4096, "vocab_size": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 64, "out_hidden_size": 288, "num_heads": 2, "intermediate_size": 64,
        "fullatt_block_indexes": [1], "window_size": 56,
    }  # fmt: skip
    write_vlm(Qwen2_5_VLConfig, text, vision, folder, patch_px=14)
    AutoModelForImageTextToText.from_pretrained(folder).float().save_pretrained(folder)
    return folder


class Ours:
    """A learner with the engine in its process, as in `rlvlm run`."""

    def __init__(self, folder: Path, train_vision: bool) -> None:
        algo = PolicyGradientConfig(
            num_envs=ROWS, groups=ROWS // GROUP, group_size=GROUP, rollout_turns=0, epochs=1, lr=LR,
            minibatch_turns=ROWS, microbatch_turns=ROWS, max_reply_tokens=TOKENS, shrinkage=False,
            kl_target=None, max_kl=0.0,
        )  # fmt: skip
        settings = (
            PolicyGradientAlgorithmConfig()
            # an answer is an episode, as for TRL
            .settings(task="number_line", env_settings=replace(task_env("number_line"), episode_steps=1))
            .settings(policy=PolicyConfig(model=str(folder), device="cpu", learns="all", train_vision=train_vision))
            .settings(algo=with_preset(algo, "grpo"), total_steps=10_000)
            .debugging(seed=0)
        )
        self._runner = TurnRunner(config=settings)
        spec = settings.get_multi_rl_module_spec(spaces=self._runner.get_spaces())
        self._learner = TokenLearner(config=settings, module_spec=spec)
        self._learner.build()
        self._learner.watch()
        self._learner.begin()
        self.policy = self._learner.policy
        self._runner.actor = Actor(PolicyEngine(self.policy, ROWS), ReplySampling(max_new_tokens=TOKENS))
        self._runner.action_elements = self.policy.action_elements
        self._rng = np.random.default_rng(0)

    def play(self) -> list[TokenEpisode]:
        """Returns `ROWS` episodes of one turn; random rewards, since a random model's would all be alike."""
        episodes = self._runner.sample_groups(group_size=GROUP)
        return [replace(one, rewards=self._rng.normal(size=len(one)).astype(np.float32)) for one in episodes]

    def step(self) -> Times:
        began = time.process_time()
        episodes = self.play()
        sampled = time.process_time()
        self._learner.learn(episodes, 0.0)
        return sampled - began, time.process_time() - sampled

    def questions(self) -> list[dict[str, Any]]:
        """Returns the prompts and images of an update for TRL, one per group."""
        env, episodes = self._runner.slots[0].env, self.play()[::GROUP]
        frames = env.draw(np.stack([one.snapshots[0] for one in episodes]))
        return [
            {"prompt": [{"role": "user", "content": one.obs.texts[0]}], "image": Image.fromarray(frame)}
            for one, frame in zip(episodes, frames, strict=True)
        ]


class Turns(TrainerCallback):
    """Times TRL's steps, and lets ours make one after each."""

    def __init__(self, ours: Ours) -> None:
        self._ours, self._began, self.sampling_s = ours, 0.0, 0.0
        self.rows: list[tuple[Times, Times]] = []

    def on_step_begin(self, *unused: Any, **others: Any) -> None:
        self._began, self.sampling_s = time.process_time(), 0.0

    def on_step_end(self, *unused: Any, **others: Any) -> None:
        theirs = self.sampling_s, time.process_time() - self._began - self.sampling_s
        self.rows.append((self._ours.step(), theirs))


def trainer_of(folder: Path, ours: Ours, config: Config) -> tuple[GRPOTrainer, Turns]:
    """Returns TRL's trainer, and what takes the times of both."""
    rng, turns = np.random.default_rng(0), Turns(ours)
    arguments = GRPOConfig(
        output_dir=str(folder.parent / "trl"), per_device_train_batch_size=ROWS, num_generations=GROUP,
        max_completion_length=TOKENS, max_steps=config.rounds + 1, learning_rate=LR, beta=0.0, bf16=False, use_cpu=True,
        gradient_checkpointing=False, save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=1_000,
        dataloader_pin_memory=False,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = config.train_vision or "visual" not in name
    trainer = GRPOTrainer(
        model=model,
        processing_class=AutoProcessor.from_pretrained(folder),
        reward_funcs=lambda completions, **unused: rng.normal(size=len(completions)).tolist(),
        args=arguments,
        train_dataset=Dataset.from_list(ours.questions()),
        callbacks=[turns],
    )
    generate = trainer._generate

    def timed(*arguments: Any) -> Any:
        began = time.process_time()
        try:
            return generate(*arguments)
        finally:
            turns.sampling_s += time.process_time() - began

    trainer._generate = timed
    return trainer, turns


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    torch.set_num_threads(1)
    with TemporaryDirectory() as root:
        folder = write_model(Path(root) / "model")
        trainer, turns = trainer_of(folder, ours := Ours(folder, config.train_vision), config)
        trainer.train()
    times = np.array(turns.rows[1:])  # [rounds, ours and TRL's, replies and update]; the first warms up
    for place, part in enumerate(("replies", "update")):
        us, trl = times[:, :, place].T
        ratios = np.sort(trl / us)
        print(
            f"{part}: {np.median(us):.2f} s, TRL {np.median(trl):.2f} s; {np.median(ratios):.2f} times TRL's speed "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    print(f"{sum(weight.numel() for weight in ours.policy.model.parameters()) / 1e6:.1f} million parameters")


if __name__ == "__main__":
    main()
