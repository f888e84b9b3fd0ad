import pytest

from rlvlm.core.errors import JudgeUnavailable, UsageError
from rlvlm.judges.config import JudgeConfig
from rlvlm.serving.config import PlacementConfig
from rlvlm.serving.deployments import bind_judge, check_environment
from rlvlm.vlms.config import EngineConfig


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
    python = tmp_path / "python"
    python.touch()
    check_environment(vllm(python=str(python)), PlacementConfig())


def test_a_model_is_not_spread_over_more_gpus_than_it_gets(tmp_path):
    judge = JudgeConfig(engine=EngineConfig(tensor_parallel=2))
    with pytest.raises(UsageError, match="needs 2 GPUs a replica, got 1"):
        check_environment(judge, PlacementConfig(num_gpus=1))
    check_environment(judge, PlacementConfig(num_gpus=2))
