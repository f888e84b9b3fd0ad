"""Trajectories that others recorded, in small real files of each form: what comes back, and what is refused."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from http_edge import patched, turned
from peak_memory import peak_of

from rlvlm.cli import main
from rlvlm.core.errors import UsageError
from rlvlm.core.steps import FloatArray
from rlvlm.demonstrations.chunk_form import folder_form, is_whole, kept_images
from rlvlm.demonstrations.collect import Disturbance, play_episodes
from rlvlm.demonstrations.folder import DemonstrationFolder, open_folder
from rlvlm.demonstrations.trajectory import RobotTrajectory
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.libero.env import to_robosuite
from rlvlm.envs.push_block import PushBlock
from rlvlm.envs.registry import make_env, task_env
from rlvlm.judge_bench.suites import SUITES
from rlvlm.judge_bench.task_items import recorded_items
from rlvlm.plugins.exchange.cutting import CutConfig, cut, moving, opened
from rlvlm.plugins.exchange.lerobot_data import read_lerobot
from rlvlm.plugins.exchange.libero_hdf5 import read_libero
from rlvlm.plugins.exchange.rlds import _example_class
from rlvlm.plugins.exchange.trajectories import Source, import_trajectories
from tests.demonstrations.test_recordings import read, write_images
from tests.recorded_data import (
    FPS,
    GREEN,
    NAMES,
    PX,
    RED,
    Recorded,
    example,
    tfrecord,
    trajectory,
    write_film,
    write_lerobot,
    write_libero,
)

GRIPPERS = np.array([False] * 6 + [True])


class TwoEyes(PushBlock):
    """push_block with proprioception and cameras in LIBERO's numbers."""

    cameras = ("above", "wrist")
    proprio_size = 8


class WideEyes(TwoEyes):
    """The same, and its own episodes begin with a pose and two fingers."""

    def reset(self, **options: Any) -> Any:
        obs, info = super().reset(**options)
        pose = np.concatenate([obs.proprio, np.float32([[0.2, 3.14, 0, 0.1, 0.04, -0.04]])], axis=1)
        return replace(obs, proprio=pose), info


def quiet(line: str) -> None:
    assert line


def take(source: Path, form: Source, out: Path, **settings: Any) -> tuple[DemonstrationFolder, dict[str, int]]:
    env = TwoEyes(ChunkEnvConfig(episode_steps=32), seed=0)
    folder, counts = import_trajectories(source, form, out, "push_block", env, CutConfig(**settings), quiet)
    return folder, dict(counts)


def as_opened(actions: FloatArray) -> FloatArray:
    return opened(actions, GRIPPERS, "minus_one_opens")


# --- cutting


def test_steps_are_cut_by_hand() -> None:
    """Five steps in chunks of two: two whole ones, and one that lacks a step."""
    actions = np.arange(1, 6, dtype=np.float32)[:, None] * np.array([[0.1, 1.0]], np.float32)
    grippers = np.array([False, True])
    still = cut(actions, grippers, 2, CutConfig())
    assert still.starts.tolist() == [0, 2, 4] and still.steps.tolist() == [2, 2, 1]
    assert still.actions[2].tolist() == [[0.5, 5.0], [0.0, 5.0]], "no movement, the gripper as it was"
    assert cut(actions, grippers, 2, CutConfig(last="repeat")).actions[2].tolist() == [[0.5, 5.0], [0.5, 5.0]]
    assert cut(actions, grippers, 2, CutConfig(last="drop")).starts.tolist() == [0, 2]
    overlapping = cut(actions, grippers, 2, CutConfig(stride=1))
    assert overlapping.starts.tolist() == [0, 1, 2, 3, 4] and overlapping.steps.sum() == 5
    assert overlapping.actions[1, :, 0] == pytest.approx([0.2, 0.3])


def test_still_steps_can_be_left_out() -> None:
    """Still at the start, a move, still, the gripper closes, still."""
    actions = np.array([[0, -1], [0.3, -1], [0, -1], [0, 1], [0, 1], [0.2, 1]], np.float32)
    grippers = np.array([False, True])
    assert moving(actions, grippers).tolist() == [1, 3, 5]
    kept = cut(actions, grippers, 2, CutConfig(drop_no_ops=True))
    assert kept.starts.tolist() == [1, 5] and kept.actions[0].tolist() == actions[[1, 3]].tolist()


# --- LIBERO's HDF5


@pytest.mark.parametrize("is_own", [True, False])
def test_liberos_files_come_back(tmp_path: Path, is_own: bool) -> None:
    demos = [trajectory(20), trajectory(17, seed=1)]
    file = tmp_path / "push_the_green_block_onto_the_pad_demo.hdf5"
    write_libero(file, GREEN, demos, is_own)
    folder, counts = take(file, "libero", tmp_path / "d")
    assert counts == {"added": 2}
    for record, (actions, states, images) in zip(folder.episodes(), demos, strict=True):
        first = 1 if is_own else 0  # of its first action nobody saw what was before
        starts = np.arange(first, len(actions), 8)
        assert record.goal == GREEN and record.success and is_whole(record, folder_form(folder))
        assert np.array_equal(kept_images(folder, record), images[starts])
        assert np.array_equal(record.arrays["proprio"], states[starts])
        flat = record.arrays["actions"].reshape(-1, 7)
        assert np.allclose(flat[: len(actions) - first], as_opened(actions)[first:], atol=1e-6)
        assert not flat[len(actions) - first :, :6].any() and record.arrays["steps"].sum() == len(actions) - first
    assert (folder.chunks["late"], folder.chunks["turned"]) == (is_own, True)
    assert take(file, "libero", tmp_path / "d")[1] == {"there already": 2}


@pytest.mark.parametrize(
    ("file", "sentence", "goal"),
    [
        ("pick_up_the_milk_and_place_it_in_the_basket", "pick the milk and place it in the basket", None),
        ("whatever", "pick the milk and place it in the basket", "pick up the milk and place it in the basket"),
        ("whatever", "open the middle layer of the drawer", "open the middle drawer of the cabinet"),
        ("whatever", "pick the akita black bowl on the stove and place it on the plate",
         "pick up the black bowl on the stove and place it on the plate"),
        ("push_the_green_block_onto_the_pad", "push the green block onto the pad", None),
    ],
)  # fmt: skip
def test_a_libero_file_tells_its_task_by_its_name_or_by_the_sentence_of_its_bddl(
    tmp_path: Path, file: str, sentence: str, goal: str | None
) -> None:
    """`problem_info` as LIBERO's create_dataset.py writes it: the language of the BDDL, not the file's name."""
    write_libero(tmp_path / f"{file}_demo.hdf5", sentence, [trajectory(9)], is_own=True)
    (found,) = read_libero(tmp_path, CutConfig())
    assert isinstance(found, RobotTrajectory) and found.instruction == (goal or file.replace("_", " "))


def test_a_folder_of_files_gives_the_requested_episodes(tmp_path: Path) -> None:
    for name, instruction in (("a", GREEN), ("b", RED), ("c", "open the drawer")):
        write_libero(tmp_path / f"{name}_demo.hdf5", instruction, [trajectory(9)], is_own=True)
    folder, counts = take(tmp_path, "libero", tmp_path / "d", image_px=8)
    assert counts == {"added": 2, "another task's instruction: open the drawer": 1}
    assert sorted(record.goal for record in folder.episodes()) == [GREEN, RED]
    assert folder_form(folder).image_px == 8


def test_unusable_episodes_are_counted_and_reported(tmp_path: Path) -> None:
    file = tmp_path / "d_demo.hdf5"
    actions, states, images = trajectory(12)
    wild, lame = actions.copy(), states * np.nan
    wild[3, 0] = 20.0
    write_libero(file, GREEN, [(wild, states, images), (actions, lame, images), (actions[:, 1:], states, images)], True)
    assert take(file, "libero", tmp_path / "out")[1] == {
        "actions out of range": 1,
        "numbers that are not finite": 1,
        "actions of 6 numbers, not 7": 1,
    }


def test_a_gripper_that_may_mean_either_must_be_explained(tmp_path: Path) -> None:
    file = tmp_path / "d_demo.hdf5"
    actions, states, images = trajectory(9)
    actions[:, 6] = np.abs(actions[:, 6])
    write_libero(file, GREEN, [(actions, states, images)], is_own=True)
    with pytest.raises(UsageError, match="1 may open or close it"):
        take(file, "libero", tmp_path / "out")
    folder, _ = take(file, "libero", tmp_path / "out", gripper="one_closes")
    assert folder.chunks["gripper"] == "one_closes"
    (record,) = folder.episodes()
    assert not record.arrays["actions"][:, :, 6].any()


@pytest.mark.slow
def test_an_episode_of_libero_goes_out_as_a_file_comes_back_and_can_be_played(tmp_path: Path) -> None:
    """Seen through both cameras at every chunk, in robosuite's units, as OpenVLA's files have it."""
    pytest.importorskip("robosuite")
    env: Any = make_env("libero_object/0", task_env("libero_object/0"), 0)
    (played,) = play_episodes(env, Disturbance(noise=0.02), "libero_object/0", wanted=1, seed=0)
    count = len(played.arrays["actions"])
    images = np.stack([env.draw(played.arrays["snapshots"][:count], PX, camera) for camera in env.cameras], axis=1)
    actions = played.arrays["actions"].reshape(-1, 7)[: played.arrays["steps"].sum()]
    every_step = np.arange(len(actions)) // 8  # what was seen between is not looked at
    states = played.arrays["proprio"][every_step]
    file = tmp_path / "pick_up_the_alphabet_soup_and_place_it_in_the_basket_demo.hdf5"
    shown = np.stack([to_robosuite(action) for action in actions]), states, images[every_step]
    write_libero(file, "", [shown], is_own=False)
    folder, counts = import_trajectories(
        file, "libero", tmp_path / "d", "libero_object/0", env, CutConfig(last="repeat"), quiet
    )
    (record,) = folder.episodes()
    assert counts == {"added": 1} and record.goal == env.goal == played.goal
    assert np.array_equal(kept_images(folder, record), images)
    assert np.array_equal(record.arrays["proprio"], played.arrays["proprio"])
    assert np.array_equal(record.arrays["actions"].reshape(-1, 7)[: len(actions)], actions)
    env.reset(options={"state_id": played.seed})
    infos = [env.step(chunk)[4] for chunk in record.arrays["actions"]]
    assert infos[-1]["success"] and [info["steps"] for info in infos] == record.arrays["steps"].tolist()
    env.close()


# --- RLDS


def test_a_message_is_that_of_tensorflow() -> None:
    """Features {"a": Feature(float_list=[1.0, 2.0])} as its wire has it: nested lengths, floats packed."""
    made = _example_class()()
    made.features.feature["a"].float_list.value.extend([1.0, 2.0])
    floats = b"\x0a\x08" + struct.pack("<2f", 1.0, 2.0)
    feature = b"\x12" + bytes([len(floats)]) + floats
    entry = b"\x0a\x01a\x12" + bytes([len(feature)]) + feature
    features = b"\x0a" + bytes([len(entry)]) + entry
    assert made.SerializeToString() == b"\x0a" + bytes([len(features)]) + features


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_records_of_tensorflow_come_back(tmp_path: Path, kind: str) -> None:
    shown = [trajectory(20), trajectory(10, seed=1)]
    folder_of_version = tmp_path / "libero_test" / "1.0.0"
    folder_of_version.mkdir(parents=True)
    for number, one in enumerate(shown):
        record = example(*one, instruction=(GREEN, RED)[number].capitalize() + ".", kind=kind)
        (folder_of_version / f"libero-train.tfrecord-0000{number}-of-00002").write_bytes(tfrecord(record))
    folder, counts = take(tmp_path / "libero_test", "rlds", tmp_path / "d", stride=4)
    assert counts == {"added": 2}
    for record, (actions, states, images), goal in zip(folder.episodes(), shown, (GREEN, RED), strict=True):
        starts = np.arange(0, len(actions), 4)
        assert record.goal == goal and np.array_equal(record.arrays["proprio"], states[starts])
        assert np.array_equal(record.arrays["actions"][0], as_opened(actions)[:8])
        difference = kept_images(folder, record).astype(int) - images[starts]
        assert not difference.any() if kind == "png" else np.abs(difference).mean() < 3
    assert folder.chunks["turned"] is False


# --- LeRobot


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
@pytest.mark.parametrize("kind", ["image", "video"])
def test_lerobots_data_sets_come_back(tmp_path: Path, version: str, kind: str) -> None:
    shown = [trajectory(12), trajectory(9, seed=1), trajectory(18, seed=2)]
    write_lerobot(tmp_path / "set", version, shown, kind)
    folder, counts = take(tmp_path / "set", "lerobot", tmp_path / "d")
    assert counts == {"added": 3}
    goals = (GREEN, RED, GREEN)
    for record, (actions, states, images), goal in zip(folder.episodes(), shown, goals, strict=True):
        starts = np.arange(0, len(actions), 8)
        assert record.goal == goal and np.array_equal(record.arrays["proprio"], states[starts])
        assert np.array_equal(record.arrays["actions"].reshape(-1, 7)[: len(actions)], as_opened(actions))
        difference = np.abs(kept_images(folder, record).astype(int) - images[starts])
        assert difference.max() <= (0 if kind == "image" else 4), "a step is worth 10, and the wrist stands first there"
    one, counts = take(
        tmp_path / "set", "lerobot", tmp_path / "one", cameras=("observation.images.wrist_image",) * 2, turn=True
    )
    (record, *_) = one.episodes()
    images = kept_images(one, record)
    assert np.array_equal(images[:, 0], images[:, 1]) and images[0, 0, -1, -1].any() and not images[0, 0, 0, 0].any()


LENGTHS = (12, 9, 18)


def film_set(  # noqa: PLR0913 - what may be wrong with one
    root: Path,
    *,
    fps: int = FPS,
    row_fps: int = FPS,
    begin_s: float = 0.0,
    off: float = 0.0,
    extra: int = 0,
    version: str = "v3.0",
    order: str = "",
) -> list[Recorded]:
    """A set whose films, or what it says of them, are not as they should be.

    Args:
        root: of the set.
        fps: of the films; `meta/` says 20.
        row_fps: of the rows' timestamps.
        begin_s: when each film begins.
        off: frames by which `from_timestamp` of the second and third episode is wrong.
        extra: frames at the end of each film that no row belongs to.
        version: of the set.
        order: `shuffled` for rows and tasks in another order than `index` and `task_index`.
    """
    shown = [trajectory(num, seed=number) for number, num in enumerate(LENGTHS)]
    write_lerobot(root, version, shown, "video")
    black = np.zeros((extra, 2, PX, PX, 3), np.uint8)
    films = [np.concatenate([one[2] for one in shown])] if version == "v3.0" else [one[2] for one in shown]
    for camera, name in zip((1, 0), NAMES, strict=True):
        for file, images in zip(sorted(root.glob(f"videos/**/{name}/**/*.mp4")), films, strict=True):
            write_film(file, np.concatenate([images, black])[:, camera], fps, begin_s)
    for file in root.glob("data/*/*.parquet"):
        table = pq.read_table(file)
        numbers, steps = table["episode_index"].to_numpy(), table["frame_index"].to_numpy()
        table = table.append_column("timestamp", pa.array((steps / row_fps).astype(np.float32)))
        table = table.append_column("task_index", pa.array((numbers == 1).astype(int)))
        rng = np.random.default_rng(0)
        pq.write_table(table.take(rng.permutation(len(table))) if order else table, file)
    named = [{"task_index": number, "task": task} for number, task in enumerate((GREEN, RED))]
    pq.write_table(pa.Table.from_pylist(named[::-1] if order else named), root / "meta/tasks.parquet")
    for file in root.glob("meta/episodes/*/*.parquet"):
        rows = pq.read_table(file).to_pylist()
        for row in rows:
            row |= {"tasks": ["another"]} if order else {}
            for key in (key for key in row if key.endswith("/from_timestamp") and row["episode_index"]):
                row[key] = row[key] * FPS / fps + off / FPS
        pq.write_table(pa.Table.from_pylist(rows), file)
    return shown


@pytest.mark.parametrize(
    ("wrong", "is_known"),
    [
        ({"fps": 18, "row_fps": 18}, True),  # recorded at 18 frames a second, and meta/ says 20
        ({"fps": 18}, True),  # the rows say 20, too, but there is a frame for each
        ({"fps": 18, "row_fps": 18, "extra": 3}, True),
        ({"fps": 18, "extra": 3}, False),
        ({"off": 0.55}, True),
        ({"off": 1.0}, True),
        ({"off": 0.55, "extra": 3}, False),  # as near to the neighbour as to the right one
        ({"off": 0.2, "extra": 3}, True),
        ({"off": 40.0}, False),  # the second episode would follow upon the third's begin
        ({"begin_s": 0.2}, True),
        ({"begin_s": 0.2, "version": "v2.1"}, True),
        ({"begin_s": 0.2, "version": "v2.1", "extra": 3}, False),
        ({"order": "shuffled"}, True),
        ({"order": "shuffled", "version": "v2.1"}, True),
    ],
)
def test_each_row_of_a_film_has_its_own_frame_or_the_film_is_refused(
    tmp_path: Path, wrong: dict[str, Any], is_known: bool
) -> None:
    shown = film_set(tmp_path / "set", **wrong)
    if not is_known:
        lines: list[str] = []
        env = TwoEyes(ChunkEnvConfig(episode_steps=32), seed=0)
        with pytest.raises(UsageError, match="the video's times do not fit"):
            import_trajectories(
                tmp_path / "set", "lerobot", tmp_path / "d", "push_block", env, CutConfig(stride=1), lines.append
            )
            raise UsageError("\n".join(lines))  # where the first episode is sound, the others are told
        return
    folder, counts = take(tmp_path / "set", "lerobot", tmp_path / "d", stride=1)
    assert counts == {"added": 3}
    for record, (_, states, images), goal in zip(folder.episodes(), shown, (GREEN, RED, GREEN), strict=True):
        assert record.goal == goal and np.array_equal(record.arrays["proprio"], states)
        assert np.abs(kept_images(folder, record).astype(int) - images).max() <= 4, "a step is worth 10"


@pytest.mark.parametrize(
    ("columns", "rule", "successes"),
    [
        ({}, None, None),
        ({}, "assumed", [True, True]),
        ({}, "none", [False, False]),
        ({"next.success": [[0, 1, 0], [0, 0, 0]]}, "assumed", [True, False]),
        ({"is_success": [[1, 1, 0], [0, 0, 1]]}, None, [False, True]),
        ({"success": [[0, 0, 1], [0, 0, 0]]}, None, [True, False]),
    ],
)
def test_successes_are_read_and_never_taken_for_granted(
    tmp_path: Path, columns: dict[str, list[list[int]]], rule: str | None, successes: list[bool] | None
) -> None:
    write_lerobot(tmp_path / "set", "v2.1", [trajectory(9), trajectory(9, seed=1)], "image")
    for number, file in enumerate(sorted(tmp_path.glob("set/data/*/*.parquet"))):
        table = pq.read_table(file).drop_columns("next.success")
        for name, rows in columns.items():
            table = table.append_column(name, pa.array(np.repeat(np.bool_(rows[number]), 3)))
        pq.write_table(table, file)
    if successes is None:
        with pytest.raises(UsageError, match="does not say whether its episodes succeeded") as raised:
            take(tmp_path / "set", "lerobot", tmp_path / "d")
        assert "--success assumed" in raised.value.fix
        with pytest.raises(UsageError, match="does not say"):
            recorded_items(SUITES["tiny"], "set", read_lerobot(tmp_path / "set", CutConfig()), 64, 0)
        return
    folder, _ = take(tmp_path / "set", "lerobot", tmp_path / "d", success=rule)
    assert [record.success for record in folder.episodes()] == successes
    assert folder.chunks["success"] == ("as recorded" if columns else rule)


def test_a_turned_film_is_shown_upright(tmp_path: Path) -> None:
    """Its track's matrix says a quarter clockwise: the mark at the top left goes to the top right."""
    shown = trajectory(9)
    write_lerobot(tmp_path / "set", "v2.1", [shown], "video")
    for file in tmp_path.glob("set/videos/**/*.mp4"):
        file.write_bytes(turned(file.read_bytes()))
    folder, _ = take(tmp_path / "set", "lerobot", tmp_path / "d", stride=1)
    (record,) = folder.episodes()
    assert np.abs(kept_images(folder, record).astype(int) - np.rot90(shown[2], -1, axes=(2, 3))).max() <= 4


def rewrite(file: Path, change: Callable[[dict[str, Any]], None], lines: bool = False) -> None:
    found = [json.loads(line) for line in file.read_text().splitlines()] if lines else [json.loads(file.read_text())]
    for one in found:
        change(one)
    file.write_text("\n".join(json.dumps(one, indent=2) for one in found))


def test_lerobots_data_sets_come_back_as_people_publish_them(tmp_path: Path) -> None:
    """A stale file_index, no tasks beside an episode, JSONL over several lines, and one episode that is torn."""
    shown = [trajectory(12), trajectory(9, seed=1), trajectory(18, seed=2)]
    write_lerobot(tmp_path / "three", "v3.0", shown, "image")
    meta, data = (tmp_path / "three" / part / "chunk-000" for part in ("meta/episodes", "data"))
    rows = pq.read_table(meta / "file-000.parquet").to_pylist()
    rows = [{key: value for key, value in row.items() if key != "tasks"} | {"data/file_index": 7} for row in rows]
    pq.write_table(pa.Table.from_pylist(rows), meta / "file-000.parquet")
    table = pq.read_table(data / "file-000.parquet")
    tasks = [1 if number == 1 else 0 for number in table["episode_index"].to_pylist()]
    pq.write_table(table.append_column("task_index", pa.array(tasks)), data / "file-000.parquet")
    named = [{"task_index": number, "__index_level_0__": task} for number, task in enumerate((GREEN, RED))]
    pq.write_table(pa.Table.from_pylist(named), tmp_path / "three/meta/tasks.parquet")
    folder, counts = take(tmp_path / "three", "lerobot", tmp_path / "d")
    assert counts == {"added": 3} and [episode.goal for episode in folder.episodes()] == [GREEN, RED, GREEN]

    write_lerobot(tmp_path / "two", "v2.1", shown, "image")
    rewrite(tmp_path / "two/meta/episodes.jsonl", lambda one: None, lines=True)
    _torn(tmp_path / "two/data/chunk-000/episode_000001.parquet")
    _, counts = take(tmp_path / "two", "lerobot", tmp_path / "e")
    assert counts == {"added": 2, "torn, as episode_000001.parquet": 1}


@pytest.mark.parametrize(
    ("states", "actions", "words"),
    [
        ([0, -0.16, 0, -2.44, 0, 2.23, 0.79, 0.04], None, "joint angles\\? the first episode's instruction is 'push"),
        ([-0.75, 0, 0, 0, 0, 0, 0.04, -0.04], "places", "actions are the places"),
    ],
)
def test_data_that_are_unlike_the_task_are_refused(
    tmp_path: Path, states: list[float], actions: str | None, words: str
) -> None:
    done, _, images = trajectory(12)
    seen = np.array(states, np.float32) + np.linspace(0, 0.3, 12, dtype=np.float32)[:, None]
    if actions:
        done[:-1, :6] = seen[1:, :6]
    write_lerobot(tmp_path / "set", "v2.1", [(done, seen, images)], "image")
    env = WideEyes(ChunkEnvConfig(episode_steps=32), seed=0)
    with pytest.raises(UsageError, match=words):
        import_trajectories(tmp_path / "set", "lerobot", tmp_path / "d", "push_block", env, CutConfig(), quiet)
    settings = CutConfig(unlike=True)
    _, counts = import_trajectories(tmp_path / "set", "lerobot", tmp_path / "d", "push_block", env, settings, quiet)
    assert counts == {"added": 1}


# --- what is torn or foreign


def _torn(path: Path, share: float = 0.6) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


def hdf5_file(root: Path) -> Path:
    write_libero(root / "x_demo.hdf5", GREEN, [trajectory(12)], is_own=True)
    return root / "x_demo.hdf5"


def tfrecord_file(root: Path) -> Path:
    (root / "x.tfrecord").write_bytes(tfrecord(example(*trajectory(12), instruction=GREEN)))
    return root / "x.tfrecord"


def lerobot_film(root: Path) -> Path:
    write_lerobot(root / "set", "v2.1", [trajectory(12)], "video")
    return root / "set/videos/chunk-000/observation.images.image/episode_000000.mp4"


def lerobot_table(root: Path) -> Path:
    write_lerobot(root / "set", "v3.0", [trajectory(12)], "image")
    return root / "set/data/chunk-000/file-000.parquet"


@pytest.mark.parametrize(
    ("form", "make"),
    [("libero", hdf5_file), ("rlds", tfrecord_file), ("lerobot", lerobot_film), ("lerobot", lerobot_table)],
)
@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_torn_or_foreign_file_is_refused_by_its_name(
    tmp_path: Path, form: Source, make: Callable[[Path], Path], is_foreign: bool
) -> None:
    file = make(tmp_path)
    source = tmp_path / "set" if form == "lerobot" else file
    assert take(source, form, tmp_path / "whole")[1] == {"added": 1}
    if is_foreign:
        file.write_bytes(b"a letter to a friend, and nothing else; " * 20)
    else:
        _torn(file)
    with pytest.raises(UsageError, match=file.name):
        take(source, form, tmp_path / "d")
    assert not list((tmp_path / "d").glob("arrays/*"))


def claim_frames(file: Path) -> None:
    """Half a hundred million frames of one byte each, all in one chunk."""
    many = struct.pack(">I", 50_000_000)
    data = patched(file.read_bytes(), b"stsz", lambda copy, at: copy.__setitem__(slice(at + 4, at + 12), ONE + many))
    data = patched(data, b"stsc", lambda copy, at: copy.__setitem__(slice(at + 12, at + 16), many))
    file.write_bytes(patched(data, b"stts", lambda copy, at: copy.__setitem__(slice(at + 8, at + 12), many)))


def share_images(file: Path) -> None:
    """One image of 6 MiB of zeros, that all rows share."""
    table = pq.read_table(file)
    same = pa.array([{"bytes": bytes(6 << 20), "path": None}] * len(table), table.schema.field(NAMES[0]).type)
    place = table.schema.get_field_index(NAMES[0])
    pq.write_table(table.set_column(place, NAMES[0], same), file, dictionary_pagesize_limit=1 << 30)


def claim_actions(file: Path) -> None:
    """Actions of which none was ever written."""
    with h5py.File(file, "r+") as target:
        del target["data/demo_0/actions"]
        target.create_dataset("data/demo_0/actions", (10**8, 7), np.float64, chunks=(1_024, 7))


def lead_elsewhere(file: Path) -> None:
    """Actions that lie in another file of the machine."""
    write_libero(file.parent / "private", GREEN, [trajectory(12)], is_own=True)
    with h5py.File(file, "r+") as target:
        del target["data/demo_0/actions"]
        target["data/demo_0/actions"] = h5py.ExternalLink(str(file.parent / "private"), "data/demo_0/actions")


ONE = struct.pack(">I", 1)


@pytest.mark.parametrize(
    ("form", "make", "harm", "message"),
    [
        ("lerobot", lerobot_film, claim_frames, "bytes cannot hold the frames"),
        ("lerobot", lerobot_table, share_images, "claims to hold"),
        ("libero", hdf5_file, claim_actions, "claims to hold"),
        ("libero", hdf5_file, lead_elsewhere, "actions is a link, and may lie in another file"),
    ],
)
def test_a_file_that_claims_more_than_it_holds_takes_no_memory(
    tmp_path: Path, form: Source, make: Callable[[Path], Path], harm: Callable[[Path], None], message: str
) -> None:
    harm(file := make(tmp_path))

    def refuse() -> None:
        with pytest.raises(UsageError, match=message):
            take(tmp_path / "set" if form == "lerobot" else file, form, tmp_path / "d")

    assert peak_of(refuse) < 96 << 20


def test_other_versions_and_wrong_folders_are_refused(tmp_path: Path) -> None:
    write_lerobot(tmp_path / "set", "v2.1", [trajectory(9)], "image")
    info = tmp_path / "set/meta/info.json"
    info.write_text(info.read_text().replace("v2.1", "v1.6"))
    with pytest.raises(UsageError, match=r"version v1.6, and 2.x and 3.x are read"):
        take(tmp_path / "set", "lerobot", tmp_path / "d")
    info.write_text(info.read_text().replace("v1.6", "v2.1").replace("data/chunk", "../elsewhere/chunk"))
    with pytest.raises(UsageError, match="lies elsewhere"):
        take(tmp_path / "set", "lerobot", tmp_path / "d")
    (tmp_path / "empty").mkdir()
    for form in ("libero", "lerobot", "rlds"):
        with pytest.raises(UsageError, match="empty"):
            take(tmp_path / "empty", form, tmp_path / "d")


def test_the_command_reports_its_work_and_options_without_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def log(*words: str) -> tuple[int, str]:
        code = main(["data", "import", *words, "--out", str(tmp_path / "d")])
        out, err = capsys.readouterr()
        return code, " ".join((out + err).replace("│", " ").split())

    file = hdf5_file(tmp_path)
    words = (str(file), "--task", "push_block", "--form", "libero")
    code, text = log(*words)
    assert code == 2 and "images of 2 cameras, push_block has above" in text
    code, text = log(*words, "--cut.cameras", "agentview_rgb")
    assert code == 2 and "0 episodes added" in text and "left out 1: proprioception of 8 numbers, not 2" in text
    card = (tmp_path / "d" / "README.md").read_text()
    assert "| turned | True |" in card and "| gripper | minus_one_opens |" in card
    assert "no effect on trajectories" in log(*words, "--player", "me")[1]
    assert "is not an env in chunks" in log(str(file), "--task", "number_line", "--form", "libero")[1]
    assert "no effect on chats" in log(str(file), "--task", "number_line", "--cut.stride", "2")[1]
    assert open_folder(tmp_path / "d").kind == "chunks"


def test_images_without_states_and_actions_are_not_learned_from(tmp_path: Path) -> None:
    red = np.full((PX, PX, 3), (200, 30, 30), np.uint8)
    root = write_images(tmp_path / "red", {"front": {}}, {"front": red}, numbers=False)
    with pytest.raises(UsageError, match="has no actions and no states"):
        take(root, "lerobot", tmp_path / "out", success="assumed")


def test_an_hdf5_file_without_states_and_actions_is_judged_upright(tmp_path: Path) -> None:
    file = tmp_path / "x_demo.HDF5"  # cameras and Windows write endings in capitals
    write_libero(file, GREEN, [trajectory(5)], is_own=True)
    with h5py.File(file, "r+") as target:
        for name in ("actions", "obs/ee_states", "obs/gripper_states"):
            del target[f"data/demo_0/{name}"]
        (stored,) = target["data/demo_0/obs/agentview_rgb"][:1]
    (episode,) = read(tmp_path)
    assert len(episode.actions) == 5 and episode.digest and episode.instruction == GREEN
    assert stored.any() and np.array_equal(episode.images(np.arange(1))[0, 0], stored[::-1, ::-1])
