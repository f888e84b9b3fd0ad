"""Checkpoints of LeRobot shared out over learners: the step of one, and a checkpoint that is loaded to the bit."""

import operator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from plugins.lerobot.tiny_lerobot import shrink_pi0, write_lerobot
from state_trees import assert_same

from rlvlm.algorithms.checkpoint import load_policy_file, load_tree
from rlvlm.envs.push_block import CHUNK_STEPS
from rlvlm.envs.registry import make_env, task_env
from rlvlm.plugins.lerobot.config import LeRobotConfig
from rlvlm.policies.vla.build import build_policy
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vla.flow.config import FlowConfig
from rlvlm.policies.vla.policy import Sampling
from tests.algorithms.policy_gradient.side_by_side import save_together
from tests.algorithms.policy_gradient.test_sharding import TokenLearner, assert_step_of_one, chunks, side_by_side


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        shrink_pi0(patch)
        env = make_env("push_block", task_env("push_block"), 0)
        for kind in ("smolvla", "pi0", "pi05"):
            write_lerobot(root / kind, env, kind, chunk_size=CHUNK_STEPS + 2)
    return root


def flow(folder: str, learns: Any, algo: dict[str, Any]) -> tuple[TokenLearner, list[Any]]:
    """The same of the tiny SmolVLA, pi0 or pi0.5 in `folder`, with noise in every denoising step."""
    shrink_pi0(SimpleNamespace(setitem=operator.setitem))  # in a process of its own
    wants = LeRobotConfig(image_px=24, lora_rank=2, learns=learns)
    policy = VLAConfig(model=folder, head="flow", lerobot=wants, flow=FlowConfig(steps=2, noise=0.7, start_std=1.0))
    return chunks(policy, {"lr": 1e-3} | algo)  # a density changes faster than a probability


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "learns"), [("smolvla", "expert"), ("smolvla", "all"), ("pi0", "lora"), ("pi05", "expert")]
)
def test_shared_out_learners_take_the_step_of_one(folder, kind, learns):
    assert_step_of_one(flow, str(folder / kind), learns)


def save_and_load(folder: str, saved: Path, loaded: Path) -> None:
    """Saves a learner of a flow after an update, and another one that has loaded it."""
    learner, episodes = flow(folder, "expert", algo := {"num_learners": 2, "shard": True})
    learner.learn(episodes, 0.0)
    save_together(learner, saved)
    other, _ = flow(folder, "expert", algo)
    other.load_tree(load_tree(saved)["learner"])
    save_together(other, loaded)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["smolvla", "pi0"])
def test_a_checkpoint_of_shared_out_flows_is_loaded_to_the_bit_and_saved_for_lerobot(
    folder, tmp_path, kind, monkeypatch
):
    path = str(folder / kind)
    files = tmp_path / "first", tmp_path / "second"
    side_by_side(2, save_and_load, path, *files)
    saved, loaded = (load_tree(file)["learner"] for file in files)
    assert_same(loaded, saved)
    shrink_pi0(monkeypatch)
    env = make_env("push_block", task_env("push_block"), 0)
    obs, _ = env.reset_to(0)
    wants: dict[str, Any] = {"head": "flow", "lerobot": LeRobotConfig(image_px=24)}
    policy = build_policy(VLAConfig(model=path, **wants), env)
    policy.show(obs.images, policy.draw(env, obs.snapshots))
    untrained = policy.sample(obs, Sampling()).actions
    policy.load_trained_state(load_policy_file(files[0]).weights)
    policy.export(tmp_path / "saved")
    again = build_policy(VLAConfig(model=str(tmp_path / "saved"), **wants), env)
    again.show(obs.images, policy.draw(env, obs.snapshots))
    trained = policy.sample(obs, Sampling()).actions
    np.testing.assert_allclose(again.sample(obs, Sampling()).actions, trained, atol=1e-6)
    assert np.abs(trained - untrained).max() > 1e-3
