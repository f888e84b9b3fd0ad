"""What becomes of a judge's config and placement."""

import pytest

from rlvlm.core.errors import JudgeUnavailable, UsageError
from rlvlm.judges.config import JudgeConfig
from rlvlm.runs.settings.recipes import recipe
from rlvlm.runs.settings.tree import override
from rlvlm.serving.config import PlacementConfig, check_environment
from rlvlm.serving.deployments import bind_judge
from rlvlm.vlms.config import EngineConfig


def test_the_dashboard_names_each_judge():
    def name(judge: JudgeConfig) -> str:
        return bind_judge(judge, PlacementConfig())._bound_deployment.name

    assert name(JudgeConfig()) == "judge-pocket-direct"
    big = JudgeConfig(backend="transformers", model="Qwen/Qwen3-VL-8B-Instruct", quantization="nf4", prompt="two_stage")
    assert name(big) == "judge-Qwen3-VL-8B-Instruct-nf4-two_stage"


def test_the_placement_becomes_the_deployments_options():
    fixed = bind_judge(JudgeConfig(), PlacementConfig(num_replicas=2, num_gpus=0.5))._bound_deployment
    assert fixed.num_replicas == 2 and fixed._deployment_config.autoscaling_config is None
    assert (fixed.ray_actor_options or {})["num_gpus"] == 0.5
    assert fixed._deployment_config.health_check_timeout_s == 2.5
    patient = bind_judge(JudgeConfig(), PlacementConfig(stall_s=60.0))._bound_deployment
    assert patient._deployment_config.health_check_timeout_s == 20.0
    growing = PlacementConfig(num_replicas=1, max_replicas=4, target_ongoing_requests=3, upscale_delay_s=5)
    options = bind_judge(JudgeConfig(), growing)._bound_deployment._deployment_config.autoscaling_config
    assert options is not None
    assert (options.min_replicas, options.max_replicas, options.target_ongoing_requests) == (1, 4, 3)


def vllm(**engine) -> JudgeConfig:
    return JudgeConfig(backend="vllm", model="a/b", engine=EngineConfig(**engine))


def test_only_a_judge_that_needs_it_gets_a_python_of_its_own(tmp_path, monkeypatch):
    def environment(judge: JudgeConfig) -> dict:
        return bind_judge(judge, PlacementConfig())._bound_deployment.ray_actor_options.get("runtime_env") or {}

    monkeypatch.chdir(tmp_path)
    assert environment(JudgeConfig()) == {}
    assert environment(JudgeConfig(engine=EngineConfig(python="/opt/python"))) == {}
    assert environment(vllm()) == {"py_executable": str(tmp_path / ".envs/vllm/bin/python")}
    assert environment(vllm(python="/opt/python")) == {"py_executable": "/opt/python"}


def test_a_missing_environment_is_named_with_the_command_that_builds_it(tmp_path):
    check_environment(JudgeConfig(), PlacementConfig())
    with pytest.raises(JudgeUnavailable, match="vllm needs an environment of its own; /no/python is missing") as caught:
        check_environment(vllm(python="/no/python"), PlacementConfig())
    assert "make vllm" in caught.value.fix
    with pytest.raises(UsageError, match="not behind Ray Serve"):
        check_environment(JudgeConfig(backend="human"), PlacementConfig())
    python = tmp_path / "python"
    python.touch()
    check_environment(vllm(python=str(python)), PlacementConfig())


def test_a_model_is_not_spread_over_more_gpus_than_it_gets(tmp_path):
    judge = JudgeConfig(engine=EngineConfig(tensor_parallel=2))
    with pytest.raises(UsageError, match="needs 2 GPUs a replica, got 1"):
        check_environment(judge, PlacementConfig(num_gpus=1))
    check_environment(judge, PlacementConfig(num_gpus=2))


def test_the_plan_books_no_gpu_for_engines_on_the_learners_gpus():
    two = {"engine.num_replicas": 2, "algo.num_learners": 2, "algo.gpus_per_learner": 1.0, "engine.colocated": True}
    with pytest.raises(UsageError, match="algo.staleness 1 has no effect with engine.colocated"):
        override(recipe("number_line"), two | {"algo.staleness": 1})
    with pytest.raises(UsageError, match="at most one replica for each learner"):
        override(recipe("number_line"), two | {"engine.num_replicas": 3})
    roles = override(recipe("number_line"), two).roles
    (engines,) = [role for role in roles if role.name.startswith("the policy's replicas")]
    assert "on the learners' GPUs" in engines.name and engines.gpus == 0
    assert sum(role.count * role.gpus for role in roles) == 2
