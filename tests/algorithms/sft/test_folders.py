from pathlib import Path

import pytest
import torch

from rlvlm.algorithms.seats import Seat
from rlvlm.algorithms.sft.folders import BODY_FILE, HEADS_FILE, load_demonstrations, load_trained, save_trained
from rlvlm.cli import main
from rlvlm.envs.registry import make_world, task_env
from rlvlm.errors import UsageError
from rlvlm.policies.vlm.config import PolicyConfig
from tests.tiny_policy import tiny_policy


def test_what_was_trained_goes_into_two_files_and_back(tmp_path: Path):
    taught, fresh = (tiny_policy(tmp_path / name) for name in "ab")
    with torch.no_grad():
        for parameter in taught.parameters():
            parameter.add_(0.1)
    save_trained(taught, tmp_path)
    load_trained(fresh, tmp_path)
    for name, value in taught.trained_state().items():
        assert torch.equal(value, fresh.trained_state()[name]), name
    assert (tmp_path / BODY_FILE).stat().st_size > (tmp_path / HEADS_FILE).stat().st_size


def test_weights_of_another_policy_are_refused(tmp_path: Path):
    save_trained(tiny_policy(tmp_path / "a"), tmp_path)
    other = tiny_policy(tmp_path / "b", config=PolicyConfig(learns="lora", lora_rank=4))
    with pytest.raises(UsageError, match="holds no weights for this policy"):
        load_trained(other, tmp_path)
    with pytest.raises(UsageError, match="holds no weights for this policy"):
        load_trained(other, tmp_path / "nowhere")


def test_a_collection_comes_back_as_it_was_played(tmp_path: Path):
    assert main(["collect", "number_line", "--episodes", "3", "--out", str(tmp_path / "d")]) == 0
    episodes = load_demonstrations(tmp_path / "d")
    assert len(episodes) == 3
    seat = Seat(make_world("number_line", task_env("number_line"), 0), "number_line")
    seat.begin(episodes[0].seed)
    for reply in episodes[0].replies:
        assert seat.world.expert_action() == reply.action
        seat.play(reply.text)
