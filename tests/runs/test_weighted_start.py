"""A run whose supervised start is weighted by a judge's labels of recorded episodes."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_run import run_here

from rlvlm.demonstrations.recorded_labels import write_labels
from rlvlm.demonstrations.recordings import Recordings, recordings_digest
from rlvlm.demonstrations.trajectory import RobotTrajectory

SMALL = {
    "push_block": "--steps 2000 --sft.updates 5 --algo.groups 2 --algo.group-size 2 --algo.rounds 1 "
    "--policy.pocket.hidden 32 --policy.pocket.image-px 16",
    "number_line": "--steps 64 --sft.updates 3 --algo.num-envs 4 --algo.rollout-turns 32",
}


def label(data: Path, file: Path) -> None:
    """Progress that rises with the frames, and every other episode a success."""
    recordings = Recordings(path=data, form="folder", make_draw=lambda folder: lambda snapshots, camera: snapshots)
    films = [film for film in recordings if isinstance(film, RobotTrajectory)]
    frames = [
        {"episode": number, "frame": frame, "progress": min(1.0, (frame + number) / 60), "status": "ok"}
        for number, film in enumerate(films)
        for frame in range(len(film.actions))
    ]
    whole = [{"episode": number, "success": 1.0 - number % 2, "status": "ok"} for number in range(len(films))]
    write_labels(file, recordings_digest(recordings), frames + whole)


@pytest.fixture(scope="module", params=SMALL)
def labelled(request, tmp_path_factory):
    """A task, and a folder with demonstrations of it and their labels."""
    folder = tmp_path_factory.mktemp("labelled")
    run_here("collect", request.param, "--episodes", "6", "--out", str(folder / "data"))
    label(folder / "data", folder / "labels.parquet")
    return request.param, folder


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_learns_from_labelled_episodes(local_ray, labelled, tmp_path):
    task, folder = labelled
    weighting = {"push_block": "preference", "number_line": "condition"}[task]  # each with each: test_sft_job.py
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    data, labels, out = tmp_path / "data", tmp_path / "labels.parquet", tmp_path / "run"
    own = ["--sft.demonstrations", str(data), "--sft.labels", str(labels), "--sft.weighting", weighting]
    own += ["--policy.conditioned"] if weighting == "condition" else []
    often = "--eval.every-steps 1000 --eval.episodes 2 --track.log-every-steps 1".split()
    run_here("run", task, *own, *SMALL[task].split(), *often, "--out", str(out))
    logged = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert 0 < max(row.get("sft/effective_share", 0) for row in logged) <= 1
    if weighting == "condition":  # a start that is over needs none of its files
        shutil.rmtree(data)
        labels.unlink()
        config = (out / "config.yaml").read_text()
        steps = next(int(line.split()[1]) for line in config.splitlines() if line.startswith("steps:"))
        run_here("resume", str(out), "--steps", str(steps + 1))
