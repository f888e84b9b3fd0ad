"""Labels of a data set are those of the demonstrations imported from it: a judge is asked once."""

from pathlib import Path

import numpy as np
import pytest

from rlvlm.core.errors import UsageError
from rlvlm.demonstrations.recorded_labels import write_labels
from rlvlm.demonstrations.recordings import Recordings, recordings_digest
from rlvlm.demonstrations.weighting import folder_weights
from rlvlm.envs.push_block import CHUNK_STEPS
from tests.plugins.exchange.test_trajectories import take
from tests.recorded_data import trajectory, write_lerobot, write_libero

STAMP = {"judge": "j", "revision": "", "prompt": "p", "decoding": "", "status": "ok", "goal": "", "name": ""}


def label(source: Path, form: str, file: Path) -> None:
    """Episode 0 rises from 0 at frame 0 to 1 at frame 10, of 20; episode 1 falls."""
    rows = [
        {**STAMP, "episode": episode, "frame": frame, "progress": value, "success": None}
        for episode, values in enumerate(([0.0, 1.0, 1.0], [1.0, 0.5, 0.0]))
        for frame, value in zip((0, 10, 19), values, strict=True)
    ]
    rows += [{**STAMP, "episode": number, "frame": None, "progress": None, "success": 0.9 - number} for number in (0,)]
    write_labels(file, recordings_digest(Recordings(path=source, form=form)), rows)


@pytest.mark.parametrize("form", ["lerobot", "libero"])
def test_labels_follow_episodes_and_frames_through_the_import(form, tmp_path):
    recorded = [trajectory(20, seed=number) for number in range(2)]
    if form == "lerobot":
        write_lerobot(source := tmp_path / "set", "v3.0", recorded, "image", lost=[1])
    else:
        instruction = "push_the_green_block_onto_the_pad"
        write_libero(source := tmp_path / f"{instruction}_demo.hdf5", instruction, recorded, is_own=False)
    label(source, form, tmp_path / "labels.parquet")
    folder, _ = take(source, form, tmp_path / "shown", stride=CHUNK_STEPS, unlike=True)  # pyright: ignore[reportArgumentType]
    lengths = [len(record.arrays["actions"]) for record in folder.episodes()]
    weights = folder_weights(folder.path, str(tmp_path / "labels.parquet"), lengths, "progress", 0.5, 1)
    gains, falls = weights.values[: lengths[0]], weights.values[lengths[0] :]
    # chunks begin at 0, 8 and 16: progress 0, .8, 1 and then 1, .6, .17
    assert (gains > 0).all() and (falls == 0).all()
    filtered = folder_weights(folder.path, str(tmp_path / "labels.parquet"), lengths, "filter", 0.5, 1)
    assert (filtered.values[: lengths[0]] > 0).all() and (filtered.values[lengths[0] :] == 0).all()
    for file in (folder.path / "arrays").glob("*.npz"):  # imported from other data
        np.savez(file, **{**dict(np.load(file)), "source_digest": np.array("0" * 64)})
    with pytest.raises(UsageError, match="has labels of other data"):
        folder_weights(folder.path, str(tmp_path / "labels.parquet"), lengths, "filter", 0.5, 1)
