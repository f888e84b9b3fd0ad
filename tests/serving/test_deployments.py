"""The Serve YAML files and what becomes of their arguments."""

import pytest
from pydantic import ValidationError

from rlvlm.judges.config import JudgeConfig
from rlvlm.serving.app_args import JudgeAppArgs
from rlvlm.serving.config import PlacementConfig
from rlvlm.serving.deployments import bind_judge


def test_the_dashboard_names_a_judge_by_what_it_is() -> None:
    def name(judge: JudgeConfig) -> str:
        return bind_judge(judge, PlacementConfig())._bound_deployment.name

    assert name(JudgeConfig()) == "judge-pocket-direct"
    big = JudgeConfig(backend="transformers", model="Qwen/Qwen3-VL-8B-Instruct", quantization="nf4", prompt="two_stage")
    assert name(big) == "judge-Qwen3-VL-8B-Instruct-nf4-two_stage"


def test_the_placement_becomes_the_deployments_options() -> None:
    fixed = bind_judge(JudgeConfig(), PlacementConfig(num_replicas=2, num_gpus=0.5))._bound_deployment
    assert fixed.num_replicas == 2 and fixed._deployment_config.autoscaling_config is None
    assert (fixed.ray_actor_options or {})["num_gpus"] == 0.5
    growing = PlacementConfig(num_replicas=1, max_replicas=4, target_ongoing_requests=3, upscale_delay_s=5)
    options = bind_judge(JudgeConfig(), growing)._bound_deployment._deployment_config.autoscaling_config
    assert options is not None
    assert (options.min_replicas, options.max_replicas, options.target_ongoing_requests) == (1, 4, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_replicas": 1, "num_replicas": 2},
        {"target_ongoing_requests": 0},
        {"upscale_delay_s": -1},
        {"stall_s": 0.1},
    ],
)
def test_a_wrong_placement_is_refused_by_name(wrong) -> None:
    with pytest.raises(ValueError, match=rf"serve\..*{list(wrong)[0].partition('_delay')[0].replace('upscale', '')}"):
        PlacementConfig(**wrong)


@pytest.mark.parametrize(
    "args",
    [
        {"judge": {"modle": "x"}},
        {"placement": {"gpus": 1}},
        {"juge": {}},
        {"judge": {"prompt": "poem"}},
        {"judge": {"batch_size": 0}},
        {"placement": {"num_gpus": 1.5}},
    ],
)
def test_a_wrong_argument_in_the_yaml_is_an_error(args):
    with pytest.raises(ValidationError):
        JudgeAppArgs.model_validate(args)
