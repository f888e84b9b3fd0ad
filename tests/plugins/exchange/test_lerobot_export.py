"""Demonstrations in chunks as a data set of LeRobot's: read back by our reader and by its own, and trained on."""

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from frameworks import needs, python_of

from rlvlm.algorithms.sft_chunks import _gathered
from rlvlm.cli import main
from rlvlm.core.errors import UsageError
from rlvlm.core.grippers import OPENNESS, GripperUnits
from rlvlm.demonstrations.chunk_form import form_of
from rlvlm.demonstrations.collect import Disturbance, collect
from rlvlm.demonstrations.folder import DemonstrationFolder, create_folder
from rlvlm.demonstrations.trajectory import RobotTrajectory
from rlvlm.envs.registry import make_env, task_env
from rlvlm.plugins.exchange.commands import export
from rlvlm.plugins.exchange.cutting import CutConfig
from rlvlm.plugins.exchange.lerobot_data import read_lerobot
from tests.plugins.exchange.test_trajectories import take
from tests.recorded_data import GREEN, PX, RED, trajectory, write_lerobot

LEROBOT = needs("lerobot")


def collected(out: Path, num: int = 3) -> tuple[DemonstrationFolder, Any]:
    env: Any = make_env("push_block", task_env("push_block"), 0)
    folder = create_folder(out, "push_block", "chunks", chunks=vars_of(form_of(env)))
    collect(env, Disturbance(noise=0.1), folder, num, 0)
    return folder, env


def vars_of(form: Any) -> dict[str, Any]:
    return {name: getattr(form, name) for name in form.__slots__}


def read(root: Path) -> list[RobotTrajectory]:
    found = list(read_lerobot(root, CutConfig()))
    assert all(isinstance(episode, RobotTrajectory) for episode in found)
    return found  # pyright: ignore[reportReturnType] - as asserted


@pytest.mark.parametrize("gripper", [None, "one_closes"])
def test_played_episodes_have_a_row_for_every_env_step(tmp_path: Path, gripper: GripperUnits | None) -> None:
    folder, env = collected(tmp_path / "shown")
    words = ["--lerobot.gripper", gripper] if gripper else []
    assert (
        main(
            [
                "data",
                "export",
                str(folder.path),
                "--out",
                str(tmp_path / "set"),
                "--form",
                "lerobot",
                "--lerobot.image-px",
                "32",
                *words,
            ]
        )
        == 0
    )
    factor, offset = OPENNESS[gripper or "minus_one_opens"]
    for episode, record in zip(read(tmp_path / "set"), folder.episodes(), strict=True):
        chunks, steps = record.arrays["actions"], record.arrays["steps"]
        actions = np.concatenate([chunk[:count] for chunk, count in zip(chunks, steps, strict=True)])
        np.testing.assert_array_equal(episode.actions[:, :6], actions[:, :6])
        np.testing.assert_allclose(factor * episode.actions[:, 6] + offset, actions[:, 6])
        starts = np.cumsum(steps) - steps
        np.testing.assert_array_equal(episode.proprio[starts], record.arrays["proprio"])
        drawn = env.draw_cameras(record.arrays["snapshots"][:-1], 32)
        np.testing.assert_array_equal(episode.images(starts), drawn)
        assert (episode.success, episode.instruction) == (record.success, record.goal)


def test_imported_data_come_out_as_they_came_in(tmp_path: Path) -> None:
    recorded = [trajectory(12, seed=number) for number in range(2)]
    write_lerobot(tmp_path / "set", "v3.0", recorded, "image", lost=[1])
    take(tmp_path / "set", "lerobot", tmp_path / "shown", stride=1, unlike=True)
    arguments = [str(tmp_path / "shown"), "--form", "lerobot", "--out"]
    assert export([*arguments, str(tmp_path / "again")], "data export") == 0
    found = read(tmp_path / "again")
    assert [episode.success for episode in found] == [True, False]
    for episode, (actions, states, images) in zip(found, recorded, strict=True):
        np.testing.assert_array_equal(episode.actions, actions)
        np.testing.assert_array_equal(episode.proprio, states)
        np.testing.assert_array_equal(episode.images(np.arange(12)), images)
    assert export([*arguments, str(tmp_path / "good"), "--filter.successful"], "data export") == 0
    assert len(read(tmp_path / "good")) == 1


def test_each_chunk_of_an_episode_keeps_its_own_sentence(tmp_path: Path) -> None:
    write_lerobot(tmp_path / "set", "v3.0", [trajectory(16)], "image")
    [file] = (tmp_path / "set/data").glob("*/*.parquet")
    table = pq.read_table(file).append_column("task_index", [[0] * 8 + [1] * 8])
    pq.write_table(table, file)
    pq.write_table(pa.table({"task_index": [0, 1], "task": [GREEN, RED]}), tmp_path / "set/meta/tasks.parquet")
    folder, _ = take(tmp_path / "set", "lerobot", tmp_path / "shown", stride=1, unlike=True)
    shown = _gathered(list(folder.episodes()), 0, None, np.zeros((16, 2, PX, PX, 3), np.uint8))
    assert shown.obs.texts == (GREEN,) * 8 + (RED,) * 8
    export([str(folder.path), "--form", "lerobot", "--out", str(tmp_path / "again")], "data export")
    assert read(tmp_path / "again")[0].instructions == shown.obs.texts


def test_unexportable_demonstrations_are_refused(tmp_path: Path) -> None:
    write_lerobot(tmp_path / "set", "v3.0", [trajectory(12)], "image")
    take(tmp_path / "set", "lerobot", tmp_path / "sparse", unlike=True)
    turns = create_folder(tmp_path / "turns", "number_line", "turns", ("left", "right"))
    lost, _ = collected(tmp_path / "lost", 1)
    for file in (lost.path / "arrays").glob("*.npz"):
        arrays = dict(np.load(file))
        np.savez(file, **{**arrays, "snapshots": arrays["snapshots"] + 1})
    for folder, words in (
        (tmp_path / "sparse", "keeps images of the steps that begin chunks"),
        (turns.path, "holds turns"),
        (lost.path, "1: comes to other states when it is played again"),
    ):
        with pytest.raises(UsageError, match=words) as caught:
            export([str(folder), "--form", "lerobot", "--out", str(tmp_path / "out")], "data export")
        assert caught.value.fix and not list(tmp_path.glob("*out*"))
    with pytest.raises(UsageError, match="is there already"):
        export([str(lost.path), "--form", "lerobot", "--out", str(tmp_path / "set")], "data export")


_READ = """
import sys, numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
data = LeRobotDataset("some/data", root=sys.argv[1])
rows = [data[index] for index in range(len(data))]
np.savez(sys.argv[2], **{name: np.stack([row[name].numpy() for row in rows]) for name in
    ("action", "observation.state", "observation.images.above", "timestamp", "next.success", "episode_index")},
    tasks=[row["task"] for row in rows])
"""


@LEROBOT
@pytest.mark.slow
def test_lerobot_reads_it_to_the_bit_and_trains_on_it(tmp_path: Path) -> None:
    folder, _ = collected(tmp_path / "shown")
    root = tmp_path / "set"
    export([str(folder.path), "--form", "lerobot", "--out", str(root), "--lerobot.image-px", "64"], "data export")
    python, around = python_of("lerobot"), {"HF_HUB_OFFLINE": "1", "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    subprocess.run([python, "-c", _READ, root, tmp_path / "read.npz"], check=True, timeout=600, env=around)
    found, own = np.load(tmp_path / "read.npz"), read(root)
    np.testing.assert_array_equal(found["action"], np.concatenate([episode.actions for episode in own]))
    np.testing.assert_array_equal(found["observation.state"], np.concatenate([episode.proprio for episode in own]))
    images = np.concatenate([episode.images(np.arange(len(episode.actions)))[:, 0] for episode in own])
    np.testing.assert_array_equal(np.round(found["observation.images.above"] * 255), images.transpose(0, 3, 1, 2))
    assert found["next.success"].sum() == 3 and set(found["tasks"]) == {episode.instruction for episode in own}
    words = (
        f"--dataset.repo_id=some/data --dataset.root={root} --policy.type=act --policy.device=cpu --steps=10 "
        f"--policy.push_to_hub=false --output_dir={tmp_path}/trained --batch_size=2 --num_workers=0 "
        "--policy.chunk_size=8 --policy.n_action_steps=8 --policy.dim_model=32 --policy.n_heads=2 "
        "--policy.dim_feedforward=32 --policy.pretrained_backbone_weights=null --wandb.enable=false"
    )
    command = [python, "-m", "lerobot.scripts.lerobot_train", *words.split()]
    subprocess.run(command, check=True, timeout=600, env=around, cwd=tmp_path)
    assert list((tmp_path / "trained").rglob("model.safetensors"))
