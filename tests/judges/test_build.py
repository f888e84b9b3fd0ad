import pytest

from rlvlm.errors import JudgeUnavailable
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
