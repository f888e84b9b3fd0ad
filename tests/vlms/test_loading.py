import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlvlm.core.errors import ModelUnavailable
from rlvlm.vlms import loading
from rlvlm.vlms.config import VLMConfig
from rlvlm.vlms.devices import pick_device
from rlvlm.vlms.files import locate
from rlvlm.vlms.loading import load_vlm


def load(folder, **changes):
    return load_vlm(VLMConfig(model=str(folder), **changes))


def test_precision_and_greedy_defaults(tiny_vlms):
    vlm = load(tiny_vlms["qwen2_vl"])
    assert vlm.model.dtype == torch.float32 and not vlm.model.training
    assert vlm.model.generation_config.do_sample in (None, False)
    assert vlm.model.generation_config.repetition_penalty in (None, 1.0)
    assert load(tiny_vlms["qwen2_vl"], dtype="bfloat16").model.dtype == torch.bfloat16


def test_the_revision_of_a_folder_moves_with_its_weights(tiny_vlms, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(tiny_vlms["qwen3_vl"], folder)
    before = locate(str(folder), "")[1]
    assert before == locate(str(tiny_vlms["qwen3_vl"]), "")[1]
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert locate(str(folder), "")[1] != before


def test_a_model_that_is_not_here_says_how_to_fetch_it():
    with pytest.raises(ModelUnavailable, match="could not be fetched") as caught:
        load("nobody/no-such-vlm", revision="abc")
    assert "hf download nobody/no-such-vlm --revision abc" in caught.value.fix


def test_a_missing_folder_is_named():
    for name in ("/no/such/folder", "./here", "~/there", "just-a-word", ""):
        with pytest.raises(ModelUnavailable, match="does not exist") as caught:
            load(name)
        assert caught.value.fix and caught.value.exit_code == 5


def test_a_language_model_cannot_look(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=32, num_key_value_heads=2, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ModelUnavailable, match="cannot look at images"):
        load(tmp_path)


def damage(folder, name):
    {
        "config": lambda: (folder / "config.json").write_text("{"),
        "other": lambda: (folder / "config.json").write_text(json.dumps({"model_type": "no-such-model"})),
        "weights": lambda: (folder / "model.safetensors").write_bytes(b"torn"),
        "pickle": lambda: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "tokenizer": lambda: (folder / "tokenizer.json").unlink(),
        "processor": lambda: (folder / "preprocessor_config.json").unlink(),
        "template": lambda: (folder / "chat_template.jinja").unlink(),
    }[name]()


@pytest.mark.parametrize("name", ["config", "other", "weights", "pickle", "tokenizer", "processor", "template"])
def test_a_damaged_folder_is_refused_with_a_fix(tiny_vlms, tmp_path, name):
    folder = tmp_path / "copy"
    shutil.copytree(tiny_vlms["qwen3_vl"], folder)
    damage(folder, name)
    with pytest.raises(ModelUnavailable) as caught:
        load(folder)
    assert caught.value.fix and str(folder) in str(caught.value)


def test_auto_leaves_an_unassigned_gpu_alone(monkeypatch):
    monkeypatch.setattr(loading.torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert pick_device("auto", "judge").type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert pick_device("auto", "judge").type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert pick_device("auto", "judge").type == "cuda"
    assert pick_device("cpu", "judge").type == "cpu"


@pytest.mark.parametrize("device", ["cuda:7", "gpu"])
def test_a_device_that_is_not_there(device):
    with pytest.raises(ModelUnavailable):
        pick_device(device, "judge")


def test_a_folder_that_lacks_a_weight_is_refused_where_transformers_would_make_one_up(tiny_vlms, tmp_path):
    folder = shutil.copytree(tiny_vlms["qwen3_vl"], tmp_path / "lacking")
    weights = load_file(folder / "model.safetensors")
    del weights["model.language_model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnavailable, match="lacks 1 weights of a Qwen3VL.* such as .*up_proj"):
        load(folder)


@pytest.mark.parametrize("words", ["CUDA out of memory. Tried to allocate 2.00 GiB.", "can't allocate memory: 9 bytes"])
def test_a_model_that_does_not_fit_is_not_taken_for_a_torn_download(monkeypatch, tmp_path, words):
    def refuse(*_):
        raise RuntimeError(words)

    (tmp_path / "model.safetensors").write_bytes(b"x")
    monkeypatch.setattr(loading, "check_shards", lambda folder: None)
    monkeypatch.setattr(loading, "network_and_names", refuse)
    with pytest.raises(ModelUnavailable, match="GiB on disk, do not fit into the memory of cpu") as caught:
        loading.load_weights(None, tmp_path, VLMConfig(device="cpu"))
    assert "--serve.num-gpus" in caught.value.fix and "download" not in caught.value.fix
