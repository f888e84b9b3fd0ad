from dataclasses import replace
from typing import Any

import pytest
import torch

from rlvlm.algorithms.policy_gradient.algorithm import TokenConfig
from rlvlm.envs.registry import make_env, task_env
from rlvlm.runs import build
from rlvlm.runs.recipes import recipe


def test_the_seed_of_a_run_reaches_what_is_drawn_of_its_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    class EnoughSeen(Exception):
        pass

    drawn: list[torch.Tensor] = []

    def look(settings: TokenConfig) -> Any:
        assert settings.make_policy is not None
        drawn.append(
            settings.make_policy(make_env("number_line", task_env("number_line"), 0)).value_head.state_dict()[
                "0.weight"
            ]
        )
        raise EnoughSeen

    monkeypatch.setattr(build, "built", look)
    for seed in (0, 1, 1):
        config = replace(recipe("number_line"), seed=seed)
        with pytest.raises(EnoughSeen), build.open_algorithm(config, None):
            pass
    assert torch.equal(drawn[1], drawn[2]) and not torch.equal(drawn[0], drawn[1])
