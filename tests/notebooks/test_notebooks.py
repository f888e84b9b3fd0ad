"""The notebooks, executed as a reader would, but on small runs: the cell tagged `parameters` is overridden."""

import os
from pathlib import Path

import nbformat
import pytest
from jupyter_core.utils import run_sync
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
TINY = [
    "--steps",
    "600",
    "--env.episode-steps",
    "20",
    "--algo.seed-steps",
    "100",
    "--feedback.first-step",
    "200",
    "--feedback.every-steps",
    "200",
    "--feedback.queries",
    "20",
    "--reward-model.min-updates",
    "5",
    "--reward-model.max-updates",
    "5",
    "--algo.critic-reset-updates",
    "5",
    "--eval.every-steps",
    "300",
    "--eval.episodes",
    "1",
]
TINY_SETTINGS = {
    name.removeprefix("--").replace("-", "_"): int(value) for name, value in zip(TINY[::2], TINY[1::2], strict=True)
} | {"judge.untrained": "ok", "reward.model": "image"}
SWEEP = """
title: True reward and a coin
tasks: [rlvlm.testing:TINY]
seeds: [0]
budget: {steps: 400}
settings: {env.episode_steps: 20, algo.seed_steps: 100, eval.every_steps: 200, eval.episodes: 1,
           feedback.first_step: 200, feedback.every_steps: 200, feedback.queries: 20, algo.critic_reset_updates: 5,
           reward_model.min_updates: 5, reward_model.max_updates: 5}
sources:
  environment: {title: true reward, settings: {reward.source: environment}}
  random: {title: a coin, settings: {reward.teacher: random}}
"""
SMALL = {
    "first_run": {"TASK": "rlvlm.testing:TINY", "SMOKE": False, "SETTINGS": TINY_SETTINGS},
    "judge_pairs": {"NUM_PAIRS": 2},
    "write_a_task": {"FILE": str(ROOT / "examples" / "slide_ball.py"), "ARGS": TINY},
    "compare_sources": {"SWEEP": SWEEP, "ARGS": []},
    "train_a_policy": {"SETTINGS": {"steps": 128, "sft.turns": 32, "sft.updates": 4, "eval.episodes": 4}},
    "train_a_vla": {
        "SETTINGS": {
            "steps": 1_000,
            "sft.episodes": 8,
            "sft.updates": 10,
            "algo.groups": 4,
            "algo.group_size": 4,
            "eval.episodes": 4,
        }
    },
}


def test_every_notebook_is_executed_here():
    assert sorted(SMALL) == sorted(file.stem for file in NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("name", sorted(SMALL))
def test_outputs_are_stripped(name):
    for cell in nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells:
        assert cell.cell_type != "code" or (not cell.outputs and cell.execution_count is None)


@pytest.fixture(scope="module")
def kernel(ray_address):
    """One kernel for all notebooks, on the tests' own Ray: to start one, and to import torch there, takes seconds."""
    manager = NotebookClient(nbformat.v4.new_notebook()).create_kernel_manager()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", ray_address)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        run_sync(manager.start_kernel)()
    yield manager
    run_sync(manager.shutdown_kernel)(now=True)


@pytest.mark.ray
@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_notebook_runs_from_its_first_cell_to_its_last(name, kernel, tmp_path):
    book = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    (place,) = [number for number, cell in enumerate(book.cells) if "parameters" in cell.metadata.get("tags", [])]
    chosen = "\n".join(f"{key} = {value!r}" for key, value in SMALL[name].items())
    book.cells.insert(place + 1, nbformat.v4.new_code_cell(chosen))
    book.cells.insert(0, nbformat.v4.new_code_cell(f"%reset -f\n%cd -q {tmp_path}"))  # nothing of the one before
    NotebookClient(book, km=kernel, timeout=1_200).execute()
    shown = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in shown), "a reader sees images"
