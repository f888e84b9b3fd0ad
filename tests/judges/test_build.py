import pytest

from rlvlm.core.errors import JudgeUnavailable
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig


def test_the_pocket_backend_takes_any_folder_and_names_a_missing_one(tiny_vlms):
    judge = build_judge(JudgeConfig(model=str(tiny_vlms["qwen3_vl"])))
    assert judge.stamp.judge.startswith("pocket:")
    with pytest.raises(JudgeUnavailable, match="pocket judge's weights"):
        build_judge(JudgeConfig(model="/no/such/folder"))


def test_a_model_that_is_missing_is_a_judge_that_is_missing():
    with pytest.raises(JudgeUnavailable, match="no judge at /no/such/folder") as caught:
        build_judge(JudgeConfig(backend="transformers", model="/no/such/folder"))
    assert "--judge.model" in caught.value.fix


@pytest.mark.parametrize("temperature", [1e-300, 0.009, 3.0, -1.0, float("nan")])
def test_a_temperature_is_zero_or_one_that_models_can_sample_with(temperature) -> None:
    with pytest.raises(ValueError, match=r"temperature must be 0 \(greedy\) or 0.01 to 2"):
        JudgeConfig(temperature=temperature)
    assert JudgeConfig(temperature=0.01).temperature == 0.01
