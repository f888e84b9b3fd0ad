"""Training end to end at a small scale: both phases run, the weights load as a policy, and a seed repeats itself."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rlvlm.pocket.policy.config import TrainConfig
from rlvlm.pocket.policy.dataset import TAUGHT_TASKS
from rlvlm.pocket.policy.train import Trainer
from rlvlm.policies.vlm.config import PolicyConfig
from rlvlm.policies.vlm.loading import load_policy

TINY: dict[str, Any] = {"moments": 60, "held_out": 20, "seeing_steps": 3, "talking_steps": 3, "batch": 6}


@pytest.mark.slow
def test_eyes_and_language_learn_and_the_weights_load(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    trainers = [Trainer(TrainConfig(out=folder, **TINY), TAUGHT_TASKS[:1]) for folder in folders]
    for trainer in trainers:
        trainer.train()
    first, second = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(first[name].equal(second[name]) for name in first), "the same seed gives the same weights"
    assert load_policy(PolicyConfig(model=str(folders[0]), learns="all", device="cpu")).stop_id > 0
    begun = Trainer(TrainConfig(out=tmp_path / "on", start=folders[0], **{**TINY, "seeing_steps": 0}), TAUGHT_TASKS[:1])
    begun.train()
    after = load_file(tmp_path / "on" / "model.safetensors")
    changed = {name for name in first if not first[name].equal(after[name])}
    assert changed and not any("visual" in name for name in changed), "a fixed vision encoder stays as it was"


def test_eyes_must_come_from_somewhere() -> None:
    with pytest.raises(ValueError, match="--start"):
        TrainConfig(seeing_steps=0)
