"""GRPO of an OpenVLA-OFT checkpoint: it starts as it comes, an adapter learns, and checkpoints hold nothing else."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rlvlm.algorithms.checkpoint import load_policy_file, load_tree
from rlvlm.algorithms.policy_gradient.algorithm import PolicyGradient, PolicyGradientAlgorithmConfig
from rlvlm.algorithms.policy_gradient.chunks import ChunkSampler
from rlvlm.algorithms.policy_gradient.config import chunk_defaults
from rlvlm.algorithms.policy_gradient.player import chunk_player, load_vla
from rlvlm.algorithms.sft_config import ChunkSFTConfig
from rlvlm.core import metrics
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.registry import make_env
from rlvlm.plugins.openvla.config import OpenVLAConfig
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.rewards.config import ChunkRewardConfig
from tests.algorithms.policy_gradient.side_by_side import save_together
from tests.algorithms.policy_gradient.test_learner import sample
from tests.algorithms.policy_gradient.tiny_runs import learner_of
from tests.plugins.openvla.tiny_openvla import write_openvla

WORLD = ChunkEnvConfig(episode_steps=16)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_openvla(tmp_path_factory.mktemp("openvla"))


def settings(checkpoint: Path) -> PolicyGradientAlgorithmConfig:
    policy = VLAConfig(model=str(checkpoint), openvla=OpenVLAConfig(image_px=40, lora_rank=2))
    chosen = {"warm_up": 0, "lr": 1e-2, "temperature": 1.6, "rounds": 1, "groups": 2, "group_size": 4}
    return (
        PolicyGradientAlgorithmConfig()
        .settings(task="push_block", env_settings=WORLD, policy=policy)
        .settings(algo=chunk_defaults(**chosen), sft=ChunkSFTConfig(), reward=ChunkRewardConfig())
        .debugging(seed=0)
    )


@pytest.mark.slow
def test_an_update_begins_at_ratios_of_one_and_moves_the_adapter_alone(checkpoint, tmp_path):
    learner, runner = learner_of(settings(checkpoint))
    before = {name: value.clone() for name, value in learner.policy.named_parameters()}
    learner.learn(sample(learner, runner), 0.0)
    assert learner.report()[metrics.UPDATE_FIRST_RATIO] <= 1e-5
    moved = {name for name, value in learner.policy.named_parameters() if not torch.equal(value, before[name])}
    assert moved and all("lora_" in name for name in moved)
    save_together(learner, tmp_path / "saved")
    tree = load_tree(tmp_path / "saved")["learner"]
    assert set(tree["trained"]) == {name for name in before if "lora_" in name}
    other, _ = learner_of(settings(checkpoint))
    other.load_tree(tree)
    for name, value in learner.policy.named_parameters():
        assert torch.equal(value, dict(other.policy.named_parameters())[name]), name


@pytest.mark.ray
def test_a_run_starts_from_the_checkpoint_and_its_own_hold_the_adapter(local_ray, checkpoint, tmp_path):
    algorithm = settings(checkpoint).build_algo()
    assert isinstance(algorithm, PolicyGradient)
    try:
        lines: list[str] = []
        algorithm.prepare(lines.append)
        assert lines == []  # nothing is demonstrated, nothing imitated
        algorithm.train()
        algorithm.save_checkpoint(str(tmp_path / "checkpoint"))
        played = algorithm.evaluate_policy(2).episodes
    finally:
        algorithm.stop()
    held = load_policy_file(tmp_path / "checkpoint")
    assert held.weights and all("lora_" in name for name in held.weights)
    env = make_env("push_block", WORLD, 0)
    policy = load_vla(tmp_path / "checkpoint", env, settings(checkpoint).policy)
    player = chunk_player(ChunkSampler(policy=policy, env=env))
    for one, other in zip(player.play(range(1_000_000, 1_000_002)), played, strict=True):
        assert np.array_equal(one.snapshots, other.snapshots)
