"""A LeRobot checkpoint is fine-tuned on a LeRobot data set, by the checkpoint's own statistics."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from frameworks import needs, python_of
from plugins.lerobot.tiny_lerobot import shrink_pi0, write_lerobot

from rlvlm.algorithms.policy_gradient import supervised_start
from rlvlm.algorithms.policy_gradient.rollouts import ROLLOUTS
from rlvlm.algorithms.policy_gradient.supervised_start import Lessons
from rlvlm.algorithms.sft_config import ChunkSFTConfig
from rlvlm.algorithms.sft_preferences import losses_of_rows
from rlvlm.core.errors import UsageError
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.plugins.lerobot.config import LeRobotConfig
from rlvlm.plugins.lerobot.policy import LeRobotPolicy
from rlvlm.policies.advantage_prompt import positive
from rlvlm.policies.vla.build import build_policy
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.policies.vla.policy import Demonstrations
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.settings.tree import override
from tests.recorded_data import GREEN, PX, Recorded, trajectory
from tests.recorded_data import write_lerobot as write_data

pytest.importorskip("rlvlm.plugins.exchange", reason="data sets are imported by another guest")
from tests.plugins.exchange.test_trajectories import TwoEyes, quiet, take  # noqa: E402

ROOT = Path(__file__).parents[3]
WRITERS = {"v2.1": "lerobot033", "v3.0": "lerobot"}
"""Folder with a release of LeRobot, by the version of data sets that it writes."""


def start(folder: Path, kind: str, checkpoint: Path, **changes: Any) -> tuple[LeRobotPolicy, list[Demonstrations]]:
    """A policy of this kind after a supervised start on `folder`, and what its learners were shown; `changes` are
    fields of its config.json.
    """
    env = TwoEyes(ChunkEnvConfig(episode_steps=32), seed=0)
    write_lerobot(checkpoint, env, kind, chunk_size=env.chunk_steps + 2, **changes)
    model = VLAConfig(model=str(checkpoint), head="flow", lerobot=LeRobotConfig(image_px=PX))
    policy = build_policy(model, env)
    assert isinstance(policy, LeRobotPolicy)
    settings: Any = SimpleNamespace(
        sft=ChunkSFTConfig(demonstrations=str(folder)),
        task="push_block",
        kind="chunks",
        env_settings=ChunkEnvConfig(episode_steps=32),
        seed=0,
    )
    learned: list[Demonstrations] = []

    def learn(lessons: Lessons) -> dict[str, float]:
        learned.append(lessons.shown)
        return {}

    supervised_start.start(ROLLOUTS["chunks"], settings, policy, env, learn, quiet)
    return policy, learned


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "version", "dtype", "changes"),
    [
        ("smolvla", "v2.1", "image", {}),
        ("pi0", "v3.0", "video", {}),
        ("pi05", "v3.0", "image", {}),
        ("pi0", "v3.0", "image", {"use_relative_actions": True, "action_feature_names": [*"abcdef", "gripper"]}),
    ],
)
def test_a_checkpoint_is_fine_tuned_by_its_own_statistics(
    tmp_path: Path, kind: str, version: str, dtype: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink_pi0(monkeypatch)
    recorded = [trajectory(20, seed=number) for number in range(3)]
    write_data(tmp_path / "set", version, recorded, dtype)
    folder, counts = take(tmp_path / "set", "lerobot", tmp_path / "shown")
    assert counts["added"] == 3
    policy, [shown] = start(folder.path, kind, tmp_path / "checkpoint", **changes)
    # the tiny checkpoint has mean 0 and std .3, or quantiles of -.3 and .3: the same
    assert policy.scales["action"].spread.tolist() == pytest.approx([0.3] * 7) and shown.num_episodes == 3
    env = TwoEyes(ChunkEnvConfig(episode_steps=32), seed=0)
    imitation = policy.imitation(shown, env, ChunkSFTConfig(), np.random.default_rng(0), quiet)
    rows = torch.tensor([0, 2])
    with torch.no_grad():
        found = imitation.loss(rows, None)
        # the same by hand, for the dimensions that the env runs and all steps that were demonstrated
        rng, expected = np.random.default_rng(0), []
        images, words, proprio = policy.normalised(*policy.shown_inputs(env, shown.obs, shown.images))
        cache = policy.network.prefix(images[rows], words[rows], proprio[rows])
        target = torch.zeros(2, policy.network.horizon, policy.network.action_width)
        own = shown.actions[rows.numpy()]
        own[:, :, :6] -= shown.obs.proprio[rows.numpy(), None, :6] * bool(changes)  # all but the gripper are relative
        middle = (env.action_low + env.action_high) / 2
        target[..., :7] = torch.from_numpy((own - middle) / 0.3)
        assert shown.known is not None
        known = torch.from_numpy(shown.known[rows.numpy()])[..., None].expand(-1, -1, 7)
        for _ in range(policy.flow.draws):
            eps = torch.from_numpy(rng.standard_normal(target.shape, np.float32))
            t = 0.999 * torch.from_numpy(rng.random(2, np.float32)) ** (2 / 3) + 0.001
            x = t[:, None, None] * eps + (1 - t[:, None, None]) * target
            error = policy.network.velocity(cache, x, t) - (eps - target)
            squares = (error[..., :7].square() * known).sum(dim=(1, 2)) / known.sum(dim=(1, 2))
            expected.append(squares.mean())
    torch.testing.assert_close(found, torch.stack(expected).mean(), atol=1e-4, rtol=1e-5)
    single, beside = losses_of_rows(imitation.loss, rows)  # as pairs of segments are learned
    assert single.shape == (2,) and (single > 0).all() and abs(beside.item()) < 1e-5
    policy.config = replace(policy.config, conditioned=True)
    shown_word = replace(shown.obs, texts=positive(shown.obs.texts))
    words = policy.shown_inputs(env, shown_word, shown.images)[1]
    assert torch.equal(policy.read(policy.asked(shown.obs)), words)
    optimizer = torch.optim.Adam(policy.acting_parameters(), 1e-3)
    losses = []
    for _ in range(8):
        losses.append(loss := imitation.loss(torch.arange(len(shown.actions)), None))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.05


def test_data_of_another_robot_are_refused_with_the_fix(tmp_path: Path) -> None:
    def moved(recorded: Recorded) -> Recorded:
        actions, states, images = recorded
        return actions, states + np.float32([0, 0, 0, 90, 0, 0, 0, 0]), images

    write_data(tmp_path / "set", "v2.1", [moved(trajectory(20))], "image")
    folder, _ = take(tmp_path / "set", "lerobot", tmp_path / "shown", unlike=True)
    with pytest.raises(
        UsageError, match="dimension 3 of the demonstrations' proprio lies 30. times its spread"
    ) as caught:
        start(folder.path, "smolvla", tmp_path / "checkpoint")
    assert "--sft.demonstrations" in caught.value.fix


def test_a_flow_takes_demonstrations_and_a_checkpoint_with_tokens_does_not() -> None:
    settings = {"policy.model": "somewhere", "sft.demonstrations": "shown"}
    override(recipe("push_block"), {**settings, "policy.head": "flow", "sft.updates": 20})
    with pytest.raises(UsageError, match=r"sft\.demonstrations has no effect on policy\.model"):
        override(recipe("push_block"), settings)


@needs("lerobot")
@pytest.mark.slow
@pytest.mark.parametrize("version", WRITERS)
@pytest.mark.parametrize("dtype", ["image", "video"])
def test_a_data_set_that_lerobot_wrote_feeds_a_checkpoint(
    tmp_path: Path, version: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = python_of("lerobot")
    shrink_pi0(monkeypatch)
    recorded = [trajectory(12, seed=number) for number in range(2)]
    large = [(*numbers, images.repeat(8, axis=2).repeat(8, axis=3)) for *numbers, images in recorded]  # AV1 needs 64
    names = ("actions", "states", "images")
    arrays = {
        f"{name}_{number}": part
        for number, episode in enumerate(large)
        for name, part in zip(names, episode, strict=True)
    }
    np.savez(tmp_path / "recorded.npz", **arrays, text=GREEN)
    script = ROOT / "environments/lerobot_reference.py"
    around = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(python.parents[2] / WRITERS[version])}
    paths = str(tmp_path / "set"), str(tmp_path / "recorded.npz"), dtype
    subprocess.run([python, script, "data", *paths], check=True, timeout=300, env=around)
    assert json.loads((tmp_path / "set/meta/info.json").read_text())["codebase_version"] == version
    folder, counts = take(tmp_path / "set", "lerobot", tmp_path / "shown", success="assumed", image_px=PX)
    assert counts == {"added": 2}
    policy, [shown] = start(folder.path, "pi05", tmp_path / "checkpoint")
    chunks = len(shown.actions) // 2
    np.testing.assert_allclose(shown.obs.proprio[chunks], recorded[1][1][0], atol=1e-6)
    assert shown.images is not None
    # the camera of the wrist comes last, whatever its name's place; scaling and films lose a little
    assert np.abs(shown.images[0].astype(int) - recorded[0][2][0]).max() <= 40
