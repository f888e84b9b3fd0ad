"""A run that names an OpenVLA-OFT checkpoint: what is refused before Ray starts, what it will take, and sharding."""

import json
from contextlib import nullcontext
from typing import Any

import pytest

from rlvlm.algorithms.policy_gradient.learner import TokenLearner
from rlvlm.core.errors import MachineError, UsageError
from rlvlm.plugins.openvla.config import OpenVLAConfig
from rlvlm.policies.vla.config import VLAConfig
from rlvlm.runs.settings.arguments import parse_run
from rlvlm.runs.start import preflight
from rlvlm.runs.start.preflight import check_before_run
from tests.algorithms.policy_gradient.test_memory_plan import assert_planned
from tests.algorithms.policy_gradient.test_sharding import assert_step_of_one, chunks
from tests.plugins.openvla.test_openvla import load
from tests.plugins.openvla.tiny_openvla import SMALL, write_openvla


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "words", "what", "fix"),
    [
        ({}, "", "", ""),
        (
            {"config.json": {**SMALL, "model_type": "llama"}},
            "",
            "its model_type is 'llama', not 'openvla'",
            "OpenVLA-OFT",
        ),
        ({"action_head--5_checkpoint.pt": 0}, "", "actions come from a regression head", "actions are tokens"),
        ({"model.safetensors.index.json": {"weight_map": {"a": "a.bin"}}}, "", "names 'a.bin'", "download the model"),
        ({"tokenizer.json": {}}, "", "tokenizer.json cannot be read", "download the checkpoint again"),
        ({"dataset_statistics.json": {}}, "", "scales actions for no data set", "download the checkpoint again"),
        ({}, "--policy.openvla.unnorm-key libero_goal", "none is 'libero_goal'", "--policy.openvla.unnorm-key NAME"),
        (
            {"dataset_statistics.json": {"libero_10": {"action": {"q01": [0.0] * 14, "q99": [1.0] * 14}}}},
            *("", "actions have 14 dimensions, the env's 7", "trained on this env"),
        ),
        ({}, "--policy.openvla.cameras 2", "is to see 2 cameras, the env has 1", "lower --policy.openvla.cameras"),
        ({}, "--policy.openvla.adapter /no/adapter", "policy.openvla.adapter /no/adapter is not a folder", "leave out"),
    ],
)
def test_a_checkpoint_of_openvla_that_does_not_go_with_the_run_is_refused_before_ray_starts(
    made, words, what, fix, tmp_path
):
    folder = write_openvla(tmp_path / "checkpoint")
    for name, content in made.items():
        (folder / name).write_text(json.dumps(content))
    named = parse_run(["push_block", "--policy.model", str(folder), *words.split()], "run").config
    with pytest.raises(UsageError, match=what) if what else nullcontext() as caught:
        check_before_run(named)
    assert caught is None or fix in caught.value.fix


def test_a_gpu_that_is_not_there_is_missed_before_ray_starts(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(preflight, "gpu_names", list)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    words = "libero_goal/8 --policy.model a/b --policy.openvla.device cuda"
    with pytest.raises(MachineError, match="wants cuda") as caught:
        check_before_run(parse_run(words.split(), "run").config)
    assert "gpus-per-learner" in caught.value.fix


@pytest.mark.parametrize("learns", ["all", "lora"])
def test_planned_weights_are_those_in_memory(tmp_path, learns):
    write_openvla(tmp_path)
    network = load(tmp_path, learns=learns, lora_rank=2).network
    assert_planned(network, VLAConfig(model="x/y", openvla=OpenVLAConfig(learns=learns, lora_rank=2)), tmp_path)


def vla(folder: str, learns: Any, algo: dict[str, Any]) -> tuple[TokenLearner, list[Any]]:
    """A learner of the tiny OpenVLA-OFT in `folder`, and two groups by the same policy."""
    return chunks(VLAConfig(model=folder, openvla=OpenVLAConfig(image_px=40, lora_rank=2, learns=learns)), algo)


@pytest.mark.slow
@pytest.mark.parametrize("learns", ["all", "lora"])
def test_shared_out_learners_take_the_step_of_one(tmp_path, learns):
    write_openvla(tmp_path)
    assert_step_of_one(vla, str(tmp_path), learns)
