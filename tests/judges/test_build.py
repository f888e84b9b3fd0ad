import pytest

from rlvlm.core.errors import JudgeUnavailable
from rlvlm.judges.build import build_judge
from rlvlm.judges.config import JudgeConfig


def test_the_pocket_backend_takes_any_folder_and_names_a_missing_one(tiny_vlms):
    judge = build_judge(JudgeConfig(model=str(tiny_vlms["qwen3_vl"])))
    assert judge.stamp.judge.startswith("pocket:")
    for backend in ("pocket", "transformers"):
        with pytest.raises(JudgeUnavailable, match="no judge at /no/such/folder") as caught:
            build_judge(JudgeConfig(backend=backend, model="/no/such/folder"))
    assert "--judge.model" in caught.value.fix


def test_the_backend_follows_from_a_models_name_or_size(tmp_path, caplog):
    assert JudgeConfig(model="a-lab/said-once-a-process").backend == "transformers"
    assert "is a hub name, so judge.backend is transformers" in caplog.text
    assert JudgeConfig(model="scorer").backend == JudgeConfig(model=str(tmp_path)).backend == "pocket"
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(4 * 2**30)
    assert JudgeConfig(model=str(tmp_path)).backend == "transformers"
    with pytest.raises(JudgeUnavailable) as caught:  # there is no network here
        build_judge(JudgeConfig(model="no-such-lab/no-such-model"))
    assert "could not be fetched" in str(caught.value) and "rlvlm fetch no-such-lab/no-such-model" in caught.value.fix


def test_an_unknown_backend_gets_a_suggestion():
    hints = {"transformer": "did you mean transformers?", "gemeni": "did you mean gemini?"}
    hints |= {"qwen": "--judge.backend transformers --judge.model Qwen/", "my_judge.py": "my_judge:make_judge"}
    for backend, hint in (hints | {"gpt-4o": "--judge.backend openai --judge.model NAME"}).items():
        with pytest.raises(ValueError, match="judge.backend is one of pocket") as caught:
            JudgeConfig(backend=backend)
        assert hint in str(caught.value)
