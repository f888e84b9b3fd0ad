"""Episodes in chunks: played, kept, and believed only where they are whole."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from rlvlm.core.errors import UsageError
from rlvlm.demonstrations.card import write_card
from rlvlm.demonstrations.chunk_form import folder_form, form_of, is_whole, kept_images
from rlvlm.demonstrations.collect import Disturbance, collect, play_episodes
from rlvlm.demonstrations.folder import DemonstrationFolder, create_folder, open_folder
from rlvlm.envs.config import ChunkEnvConfig
from rlvlm.envs.env import FIRST_HELD_OUT_STATE
from rlvlm.envs.push_block import PushBlock
from rlvlm.labels.images import image_digest


def make(episode_steps: int = 32) -> PushBlock:
    return PushBlock(ChunkEnvConfig(episode_steps=episode_steps), seed=0)


def folder_at(path: Path) -> DemonstrationFolder:
    return create_folder(path, "push_block", "chunks", chunks=asdict(form_of(make())))


def contents(folder: DemonstrationFolder) -> dict[str, tuple[int, bytes]]:
    return {record.id: (record.seed, record.arrays["actions"].tobytes()) for record in folder.episodes()}


def test_recorded_chunks_replay_to_the_recorded_states(tmp_path: Path) -> None:
    one, folder = make(), folder_at(tmp_path / "d")
    assert collect(one, Disturbance(noise=0.05), folder, 3, seed=2) == 3
    for record in open_folder(tmp_path / "d").episodes():
        assert record.success and record.terminated and record.env_return == 1 and is_whole(record, form_of(one))
        assert record.seed < FIRST_HELD_OUT_STATE
        obs, info = one.reset(options={"state_id": record.seed})
        assert record.goal == obs.texts[0]
        for chunk, before, proprio, steps in zip(
            *(record.arrays[name] for name in ("actions", "snapshots", "proprio", "steps")), strict=False
        ):
            assert np.array_equal(obs.snapshots[0], before) and np.array_equal(obs.proprio[0], proprio)
            obs, _, terminated, _, info = one.step(chunk)
            assert info["steps"] == steps
        assert terminated and np.array_equal(obs.snapshots[0], record.arrays["snapshots"][-1])


def test_a_stopped_collection_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole, parts = folder_at(tmp_path / "whole"), folder_at(tmp_path / "parts")
    collect(make(), Disturbance(noise=0.05), whole, 5, seed=0)
    collect(make(), Disturbance(noise=0.05), parts, 2, seed=0)
    with open(tmp_path / "parts" / "episodes.jsonl", "ab") as file:
        file.write(b'{"id": "script-noi')  # half a line, as a crash leaves it
    assert collect(make(), Disturbance(noise=0.05), open_folder(tmp_path / "parts"), 5, seed=0) == 3
    assert contents(parts) == contents(whole) and list(contents(parts)) == list(contents(whole))
    assert collect(make(), Disturbance(noise=0.05), parts, 5, seed=0) == 0
    assert collect(make(), Disturbance(noise=0.05), parts, 1, seed=1) == 1, "another seed adds its own"


def test_a_perturbed_script_demonstrates_recoveries() -> None:
    one = make(64)
    records = list(play_episodes(one, Disturbance(p_perturb=0.4), "push_block", wanted=6, seed=0))
    assert {record.player for record in records} == {"script-perturb-0.4"}
    assert sum(record.arrays["perturbed"].sum() for record in records) > 3
    for record in records:
        one.reset(options={"state_id": record.seed})
        actions, perturbed = record.arrays["actions"], record.arrays["perturbed"]
        assert len(perturbed) == len(actions) and not perturbed[0]
        for index, (chunk, is_stray) in enumerate(zip(actions, perturbed, strict=True)):
            wanted = one.scripted_chunk(0.0, np.random.default_rng(0))
            earlier = any(np.array_equal(chunk, before) for before in actions[:index])
            assert earlier if is_stray else np.array_equal(chunk, wanted)
            one.step(chunk)
    calm = next(iter(play_episodes(one, Disturbance(), "push_block", wanted=1, seed=0)))
    assert "perturbed" not in calm.arrays and calm.player == "script"


def test_failures_are_kept_beside_the_successes_that_are_wanted(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    num = collect(make(14), Disturbance(noise=0.3), folder, 6, seed=0)  # some pushes take longer than 14 steps
    records = list(folder.episodes())
    assert len(records) == num > 6 and sum(record.success for record in records) == 6
    counts = write_card(folder)
    assert counts.rejected == {"episode without success": num - 6}
    assert counts.steps == sum(len(record.arrays["actions"]) * 8 - 2 for record in records if not record.success) + sum(
        int(record.arrays["steps"].sum()) for record in records if record.success
    )
    assert "| push the" in (tmp_path / "README.md").read_text()


def test_a_folder_has_one_form(tmp_path: Path) -> None:
    other = asdict(replace(form_of(make()), chunk_steps=4))
    create_folder(tmp_path / "d", "push_block", "chunks", chunks=other)
    folder = folder_at(tmp_path / "d")  # nothing came of the first
    collect(make(), Disturbance(), folder, 1, seed=0)
    with pytest.raises(UsageError, match="chunk_steps 8, not 4"):
        create_folder(tmp_path / "d", "push_block", "chunks", chunks=other)
    assert folder_form(open_folder(tmp_path / "d")) == form_of(make())
    turns = create_folder(tmp_path / "t", "number_line", "turns", ("+", "-"))
    with pytest.raises(UsageError, match="holds turns of number_line, and no chunks"):
        folder_form(turns)


def test_arrays_of_other_shapes_and_strange_numbers_are_not_whole(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    collect(make(), Disturbance(noise=0.0), folder, 1, seed=0)
    (record,) = folder.episodes()
    form = form_of(make())
    arrays = dict(record.arrays)
    assert is_whole(record, form)
    for name, broken in {
        "actions": arrays["actions"][:, :4],
        "proprio": arrays["proprio"][:-1],
        "snapshots": arrays["snapshots"] * np.nan,
        "perturbed": np.zeros(len(arrays["actions"]), np.int64),  # not of truth values
    }.items():
        assert not is_whole(replace(record, arrays=arrays | {name: broken}), form), name
    del arrays["proprio"]
    assert not is_whole(replace(record, arrays=arrays), form)


def test_kept_images_come_back_or_are_missed_by_name(tmp_path: Path) -> None:
    one = make()
    form = form_of(one, image_px=24)
    folder = create_folder(tmp_path, "push_block", "chunks", chunks=asdict(form))
    (played,) = play_episodes(one, Disturbance(), "push_block", wanted=1, seed=0)
    images = one.draw(played.arrays["snapshots"][:-1], 24)
    arrays = {name: played.arrays[name] for name in ("actions", "proprio", "steps")}
    arrays["pictures"] = np.array([[image_digest(image)] for image in images])
    folder.add(replace(played, arrays=arrays), images)
    (back,) = folder.episodes()
    assert is_whole(back, form) and np.array_equal(kept_images(folder, back)[:, 0], images)
    assert len(write_card(folder).images) == len(images)
    folder.image_store.file(image_digest(images[0])).unlink()
    with pytest.raises(UsageError, match=f"the images of {played.id} cannot be used"):
        kept_images(folder, back)
