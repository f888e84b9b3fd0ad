"""GPUs that engines and learners share: by which names, and what is refused.

How they take turns is tested with the served engine.
"""

import pytest
import torch

from rlvlm.core.errors import UsageError
from rlvlm.runs.recipes import recipe
from rlvlm.runs.settings import override
from rlvlm.serving.config import ServedEngineConfig
from rlvlm.vlms.devices import gpu_id, torch_device


def test_cards_have_the_names_that_this_process_sees_them_by(monkeypatch: pytest.MonkeyPatch) -> None:
    # by hand: of the gpus 4, 2 and 7 torch calls 2 the second
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,2,7")
    assert gpu_id(torch.device("cuda", 1)) == "2" and torch_device("2") == "cuda:1"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpu_id(torch.device("cuda")) == "0" and torch_device("3") == "cuda:3"
    assert gpu_id(torch.device("cpu")) == "" and torch_device("") == "cpu"


def test_what_cannot_be_shared_is_refused_and_the_plan_books_no_card_for_it() -> None:
    with pytest.raises(ValueError, match="engine.num_gpus must be 0 with engine.colocated"):
        ServedEngineConfig(num_replicas=1, num_gpus=0.5, colocated=True)
    with pytest.raises(ValueError, match="no effect without engine.num_replicas"):
        ServedEngineConfig(colocated=True)
    two = {"engine.num_replicas": 2, "algo.num_learners": 2, "algo.gpus_per_learner": 1.0, "engine.colocated": True}
    with pytest.raises(UsageError, match="algo.staleness 1 has no effect with engine.colocated"):
        override(recipe("number_line"), two | {"algo.staleness": 1})
    with pytest.raises(UsageError, match="at most one replica for each learner"):
        override(recipe("number_line"), two | {"engine.num_replicas": 3})
    roles = override(recipe("number_line"), two).roles
    (engines,) = [role for role in roles if role.name.startswith("the policy's replicas")]
    assert "on the learners' GPUs" in engines.name and engines.gpus == 0
    assert sum(role.count * role.gpus for role in roles) == 2
