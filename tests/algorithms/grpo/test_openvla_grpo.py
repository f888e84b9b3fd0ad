"""GRPO of an OpenVLA-OFT checkpoint: it starts as it comes, an adapter learns, and checkpoints hold nothing else."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rlvlm.algorithms.checkpoint import load_policy_file
from rlvlm.algorithms.grpo.algorithm import VLAGRPO, VLAGRPOConfig
from rlvlm.algorithms.grpo.config import GRPOConfig, LossConfig
from rlvlm.algorithms.grpo.credit.groups import UpdateBatch
from rlvlm.algorithms.grpo.learner import GRPOLearner
from rlvlm.algorithms.grpo.player import ChunkPlayer, load_policy
from rlvlm.algorithms.grpo.rollouts import ObsProcessor
from rlvlm.algorithms.grpo.runner import GroupRunner
from rlvlm.core import metrics
from rlvlm.envs.config import EnvConfig
from rlvlm.envs.registry import make_env
from rlvlm.policies.vla.config import OpenVLAConfig, VLAConfig
from rlvlm.policies.vla.policy import trained_weights
from tests.algorithms.grpo.test_grpo_learner import SCALE, sample
from tests.tiny_openvla import write_openvla

WORLD = EnvConfig(episode_steps=16)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_openvla(tmp_path_factory.mktemp("openvla"))


def settings(checkpoint: Path, **grpo: object) -> VLAGRPOConfig:
    policy = VLAConfig(model=str(checkpoint), openvla=OpenVLAConfig(image_px=40, lora_rank=2))
    chosen = {"warm_up": 0, "lr": 1e-2, "temperature": 1.6, "rounds": 1, "groups": 2, "group_size": 4, **grpo}
    return (
        VLAGRPOConfig()
        .envs(task="push_block", env_settings=WORLD)
        .learning(policy=policy, grpo=GRPOConfig(**chosen))  # pyright: ignore[reportArgumentType]
        .debugging(seed=0)
    )


def make(checkpoint: Path, **grpo: object) -> tuple[GRPOLearner, GroupRunner]:
    config = settings(checkpoint, **grpo)
    runner = GroupRunner(config=config)
    torch.manual_seed(0)
    learner = GRPOLearner(config=config, module_spec=config.get_multi_rl_module_spec(spaces=runner.get_spaces()))
    learner.build()
    learner.watch(ObsProcessor(learner.policy, runner.chunk_env), runner.chunk_env)  # pyright: ignore[reportArgumentType]
    return learner, runner


@pytest.mark.slow
def test_an_update_begins_at_ratios_of_one_and_moves_the_adapter_alone(checkpoint: Path) -> None:
    learner, runner = make(checkpoint)
    before = {name: value.clone() for name, value in learner.policy.named_parameters()}
    runner.policy, runner.obs_processor = learner.policy, learner.obs_processor
    episodes = runner.sample(num_groups=2, scale=SCALE).episodes
    advantages = np.array([1, -1, 0.5, -0.5] * 2, np.float32).repeat([len(one.steps) for one in episodes])
    learner.learn(UpdateBatch(episodes=episodes, advantages=advantages), 0.0)
    assert learner.report()[metrics.GRPO_FIRST_RATIO] <= 1e-5
    moved = {name for name, value in learner.policy.named_parameters() if not torch.equal(value, before[name])}
    assert moved and all("lora_" in name for name in moved)
    tree = learner.save_tree()
    assert set(tree["policy"]) == {name for name in before if "lora_" in name}
    other, _ = make(checkpoint)
    other.load_tree(tree)
    for name, value in learner.policy.named_parameters():
        assert torch.equal(value, dict(other.policy.named_parameters())[name]), name


@pytest.mark.slow
def test_the_policy_that_kl_is_charged_to_shares_what_does_not_learn(checkpoint: Path) -> None:
    learner, runner = make(checkpoint, loss=LossConfig(kl_weight=0.1))
    assert learner._reference is not None
    start = {name: weight.clone() for name, weight in learner.policy.named_parameters()}
    runner.policy, runner.obs_processor = learner.policy, learner.obs_processor
    episodes = runner.sample(num_groups=2, scale=SCALE).episodes
    advantages = np.array([1, -1, 0.5, -0.5] * 2, np.float32).repeat([len(one.steps) for one in episodes])
    learner.learn(UpdateBatch(episodes=episodes, advantages=advantages), 0.0)
    own, shared = dict(learner._reference.named_parameters()), 0
    for name, weight in learner.policy.named_parameters():
        assert torch.equal(own[name], start[name]), f"{name} is as it was"
        assert (own[name] is weight) == (not weight.requires_grad), name
        shared += own[name] is weight
    assert 0 < shared < len(own)


@pytest.mark.slow
def test_rows_a_few_at_a_time_have_the_gradient_of_all_at_once(checkpoint: Path) -> None:
    gradients = []
    for micro_batch in (0, 3):
        learner, runner = make(checkpoint, minibatches=1, kl_target=None, micro_batch=micro_batch)
        update = sample(learner, runner)
        train_batch = learner._train_batch(update)
        learner._backward(train_batch, torch.arange(len(train_batch.bins)))
        grads = {name: p.grad for name, p in learner.policy.named_parameters() if p.grad is not None}
        gradients.append(grads)
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.ray
def test_a_run_starts_from_the_checkpoint_and_its_own_hold_the_adapter(
    local_ray: None, checkpoint: Path, tmp_path: Path
) -> None:
    algorithm = settings(checkpoint).build_algo()
    assert isinstance(algorithm, VLAGRPO)
    try:
        told: list[str] = []
        algorithm.prepare(told.append)
        assert told == []  # nothing is demonstrated, nothing imitated
        algorithm.train()
        algorithm.save_checkpoint(str(tmp_path / "checkpoint"))
        played = algorithm.evaluate_policy(2).episodes
    finally:
        algorithm.stop()
    held = load_policy_file(tmp_path / "checkpoint")
    assert held.weights and all("lora_" in name for name in held.weights)
    env = make_env("push_block", WORLD, 0)
    policy, scale = load_policy(tmp_path / "checkpoint", env)
    assert scale == policy.scale
    for one, other in zip(ChunkPlayer(policy, env, scale).play(range(1_000_000, 1_000_002)), played, strict=True):
        assert np.array_equal(one.snapshots, other.snapshots)


@pytest.mark.ray
def test_several_learners_begin_with_the_adapter_that_plays(local_ray: None, checkpoint: Path) -> None:
    algorithm = settings(checkpoint, num_learners=2).build_algo()
    assert isinstance(algorithm, VLAGRPO)
    try:
        with torch.no_grad():
            for weight in trained_weights(algorithm._policy).values():
                weight += 0.01  # RLlib's seed alone makes them alike; an adapter's random start need not
        algorithm.prepare(lambda line: None)
        left, right = algorithm._learners.call_all("weights")
        own = trained_weights(algorithm._policy)
    finally:
        algorithm.stop()
    assert own.keys() == left.keys() == right.keys()
    for name, value in own.items():
        assert np.array_equal(left[name], value.numpy()) and np.array_equal(right[name], value.numpy()), name
